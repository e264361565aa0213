"""Train and grow networks: make the environments, play them to their end, settle the results.

    reset:  new hosts -> warm-up epoch (not of trained ones) -> evaluate           -> situation
    step:   apply the actions -> train an epoch -> evaluate (with counterfactuals)
            -> governor -> lifecycle tick                                          -> transition

The order is that of Gymnasium: a step returns the situation after its actions and the epoch.

`esper.grow`, the command, evaluations, recorded episodes and training runs all use this module,
with different `GrowthSettings`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from esper.growth.devices import find_device
from esper.growth.grown_module import GrownModule
from esper.leyline import (
    EpisodeOutcome,
    NullRecorder,
    Recorder,
    SeedStateReport,
)
from esper.leyline.events import ShapleyComputed
from esper.leyline.growth_settings import GrowthSettings, PopulationKind, RateSchedule, Topology
from esper.tamiyo.situation import Controller, GivesReasons, Situation
from esper.tolaria.engine.attribution import attribute_seeds
from esper.tolaria.engine.batches import TensorSource
from esper.tolaria.engine.cooling import Cooler
from esper.tolaria.engine.cycle import GrowthCycle
from esper.tolaria.engine.event_log import Transition, absent
from esper.tolaria.engine.garden import Validation
from esper.tolaria.engine.gradients import can_starve
from esper.tolaria.engine.objectives import answers_per_sample, random_guess_loss
from esper.tolaria.engine.population import LoopedPopulation, Population, TrainReadings
from esper.tolaria.engine.recipe import HostRecipe, export_network
from esper.tolaria.fused.choice import choose_population
from esper.tolaria.fused.population import FusedPopulation


def host_settings(
    steps: int, schedule: RateSchedule | None, population: PopulationKind = "looped"
) -> GrowthSettings:
    """Settings to train a host to its last epoch without growth, for `start="trained"`."""
    return GrowthSettings(
        steps, counterfactuals="none", keep_best=False, population=population, schedule=schedule
    )


@dataclass(frozen=True)
class Trained:
    """A network at the end of its run, before any evaluation on test data. `topology` are the seeds
    that it keeps; `cpu_seconds` is its share of the CPU time of all networks of the run."""

    recipe: HostRecipe
    outcome: EpisodeOutcome
    network: GrownModule
    topology: Topology
    cpu_seconds: float

    @cached_property
    def model(self) -> nn.Module:
        """The network as a plain module."""
        return export_network(self.recipe, self.network)


class GrowthEnv(GrowthCycle):
    """E environments that train their own hosts; a controller's loop needs `reset` and `step`."""

    population: Population

    def reset(self) -> Situation:
        """Train the hosts for one epoch, or only evaluate trained ones; call it once."""
        self.start()
        if self.settings.trained:
            situation = self.finish(TrainReadings.nothing(self.n_envs)).after
            return situation if self.cooler is None else self._cool_at_first(situation)
        return self.finish(self._train()).after

    def _cool_at_first(self, situation: Situation) -> Situation:
        """After the first evaluation, so that the original hosts count for the best epoch."""
        assert self.cooler is not None
        self._cool(self.running, self.affords(self.cooler.cost(self.garden.total_macs())))
        self.situation = self._situation(situation.signals)
        return self.situation

    def step(self, actions: np.ndarray) -> Transition:
        """`actions` is int [E, 4] in the order of HEAD_NAMES. Raises InvalidStateMachineError, and
        changes nothing, if one is illegal."""
        self.begin(actions)
        return self.finish(self._train())

    def _train(self) -> TrainReadings:
        begin, self.progress = self.progress, self._next_progress()
        rates = None
        if self.settings.rates is not None:
            rates = self.settings.rates.factor(np.stack([begin, self.progress], axis=1))
        return self.population.train_epoch(self.running, self.step_count, rates)

    def _next_progress(self) -> np.ndarray:
        """[E]: the progress of each run, from 0 to 1, at the end of the next epoch.

        A budget is divided among the epochs that it covers for the current hosts, so that a
        schedule ends with the last of them.
        """
        first = 1 if self.settings.trained else 0
        epochs, done = self.settings.max_steps + 1 - first, self.step_count - first
        if self.compute_budget.max_macs is None:
            return np.full(self.n_envs, (done + 1) / epochs)
        coming = np.clip(self.compute_budget.epochs(self.best), 1, epochs - done)
        return np.asarray(self.progress + (1.0 - self.progress) / coming)


class Session:
    """Hooks around a run; these do nothing. A session may restore a saved state in `begin`, and end
    the run early, with a `reason`, in `after_epoch`."""

    reason: str | None = None

    def begin(self, env: GrowthEnv, controller: Controller) -> None:
        """Called once, before the first epoch."""

    def after_epoch(self, env: GrowthEnv) -> bool:
        """Called after every epoch, the first included; False ends the run."""
        return True


def make_env(
    recipe: HostRecipe,
    keys: Iterable[int],
    settings: GrowthSettings,
    recorder: Recorder | None = None,
    device: str | torch.device | None = None,
) -> GrowthEnv:
    """One environment for each key, on the device, by default that of the settings. Initial
    weights, order of batches and noise depend on the key alone, so that runs with the same key are
    paired. Raises ConfigError, with the reason, if the population is `fused` and the hosts cannot
    be fused."""
    device = find_device(settings.device) if device is None else torch.device(device)
    if isinstance(recipe.data, TensorSource):
        recipe = replace(recipe, data=recipe.data.on(device))
    if settings.precision is not None:
        recipe = replace(recipe, precision=settings.precision)
    if settings.max_grad_norm is not None:
        recipe = replace(recipe, max_grad_norm=settings.max_grad_norm)
    keys = list(keys)
    kind = settings.population
    if kind == "auto":
        kind = choose_population(recipe, len(keys), kind, device)
    population: Population
    if kind == "fused":
        population = FusedPopulation(recipe, keys, device)
    else:
        population = LoopedPopulation(recipe, keys, device, settings.snapshots)
    output, (_, target) = population.template.output, next(recipe.data.val_batches())
    cools = settings.cools and can_starve(recipe.loss)
    with population.template.given_back():
        return GrowthEnv(
            population,
            settings,
            random_guess_loss=random_guess_loss(recipe.loss, output.outputs if output else None),
            recorder=recorder,
            answers_per_sample=answers_per_sample(recipe.score, target),
            cooler=Cooler(population, recipe, device) if cools else None,
            data_size=None if settings.max_train_macs is None else recipe.data.size(),
        )


def play(
    env: GrowthEnv,
    controller: Controller,
    *,
    on_step: Callable[[Transition], None] = lambda transition: None,
    after_epoch: Callable[[GrowthEnv], bool] = lambda env: True,
) -> bool:
    """Run all environments to their end; False if Ctrl-C ended it early. An environment whose state
    was restored continues from there, and so does its controller."""
    try:
        running = True
        if env.situation is None:
            controller.reset(env.n_envs)
            env.reset()
            running = after_epoch(env)
        while running and env.running.any():
            on_step(env.step(act(env, controller)))
            running = after_epoch(env)
    except KeyboardInterrupt:
        return False
    return True


def act(cycle: GrowthCycle, controller: Controller) -> np.ndarray:
    """The controller's actions [E, 4]; its reasons, if it gives any, are recorded."""
    assert cycle.situation is not None
    actions = controller.act(cycle.situation)
    if isinstance(controller, GivesReasons) and not isinstance(cycle.recorder, NullRecorder):
        for event in controller.reasons(actions):
            cycle.recorder.event(event)
    return actions


def play_run(
    recipe: HostRecipe,
    keys: Sequence[int],
    settings: GrowthSettings,
    controller: Controller | Callable[[GrownModule], Controller],
    recorder: Recorder | None = None,
    *,
    task: str,
    device: str | torch.device | None = None,
    attribute: bool = False,
    session: Session | None = None,
) -> list[Trained]:
    """One run for each key, from the recipe to the best networks. `controller` may be a function of
    the network that returns a controller; `task` is the name in outcomes. With `attribute` the
    Shapley value of each seed is computed.

    Ctrl-C ends it early; `outcome.ended` says so.
    """
    began = time.process_time()
    session = session or Session()
    env = make_env(recipe, keys, settings, recorder, device)
    with env.population.template.given_back():
        chosen = controller(env.population.template) if callable(controller) else controller
        session.begin(env, chosen)
    ended = "finished"
    if session.reason is None and not play(env, chosen, after_epoch=session.after_epoch):
        ended = "interrupted"
    outcomes = settle(
        env,
        np.ones(env.n_envs, dtype=bool),
        task=task,
        controller=chosen.name,
        ended=session.reason or ended,
        attribute=attribute,
    )
    networks = [env.population.network(index) for index in range(env.n_envs)]
    seconds = (time.process_time() - began) / env.n_envs
    return [
        Trained(recipe, outcome, network, _topology(env, index), seconds)
        for index, (outcome, network) in enumerate(zip(outcomes, networks, strict=True))
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
    """Restore hosts (bool[E]) at their best and return the outcomes of their episodes, which are
    also recorded. `ended` is the reason of the end, unless it was a rollback. With `attribute` the
    Shapley value of each seed is computed."""
    validation, best_steps = env.settle(envs)
    outcomes = []
    for index in np.flatnonzero(envs).tolist():
        broken = ended == "finished" and env.broken[index]
        found = attribute_seeds(env, index, validation) if attribute else None
        outcome = _outcome(
            env,
            index,
            validation,
            found,
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
    found: ShapleyComputed | None,
    **circumstances: Any,
) -> EpisodeOutcome:
    garden = env.garden
    counts: dict[str, Any] = {name: int(count[index]) for name, count in garden.counts.items()}
    held = np.flatnonzero(env.table.holds_seed[index]).tolist()
    # Not the number of removals: a rollback may bring back a seed, which is then removed twice.
    counts["culled"] = counts["germinated"] + len(env.settings.topology) - len(held)
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
        seeds=tuple(_with_shapley(seed, found) for seed in seeds),
        attribution_macs=0 if found is None else found.macs,
    )


def _with_shapley(seed: SeedStateReport, found: ShapleyComputed | None) -> SeedStateReport:
    if found is None or seed.slot_id not in found.slot_ids:
        return seed
    player, error = found.slot_ids.index(seed.slot_id), found.standard_error
    return replace(
        seed,
        counterfactual_contribution=found.leave_one_out[player],
        shapley=found.shapley[player],
        shapley_error=None if error is None else error[player],
    )
