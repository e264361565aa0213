"""One way to train and grow networks: make the environments, play them, settle what came of it.

The command, evaluations, recorded episodes, the shards of a training run and `esper.grow` all go
through here; what differs between them is said in a `TrialRules`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from esper.growth.lifecycle import LifecycleRules
from esper.growth.snapshot import HostSnapshot, take_snapshot
from esper.leyline import (
    ConfigError,
    EpisodeOutcome,
    NullRecorder,
    Recorder,
    SeedStateReport,
)
from esper.leyline.events import ShapleyComputed
from esper.tamiyo.situation import Controller, GivesReasons
from esper.tolaria.engine.attribution import attribute_seeds
from esper.tolaria.engine.cooling import Cooler
from esper.tolaria.engine.cycle import GrowthCycle
from esper.tolaria.engine.environment import GrowthEnv
from esper.tolaria.engine.event_log import absent
from esper.tolaria.engine.garden import Budget, Validation
from esper.tolaria.engine.objectives import answers_per_sample, random_guess_loss
from esper.tolaria.engine.population import LoopedPopulation, Population
from esper.tolaria.engine.recipe import HostRecipe, export_network
from esper.tolaria.engine.schedule import RateSchedule
from esper.tolaria.engine.starvation import can_starve
from esper.tolaria.engine.transition import Transition
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.fused.population import FusedPopulation

# (slot, blueprint) pairs of indices.
Topology = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TrialRules:
    """How hosts are trained and may grow.

    steps            decisions, one for each epoch after the first
    budget           caps on the grown network; `max_seeds` caps its seeds at a time
    topology         seeds that every host has from birth, as fossils
    on_panic, keep_best, counterfactuals   as in `GrowthCycle`
    population       how hosts are trained: looped, one after another, or fused, all at once
    start            fresh: the hosts are new, and an epoch warms them up before the first decision;
                     trained: they arrive trained, and are only looked at before it
    schedule         of the learning rate, over the steps or over the budget
    cooling          cool starved hosts: trained ones at the start, any when a seed is germinated;
                     where the loss is no cross entropy nothing is cooled
    max_macs         most multiply-adds that a host may cost in all, `steps` at most; it needs
                     `keep_best`
    extra            that, as a share of what the training of the host had cost; it changes nothing
                     but what controllers see
    """

    steps: int
    incubation: Literal["isolated", "joint"] = "isolated"
    budget: Budget | None = None
    max_seeds: int | None = None
    topology: Topology = ()
    on_panic: Literal["terminate", "continue"] = "continue"
    keep_best: bool = True
    counterfactuals: bool = True
    population: PopulationKind = "looped"
    start: Literal["fresh", "trained"] = "fresh"
    cooling: bool = False
    schedule: RateSchedule | None = None
    max_macs: int | None = None
    extra: float | None = None

    def __post_init__(self) -> None:
        LifecycleRules(self.steps, self.incubation)
        if self.population not in get_args(PopulationKind):
            raise ConfigError(f"hosts are looped or fused, got population {self.population!r}")
        if self.start not in ("fresh", "trained"):
            raise ConfigError(f"hosts start fresh or trained, got start {self.start!r}")
        if self.max_macs is not None and not self.keep_best:
            raise ConfigError("max_macs needs keep_best: what settling costs is not known without")

    @property
    def lifecycle(self) -> LifecycleRules:
        return LifecycleRules(self.steps, self.incubation)


# A run ends with two evaluations: of the network at its best, and of what is kept of it.
SETTLING_EVALUATIONS = 2

# How a network that arrives trained is grown; `steps` is for the caller to say.
RESCUE = TrialRules(
    steps=1,
    incubation="joint",
    start="trained",
    cooling=True,
    schedule=RateSchedule(warmup=0.1, decay=0.5),
)


def host_rules(
    steps: int, schedule: RateSchedule | None, population: PopulationKind = "looped"
) -> TrialRules:
    """Of a host that is trained to its end, not to its best: one that has learnt all it could is
    what there is to grow. Nothing grows meanwhile, so nobody pays for counterfactuals."""
    return TrialRules(
        steps, counterfactuals=False, keep_best=False, population=population, schedule=schedule
    )


@dataclass(frozen=True)
class Trained:
    """A network that was trained, before anyone has looked at test data.

    `model` is the plain module, `snapshot` the network that it was made of, as it can be kept.
    `cpu_seconds` is its share of the processor time of all that were trained with it.
    """

    outcome: EpisodeOutcome
    model: nn.Module
    snapshot: HostSnapshot
    topology: Topology
    cpu_seconds: float


def make_env(
    recipe: HostRecipe,
    keys: Iterable[int],
    rules: TrialRules,
    recorder: Recorder | None = None,
    device: str | torch.device = "cpu",
) -> GrowthEnv:
    """One environment for each key. Host at birth, order of batches and noise are functions of the
    key alone, so that trials that share a key are a pair. Raises ConfigError, with the reason, if
    the rules ask for `fused` hosts and these cannot be."""
    kind = FusedPopulation if rules.population == "fused" else LoopedPopulation
    population: Population = kind(recipe, keys, device)
    output, (_, target) = population.template.output, next(recipe.data.val_batches())
    cooler = Cooler(population, recipe, torch.device(device))
    return GrowthEnv(
        population,
        rules.lifecycle,
        budget=rules.budget,
        max_seeds=rules.max_seeds,
        on_panic=rules.on_panic,
        random_guess_loss=random_guess_loss(recipe.loss, output.outputs if output else None),
        recorder=recorder,
        keep_best=rules.keep_best,
        prefer_later=rules.schedule is not None and rules.schedule.decay > 0.0,
        counterfactuals=rules.counterfactuals,
        answers_per_sample=answers_per_sample(recipe.score, target),
        start=rules.start,
        cooler=cooler if rules.cooling and can_starve(recipe.loss) else None,
        schedule=rules.schedule,
        max_macs=rules.max_macs,
        data_size=None if rules.max_macs is None else recipe.data.size(),
        extra=rules.extra,
    )


def play(
    env: GrowthEnv,
    controller: Controller,
    *,
    topology: Topology = (),
    on_step: Callable[[Transition], None] = lambda transition: None,
    after_epoch: Callable[[], bool] = lambda: True,
) -> bool:
    """Run all environments to their end; False if Ctrl-C ended it before.

    `after_epoch` is called after every epoch, the first included; it gives False to end the run.
    An environment that was brought back from a saved state goes on, with its controller's state.
    """
    try:
        going_on = True
        if env.situation is None:
            controller.reset(env.n_envs)
            env.reset(topology)
            going_on = after_epoch()
        while going_on and env.running.any():
            on_step(env.step(act(env, controller)))
            going_on = after_epoch()
    except KeyboardInterrupt:
        return False
    return True


def act(cycle: GrowthCycle, controller: Controller) -> np.ndarray:
    """The controller's actions [E, 4]; whoever listens is told of its reasons, if it has any."""
    assert cycle.situation is not None
    actions = controller.act(cycle.situation)
    if isinstance(controller, GivesReasons) and not isinstance(cycle.recorder, NullRecorder):
        for event in controller.reasons(actions):
            cycle.recorder.event(event)
    return actions


def train(
    recipe: HostRecipe,
    keys: Sequence[int],
    rules: TrialRules,
    controller: Controller,
    *,
    task: str,
    recorder: Recorder | None = None,
    attribute: bool = True,
    ready: Callable[[GrowthEnv], None] = lambda env: None,
) -> list[Trained]:
    """One trained network for each key; with `attribute`, what its seeds are worth is found out.

    `ready` is shown the environments before they are played. Ctrl-C ends it early; `outcome.ended`
    says so.
    """
    began = time.process_time()
    env = make_env(recipe, keys, rules, recorder)
    ready(env)
    interrupted = not play(env, controller, topology=rules.topology)
    outcomes = settle(
        env,
        np.ones(env.n_envs, dtype=bool),
        task=task,
        controller=controller.name,
        ended="interrupted" if interrupted else "finished",
        attribute=attribute,
    )
    networks = [env.population.network(index) for index in range(env.n_envs)]
    models = [export_network(recipe, network) for network in networks]
    seconds = (time.process_time() - began) / env.n_envs
    return [
        Trained(outcome, model, take_snapshot(network, None), _topology(env, index), seconds)
        for index, (outcome, model, network) in enumerate(
            zip(outcomes, models, networks, strict=True)
        )
    ]


def _topology(env: GrowthEnv, index: int) -> Topology:
    held = np.flatnonzero(env.table.holds_seed[index]).tolist()
    return tuple((slot, int(env.table.blueprint[index, slot])) for slot in held)


def settle(
    env: GrowthCycle,
    envs: np.ndarray,
    *,
    task: str,
    controller: str,
    ended: str = "finished",
    attribute: bool = False,
) -> list[EpisodeOutcome]:
    """Bring hosts (bool[E]) back to their best and sum up their episodes, in order; the recorder
    gets the rows too. `ended` says why no more was trained, where no rollback was the reason. With
    `attribute`, what each of their seeds is worth is found out."""
    validation, best_steps = env.settle(envs)
    outcomes = []
    for index in np.flatnonzero(envs).tolist():
        broken = ended == "finished" and env.broken[index]
        worth = attribute_seeds(env, index, validation) if attribute else None
        outcome = _outcome(
            env,
            index,
            validation,
            None if worth is None else worth[1],
            task=task,
            controller=controller,
            ended="rollback" if broken else ended,
            best_step=int(best_steps[index]),
        )
        env.recorder.outcome(outcome)
        outcomes.append(outcome)
    return outcomes


def _outcome(
    env: GrowthCycle,
    index: int,
    validation: Validation,
    worth: ShapleyComputed | None,
    **circumstances: Any,
) -> EpisodeOutcome:
    garden = env.garden
    counts: dict[str, Any] = {name: int(count[index]) for name, count in garden.counts.items()}
    held = np.flatnonzero(env.table.holds_seed[index]).tolist()
    seeds = (garden.event_log.report(env.table, index, slot) for slot in held)
    return EpisodeOutcome(
        env=index,
        key=int(env.population.keys[index]),
        steps=int(env.steps_taken[index]),
        val_score=absent(validation.score[index]),
        val_loss=absent(validation.loss[index]),
        host_params=garden.host_params,
        params=int(garden.total_params()[index]),
        host_macs=garden.host_macs,
        macs=int(garden.total_macs()[index]),
        train_macs=int(garden.train_macs[index]),
        **counts,
        **circumstances,
        seeds=tuple(_with_worth(seed, worth) for seed in seeds),
        attribution_macs=0 if worth is None else worth.macs,
    )


def _with_worth(seed: SeedStateReport, worth: ShapleyComputed | None) -> SeedStateReport:
    if worth is None or seed.slot_id not in worth.slot_ids:
        return seed
    player, error = worth.slot_ids.index(seed.slot_id), worth.standard_error
    return replace(
        seed,
        shapley=worth.shapley[player],
        shapley_error=None if error is None else error[player],
    )
