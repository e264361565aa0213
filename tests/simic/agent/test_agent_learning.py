"""It learns: a memory, a conditional bandit against MaskablePPO, and growth with a known optimum.

The problems and settings are those of benchmarks/agent_learns.py, which prints the figures.
"""

import statistics

import pytest

from agent_learns import BANDIT, BATCH, CUE, GOAL, GROWTH, learn, maskable_ppo_steps
from esper.simic import analytic

# Key 3 is the quickest to solve the growth problem.
KEYS = pytest.mark.parametrize(
    "keys", [[3], pytest.param(range(5), marks=pytest.mark.soak)], ids=["one-key", "five-keys"]
)


@KEYS
def test_a_cue_is_remembered_over_blanks(keys):
    assert statistics.median(learn(CUE, key, goal=1.0).score for key in keys) == 1.0


@KEYS
def test_conditional_growth_needs_no_more_steps_than_maskable_ppo(keys):
    ours = [learn(BANDIT, key, GOAL) for key in keys]
    theirs = statistics.median(maskable_ppo_steps(key, entropy=0.0) for key in keys)
    assert statistics.median(run.score for run in ours) >= GOAL
    assert statistics.median(run.rounds * BATCH for run in ours) <= theirs < BATCH * BANDIT.rounds


@KEYS
def test_the_analytic_growth_problem_is_solved(keys):
    goal = GOAL * analytic.solve().optimum
    assert statistics.median(learn(GROWTH, key, goal).score for key in keys) >= goal
