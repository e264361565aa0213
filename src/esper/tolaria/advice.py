"""What to do with a network that has been trained: grow it, go on with it, or train a wider one.

The network is looked at as it is: does it still learn from its data, what do a few more steps of
its own bring, and what would the same few steps of each candidate bring?
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from esper.leyline.constants import STARVED_BELOW
from esper.tamiyo import TrialPlan
from esper.tolaria.environment import GrowthEnv
from esper.tolaria.narrator import absent
from esper.tolaria.population import HostRecipe
from esper.tolaria.trial import RESCUE, make_env

Verdict = Literal["grow", "continue", "retrain"]

# From this share of its training on, a wider network trained anew was better than a grown one; see
# docs/claims.md.
RETRAIN_FROM = 0.6
# A gain counts if it is so many times its standard error.
CLEAR = 2.0


@dataclass(frozen=True)
class Candidate:
    """A seed that was tried. `gain` is the fall of the validation loss in a few steps, with its
    standard error (None if not known); costs are parameters and multiply-adds per example."""

    module: str
    blueprint: str
    gain: float
    error: float | None
    params: int
    macs: int

    @property
    def clear(self) -> bool:
        return self.gain > CLEAR * (self.error or 0.0)


@dataclass(frozen=True)
class Advice:
    """What to do with a trained network for `extra` of what its training cost, and why.

    rho         how far its answers are from right ones on training data, 0 to 1.4: below 0.25 it is
                `starved`, there is nothing left to learn from; None if it is no classifier
    continued   fall of the validation loss by a few more steps of its own
    plateaued   they brought nothing
    candidates  what was tried, best first
    share       what the advice cost, as a share of the extra budget
    """

    verdict: Verdict
    reason: str
    rho: float | None
    starved: bool
    continued: float
    plateaued: bool
    candidates: tuple[Candidate, ...]
    host_params: int
    host_macs: int
    share: float


def advise(
    recipe: HostRecipe, key: int, *, plan: TrialPlan, extra: float, epochs: int
) -> Advice:
    """Look at the host that the recipe makes, which was trained for `epochs` epochs."""
    env = make_env(recipe, [key], replace(RESCUE, steps=1, counterfactuals=False))
    env.reset()
    env.try_candidates(plan, np.ones(1, dtype=bool))
    raise NotImplementedError
