"""The two halves of a step around an epoch that somebody else trains.

begin:   apply the actions
finish:  evaluate (with counterfactuals) -> governor -> lifecycle tick          -> transition
"""

from dataclasses import replace

import numpy as np

from esper.growth.lifecycle import LifecycleRules, age
from esper.growth.slot_table import SlotTable
from esper.leyline import (
    ConfigError,
    InvalidStateMachineError,
    LifecycleOp,
    NullRecorder,
    Recorder,
    TrainingSignals,
)
from esper.leyline.constants import COOLING_STARVED, COOLING_TARGET
from esper.leyline.events import (
    CoolingRefused,
    GovernorSnapshot,
    HostCooled,
    HostStabilized,
)
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.policy.action_masks import compute_action_masks
from esper.tamiyo.situation import Situation, wait
from esper.tamiyo.tracker import SignalTracker
from esper.tolaria.engine.batches import DataSize
from esper.tolaria.engine.compute_budget import ComputeBudget
from esper.tolaria.engine.cooling import Cooler
from esper.tolaria.engine.garden import Garden, SavedHost, Validation
from esper.tolaria.engine.objectives import standard_error
from esper.tolaria.engine.population import Hosts, TrainReadings
from esper.tolaria.engine.transition import Transition
from esper.tolaria.governor import Governor, Verdict, panic_event, rollback_event


def lifecycle_rules(settings: GrowthSettings) -> LifecycleRules:
    """Raises ConfigError without a number of steps."""
    if settings.steps is None:
        raise ConfigError("the number of steps is not set; give steps=...")
    return LifecycleRules(
        settings.steps,
        settings.seeds_incubate,
        settings.blending_steps,
        settings.min_gradient_ratio,
        settings.min_contribution,
    )


class GrowthCycle:
    """E growing hosts, step by step around epochs that somebody else trains.

    Call `start`, train an epoch, `finish`; then `begin` with actions, train, `finish`, and so on.

    `settings` say how. What they leave open: the loss of a random guess (`random_guess_loss`), the
    number of `answers_per_sample` of validation where the score is a percentage of right ones, the
    size of an epoch (`data_size`) where the compute is capped, and what cools the hosts (`cooler`).
    """

    def __init__(
        self,
        population: Hosts,
        settings: GrowthSettings,
        *,
        random_guess_loss: float | None = None,
        recorder: Recorder | None = None,
        answers_per_sample: int | None = None,
        data_size: DataSize | None = None,
        cooler: Cooler | None = None,
    ) -> None:
        self.population, self.settings, self.cooler = population, settings, cooler
        self.rules = lifecycle_rules(settings)
        # Where the learning rate decays, the latest of equally good epochs is the best one.
        self.prefer_later = settings.rates is not None and settings.rates.decay > 0.0
        self.answers_per_sample = answers_per_sample
        self.recorder: Recorder = recorder or NullRecorder()
        self.n_envs = len(population.keys)
        self.rho = np.full(self.n_envs, np.nan)  # how much is left to learn, if known
        self.garden = Garden(population, self.rules, settings, self.recorder)
        self.tracker = SignalTracker(self.n_envs)
        self.governor = Governor(self.n_envs, random_guess_loss, trained=settings.trained)
        self.running = np.ones(self.n_envs, dtype=bool)
        self.broken = np.zeros(self.n_envs, dtype=bool)  # the governor has ended the episode
        self.step_count = 0
        self.steps_taken = np.zeros(self.n_envs, dtype=np.int64)
        self.batches_done = 0
        self.progress = np.zeros(self.n_envs)  # of the run, from 0 to 1
        self.compute_budget = ComputeBudget(self.garden, settings.max_train_macs, data_size)
        self.score = np.full(self.n_envs, np.nan)
        self.best: list[SavedHost | None] = [None] * self.n_envs
        self.best_score = np.full(self.n_envs, -np.inf)
        self.culled_before = np.zeros(self.n_envs, dtype=np.int64)
        self.macs_between = np.zeros(self.n_envs, dtype=np.int64)  # spent since the last step
        self.actions = wait(self.n_envs)
        self.before: Situation | None = None
        self.situation: Situation | None = None

    @property
    def table(self) -> SlotTable:
        return self.garden.table

    def start(self) -> None:
        """Make the hosts ready for their first epoch."""
        for env in range(self.n_envs):
            for slot, blueprint in self.settings.topology:
                self.garden.plant_fossil(env, slot, blueprint)
        self.compute_budget.check_first_epoch(looks=self.settings.trained)
        self._save(self.running)

    def begin(self, actions: np.ndarray) -> None:
        """Apply the actions; the epoch that shows their consequences comes next."""
        assert self.situation is not None, "reset comes before the first step"
        if not self.running.any():
            raise InvalidStateMachineError("the episode is over; make a new environment")
        legal = self.situation.masks.allows(actions)
        if not legal.all():
            env = int(np.flatnonzero(~legal)[0])
            raise InvalidStateMachineError(
                f"action {actions[env].tolist()} is not legal in environment {env}"
            )
        self.before, self.actions = self.situation, actions.copy()
        self.step_count += 1
        self._cool_where_seeds_come()
        fossilized = self.garden.apply(actions, self.step_count, self.score)
        # Fossils are for good: a rollback of this very epoch must not lose this one.
        self._save(fossilized)

    def finish(self, train: TrainReadings) -> Transition:
        """Take in an epoch of training: evaluate, govern, tick."""
        acted, spent = self.running, self.garden.train_macs.copy()
        spent_by_hosts = self.garden.host_train_macs.copy()
        self.batches_done += train.batches
        self.garden.charge_training(train.samples, acted)
        validation = self.garden.evaluate(acted)
        self.compute_budget.note(train.samples, validation.samples)
        self.steps_taken[acted] = self.step_count
        verdict = self.governor.check(
            validation.loss,
            validation.score,
            train.finite,
            acted,
            self._on_trial(),
            self.tracker.noise,
        )
        age(self.table, acted)
        for env in np.flatnonzero(verdict.panic).tolist():
            self.recorder.event(panic_event(env, self.step_count, verdict, validation.loss[env]))
        self._take_in(validation, train, acted & ~verdict.rollback, verdict.panic)
        if verdict.rollback.any():
            validation = self._roll_back(verdict, validation)
        self.score = np.where(acted, validation.score, self.score)
        # What a rollback brings back was not measured.
        self.rho = np.where(acted, np.where(verdict.rollback, np.nan, train.rho), self.rho)
        # Nothing moves on while a network is broken: what it shows is not the seeds' doing.
        healthy = acted & ~verdict.panic
        self.garden.tick(healthy, self.step_count)
        self._save(healthy)

        terminated = verdict.rollback & (self.settings.on_panic == "terminate")
        over = (self.step_count >= self.rules.max_steps) | ~self.affords()
        truncated = acted & ~terminated & over
        self.running = acted & ~terminated & ~truncated
        self.broken = self.broken | terminated
        signals = self._update_signals(train, validation)
        self.situation = self._look(signals)
        transition = Transition(
            before=self.before or self.situation,
            actions=self.actions,
            after=self.situation,
            acted=acted,
            terminated=terminated,
            truncated=truncated,
            rolled_back=verdict.rollback,
            train_macs=self.garden.train_macs - spent + self.macs_between,
            host_macs=self.garden.host_train_macs - spent_by_hosts,
        )
        self.macs_between = np.zeros_like(self.macs_between)
        self._tell(transition)
        return transition

    def affords(self, more: int | np.ndarray = 0) -> np.ndarray:
        """bool[E]: would the budget pay for another epoch after `more` multiply-adds (of all, or
        [E])? Ask it before anything is spent between two epochs."""
        return self.compute_budget.affords(self.best, more)

    def finish_after(self, train: TrainReadings, loss: np.ndarray, score: np.ndarray) -> None:
        """Take in an epoch that was trained after the last step: nothing changes any more, but the
        hosts are compared with their best. `loss` and `score` ([E]) are those of validation."""
        assert self.situation is not None, "there is no epoch after the last before the first"
        before, everyone = self.situation, np.ones(self.n_envs, dtype=bool)
        self.step_count += 1
        self.steps_taken[:] = self.step_count
        self.batches_done += train.batches
        nothing = Validation.nothing(*self.table.shape, samples=0)
        validation = replace(nothing, loss=loss, score=score)
        self._keep_best(validation, everyone & np.isfinite(loss) & ~self.broken)
        self.situation = self._look(self._update_signals(train, validation))
        none, no_macs = ~everyone, np.zeros(self.n_envs, dtype=np.int64)
        self._tell(
            Transition(
                before=before,
                actions=wait(self.n_envs),
                after=self.situation,
                acted=everyone,
                terminated=none,
                truncated=none,
                rolled_back=none,
                train_macs=no_macs,
                host_macs=no_macs,
            )
        )

    # --- cooling -------------------------------------------------------------------------------

    def _cool_where_seeds_come(self) -> None:
        if self.cooler is None:
            return
        slot, blueprint, _, op = self.actions.T
        cost = self.cooler.cost(self.garden.total_macs())
        paid, seeds = self.affords(cost), self.compute_budget.affords_seed(self.best, cost)
        if seeds is not None:
            paid = seeds[np.arange(self.n_envs), slot, blueprint]
        self._cool(self.running & (op == LifecycleOp.GERMINATE), paid)

    def _cool(self, envs: np.ndarray, paid: np.ndarray) -> None:
        """Cool the hosts among `envs` that are starved, where it is `paid` for (bool[E])."""
        assert self.cooler is not None
        for env in np.flatnonzero(envs & ~(self.rho >= COOLING_STARVED)).tolist():
            if not paid[env]:
                reason = "the budget does not pay for looking at it"
                self.recorder.event(CoolingRefused(env, self.step_count, reason))
                continue
            done = self.cooler.cool(env, self.step_count)
            macs = done.samples * int(self.garden.total_macs()[env])
            self.garden.train_macs[env] += macs
            self.macs_between[env] += macs
            self.rho[env] = done.rho
            if done.refused is not None:
                self.recorder.event(CoolingRefused(env, self.step_count, done.refused))
            elif done.tau < 1.0:
                self.rho[env] = COOLING_TARGET
                self.governor.renew(env)
                self.recorder.event(HostCooled(env, self.step_count, done.rho, done.tau))

    # --- parts of a step -----------------------------------------------------------------------

    def _take_in(
        self, validation: Validation, train: TrainReadings, envs: np.ndarray, broken: np.ndarray
    ) -> None:
        """Note what was measured of hosts (bool[E]); which of them are `broken` (bool[E])."""
        self.garden.record(validation, envs, train)
        # What is measured on a broken network says nothing about its seeds.
        self.table.contribution[envs & broken] = np.nan
        self._keep_best(validation, envs & ~broken)

    def _keep_best(self, validation: Validation, envs: np.ndarray) -> None:
        """Remember the hosts among `envs` (bool[E]) that have never been better; with
        `prefer_later`, never better by more than chance."""
        if not self.settings.keep_best:
            return
        margin = np.nan_to_num(self._chance(validation)) if self.prefer_later else 0.0
        better = np.flatnonzero(envs & (validation.score > self.best_score - margin))
        self.best_score[better] = np.maximum(self.best_score, validation.score)[better]
        for env, saved in zip(better.tolist(), self._snapshots(better), strict=True):
            self.best[env] = saved

    def _tell(self, transition: Transition) -> None:
        for row in self.garden.event_log.metrics_rows(transition, self.garden.total_macs()):
            self.recorder.metrics(row)

    def _snapshots(self, envs: np.ndarray) -> list[SavedHost]:
        return self.garden.save(envs, self.step_count) if len(envs) else []

    def _update_signals(self, train: TrainReadings, validation: Validation) -> TrainingSignals:
        was_stable = self.tracker.stabilized
        signals = self.tracker.update(
            epoch=self.step_count,
            global_step=self.batches_done,
            train_loss=train.loss,
            train_score=train.score,
            val_loss=validation.loss,
            val_score=validation.score,
            chance=self._chance(validation),
        )
        self.table.noise[:] = self.tracker.noise[:, None]
        for env in np.flatnonzero(signals.host_stabilized & ~was_stable).tolist():
            self.recorder.event(HostStabilized(env, self.step_count, signals.val_loss[env].item()))
        return signals

    def _chance(self, validation: Validation) -> np.ndarray:
        """[E]: how far chance alone moves each score, NaN where that cannot be known."""
        answers = (self.answers_per_sample or 0) * validation.samples
        return standard_error(validation.score, answers)

    def resume(self, signals: TrainingSignals) -> None:
        """Look at hosts and table as they were brought back, with their last epoch's signals."""
        self.situation = self.before = self._look(signals)

    def _look(self, signals: TrainingSignals) -> Situation:
        garden = self.garden
        return Situation(
            step=self.step_count,
            max_steps=self.rules.max_steps,
            keys=self.population.keys,
            running=self.running,
            signals=signals,
            table=garden.table.copy(),
            masks=compute_action_masks(
                garden.table,
                garden.limits,
                self.rules,
                self.running,
                self.compute_budget.affords_seed(self.best),
            ),
            slot_config=garden.event_log.slots,
            catalogue=garden.event_log.catalogue,
            host_params=garden.host_params,
            total_params=garden.total_params(),
            left=self.compute_budget.share_left(self.step_count / self.rules.max_steps),
            max_seeds=garden.limits.max_seeds,
            trained=self.settings.trained,
            facts=garden.facts,
            extra=np.full(
                self.n_envs, np.nan if self.settings.extra is None else self.settings.extra
            ),
            rho=self.rho.copy(),
        )

    # --- the governor --------------------------------------------------------------------------

    def _on_trial(self) -> np.ndarray:
        """bool[E]: can a seed on trial be blamed for what this epoch showed?

        Not where another was removed since the last one: the host misses what it had adapted to.
        """
        culled = self.garden.counts["culled"]
        removed, self.culled_before = culled > self.culled_before, culled.copy()
        return np.any(self.garden.on_trial(), axis=1) & ~removed

    def _save(self, envs: np.ndarray) -> None:
        """Remember hosts (bool[E]) as healthy."""
        which = np.flatnonzero(envs)
        for env, saved in zip(which.tolist(), self._snapshots(which), strict=True):
            self.governor.save(env, saved)
            tensors = saved.host.all_tensors()
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.recorder.event(GovernorSnapshot(env, self.step_count, len(tensors), size))

    def _roll_back(self, verdict: Verdict, broken: Validation) -> Validation:
        """Restore the last healthy hosts, close their culprits' slots, evaluate what is left."""
        envs = np.flatnonzero(verdict.rollback)
        culprits = {env: self.garden.suspects(env, broken) for env in envs.tolist()}
        saved = {env: self.governor.last_healthy(env) for env in culprits}
        self.garden.restore(envs, list(saved.values()))
        self.garden.counts["rollbacks"][envs] += 1
        slots = self.garden.event_log.slots
        for env, blamed in culprits.items():
            names = [(slots.names[slot], slots.slot_ids[slot]) for slot in blamed]
            self.recorder.event(
                rollback_event(env, self.step_count, verdict, broken.loss[env], saved[env], names)
            )
            for slot in blamed:
                self.garden.embargo(env, slot, self.step_count)
            self.governor.forgive(env)
        mended = self.garden.evaluate(verdict.rollback)
        self.garden.record(mended, verdict.rollback)
        self._save(verdict.rollback)
        return broken.updated(verdict.rollback, mended)

    # --- the end -------------------------------------------------------------------------------

    def settle(self, envs: np.ndarray) -> tuple[Validation, np.ndarray]:
        """Bring hosts (bool[E]) back as they were at their best, or last healthy without
        `keep_best`, and drop live seeds that do not help them. Gives what is measured of them then,
        and the step that each is from (int[E], -1 elsewhere)."""
        which = np.flatnonzero(envs)
        saved = [self.best[env] or self.governor.last_healthy(env) for env in which.tolist()]
        self.garden.restore(which, saved)
        self.garden.record(self.garden.evaluate(envs), envs)
        self.garden.drop_unproven(envs, self.step_count)
        validation = self.garden.evaluate(envs)
        self.garden.record(validation, envs)
        steps = np.full(self.n_envs, -1)
        steps[which] = [each.step for each in saved]
        return validation, steps
