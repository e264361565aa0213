"""It learns: a memory, a conditional bandit against MaskablePPO, and growth with a known optimum.

The problems and settings are those of benchmarks/agent_learns.py, which prints the figures.
"""

import statistics

import pytest

from agent_learns import BANDIT, BATCH, CUE, GOAL, GROWTH, learn, maskable_ppo_steps
from esper.simic import analytic

FEW = range(2)
ALL = pytest.param(range(5), marks=pytest.mark.soak, id="five-seeds")


@pytest.mark.parametrize("seeds", [pytest.param(FEW, id="few-seeds"), ALL])
def test_a_cue_is_remembered_over_blanks(seeds):
    assert statistics.median(learn(CUE, seed, goal=1.0).score for seed in seeds) == 1.0


@pytest.mark.parametrize("seeds", [pytest.param(FEW, id="few-seeds"), ALL])
def test_conditional_growth_needs_no_more_steps_than_maskable_ppo(seeds):
    ours = [learn(BANDIT, seed, GOAL) for seed in seeds]
    theirs = statistics.median(maskable_ppo_steps(seed, entropy=0.0) for seed in seeds)
    assert statistics.median(run.score for run in ours) >= GOAL
    assert statistics.median(run.rounds * BATCH for run in ours) <= theirs < BATCH * BANDIT.rounds


@pytest.mark.parametrize("seeds", [pytest.param(FEW, id="few-seeds"), ALL])
def test_the_analytic_growth_problem_is_solved(seeds):
    goal = GOAL * analytic.solve().optimum
    assert statistics.median(learn(GROWTH, seed, goal).score for seed in seeds) >= goal
