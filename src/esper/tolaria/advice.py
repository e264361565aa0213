"""Look at a trained network: is there anything left to learn, what do a few more steps of its own
bring, and what would a few steps of each candidate bring?

All of it takes about a tenth of what the network may cost further.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from esper.leyline import ConfigError, History
from esper.leyline.events import CoolingRefused, HostCooled
from esper.tamiyo import HeuristicConfig, Situation, TrialPlan
from esper.tolaria.batches import Batch, DataSize, DataSource
from esper.tolaria.environment import GrowthEnv
from esper.tolaria.garden import TRAINING_COST
from esper.tolaria.narrator import absent
from esper.tolaria.objectives import standard_error
from esper.tolaria.population import LoopedPopulation
from esper.tolaria.recipe import HostRecipe
from esper.tolaria.trial import RESCUE, make_env
from esper.tolaria.trials import cut, summed_up, trial_parts
from esper.tolaria.verdict import Advice, Candidate, Continued, Findings, recommend

# What the advice should cost, as a share of the extra budget; and of that, the few more steps. If
# it would come to more than the last, fewer candidates are tried.
SHARE = 0.1
SHARE_OF_STEPS = 1 / 3
MOST_SHARE = 0.15
# Fewer steps than this show nothing.
LEAST_STEPS = 4
# By which the rate is multiplied at the begin and at the end of these steps: at the full rate, and
# with an optimiser that begins anew, a few steps are mostly noise.
RATES = (0.1, 0.0)
# Trials from dear to cheap: steps, examples of each, examples of validation.
TRIALS = ((36, 64, 512), (36, 32, 512), (12, 32, 256), (12, 16, 128), (8, 16, 64), (4, 16, 64))

RULES_OF_THUMB = HeuristicConfig()
VALIDATION = TrialPlan(RULES_OF_THUMB.blueprints_to_try)
# Validation is looked at in pieces of this size: how they differ tells the error of a mean.
PIECE = 16

ALL = np.ones(1, dtype=bool)
FIRST = np.zeros(1, dtype=np.int64)


@dataclass
class Sample:
    """Some of the data: the first examples of validation, in pieces, and of an epoch the first
    `batches` batches; None for all."""

    data: DataSource
    batches: int | None = None

    def train_batches(self, key: int) -> Iterator[Batch]:
        return islice(self.data.train_batches(key), self.batches)

    def val_batches(self) -> Iterator[Batch]:
        for part in trial_parts(self.data, VALIDATION):
            yield from cut(part, PIECE)

    def example(self) -> Any:
        return self.data.example()

    def size(self) -> DataSize:
        size = self.data.size()
        return size if self.batches is None else replace(size, batches=self.batches)


def check_extra(extra: float, epochs: int) -> None:
    """Raises ConfigError if `extra` of what `epochs` epochs cost does not pay for another."""
    if not 1.0 <= extra * epochs < math.inf:
        raise ConfigError(
            f"extra={extra:g} of {epochs} epochs is no budget for one more; give "
            f"{math.ceil(1000 / epochs) / 1000:g} or more"
        )


def advise(
    recipe: HostRecipe,
    key: int,
    *,
    extra: float,
    epochs: int,
    device: str | torch.device = "cpu",
) -> Advice:
    """What to do with the host that the recipe makes, which was trained for `epochs` epochs, for
    `extra` of what they cost. That host is trained and changed here: give a copy.

    Raises ConfigError as `check_extra` does, and if nobody knows how long an epoch is.
    """
    size = recipe.data.size()
    if size.train is None or size.batches is None:
        raise ConfigError("train_loader does not say how long an epoch is; give batches_per_epoch")
    check_extra(extra, epochs)
    data, history = Sample(recipe.data), History()
    rules = replace(RESCUE, steps=int(extra * epochs), counterfactuals=False, keep_best=False)
    env = make_env(replace(recipe, data=data), [key], rules, history, device)
    garden = env.garden
    epoch = garden.host_macs * (TRAINING_COST * size.train + (size.val or 0))
    budget = extra * epochs * epoch
    batch = garden.host_macs * TRAINING_COST * size.train // size.batches
    steps = int(SHARE_OF_STEPS * SHARE * budget) // max(1, batch)
    continued = _continue(env, data, min(max(steps, LEAST_STEPS), size.batches))
    rho, tau, refused = _look(env, history)
    plan = _plan(env, SHARE * budget, MOST_SHARE * budget)
    candidates, usual = _candidates(env.try_candidates(plan, ALL))
    found = Findings(rho, tau, refused, continued, candidates, usual)
    verdict, choice, sentence = recommend(found, extra)
    return Advice(
        verdict=verdict,
        sentence=sentence,
        choice=choice,
        cooled=choice is not None and tau < 1.0,
        findings=found,
        extra=extra,
        host_params=garden.host_params,
        host_macs=garden.host_macs,
        share=float(garden.train_macs[0] / max(1.0, budget)),
    )


def _continue(env: GrowthEnv, data: Sample, steps: int) -> Continued:
    """What `steps` more steps of its own bring to the host, which is as before afterwards."""
    garden, population = env.garden, env.population
    assert isinstance(population, LoopedPopulation)
    saved = garden.save(FIRST, 0)
    before, sizes = population.measure(0, data.val_batches())
    data.batches = steps
    trained = population.train_epoch(ALL, 0, np.array([RATES]))
    data.batches = None
    after, _ = population.measure(0, data.val_batches())
    garden.restore(FIRST, saved)
    garden.charge_training(trained.samples, ALL)
    garden.train_macs += 2 * sum(sizes) * garden.host_macs
    (fall,), (error,) = summed_up(np.stack([before[:, 0], after[:, 0]], axis=1), sizes)
    scores = [np.average(each[:, 1:], axis=0, weights=sizes) for each in (before, after)]
    chance = standard_error(scores[0], (env.answers_per_sample or 0) * sum(sizes))
    return Continued(
        fall=absent(fall),
        error=absent(error),
        score=absent(float((scores[1] - scores[0])[0])),
        chance=absent(float(chance[0])),
    )


def _look(env: GrowthEnv, history: History) -> tuple[float | None, float, str | None]:
    """rho and tau of the host, which is cooled from now on if it is starved; and why it is not."""
    env.reset()
    for event in history.events:
        if isinstance(event, HostCooled):
            return event.rho, event.tau, None
        if isinstance(event, CoolingRefused):
            return absent(env.rho[0]), 1.0, event.reason
    return absent(env.rho[0]), 1.0, None


def _plan(env: GrowthEnv, allowed: float, most: float) -> TrialPlan:
    """The best trials with which all that was run stays within `allowed` multiply-adds. If none do,
    the cheapest of as many blueprints as stay within `most`, and of one at least."""
    assert env.situation is not None
    masks, catalogue = env.situation.masks, env.situation.catalogue
    fits = np.any(env.garden.limits.fits, axis=0).tolist()
    fitting = [name for name, fit in zip(catalogue.names, fits, strict=True) if fit]
    names = [name for name in RULES_OF_THUMB.blueprints_to_try if name in fitting] or fitting

    def total(plan: TrialPlan) -> float:
        trials = env.trial_macs(plan.candidates(masks, catalogue), plan)
        return float((env.garden.train_macs + trials)[0])

    plans = [TrialPlan(tuple(names), *each) for each in TRIALS]
    fewer = [replace(plans[-1], blueprints=tuple(names[:n])) for n in range(len(names), 0, -1)]
    paid = [plan for plan in plans if total(plan) <= allowed]
    paid += [plan for plan in fewer if total(plan) <= most]
    return paid[0] if paid else fewer[-1]


def _candidates(situation: Situation) -> tuple[tuple[Candidate, ...], Candidate | None]:
    """What was tried, best first; and that of it which the heuristic would plant first."""
    trials, rotation = situation.trials, RULES_OF_THUMB.blueprint_rotation
    if trials is None:
        return (), None
    places = np.argwhere(~np.isnan(trials.gain[0])).tolist()
    found = [
        Candidate(
            module=situation.slot_config.names[slot],
            blueprint=situation.catalogue[blueprint].name,
            gain=absent(trials.gain[0, slot, blueprint]),
            error=absent(trials.error[0, slot, blueprint]),
            params=int(trials.params[slot, blueprint]),
            macs=int(trials.macs[slot, blueprint]),
        )
        for slot, blueprint in places
    ]

    def turn(candidate: Candidate) -> int:
        known = candidate.blueprint in rotation
        return rotation.index(candidate.blueprint) if known else len(rotation)

    in_first = [each for each in found if each.module == found[0].module]
    ranked = sorted(found, key=lambda each: -math.inf if each.gain is None else each.gain)
    return tuple(reversed(ranked)), min(in_first, key=turn)
