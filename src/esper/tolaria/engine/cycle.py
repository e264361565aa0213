"""The two halves of a step, before and after an epoch of training.

begin:   apply the actions
finish:  evaluate (with counterfactuals) -> governor -> lifecycle tick          -> transition
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from esper.growth.lifecycle import age
from esper.growth.slot_table import SlotTable
from esper.leyline import (
    IS_LIVE,
    OP,
    SLOT,
    InvalidStateMachineError,
    LifecycleOp,
    NullRecorder,
    Recorder,
    SeedStage,
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
from esper.tamiyo.situation import SignalTracker, Situation, wait
from esper.tolaria.engine.batches import DataSize
from esper.tolaria.engine.compute_budget import ComputeBudget
from esper.tolaria.engine.cooling import Cooler
from esper.tolaria.engine.event_log import Transition
from esper.tolaria.engine.garden import Garden, SavedHost, Validation
from esper.tolaria.engine.objectives import standard_error
from esper.tolaria.engine.population import Hosts, TrainReadings
from esper.tolaria.governor import Governor, Verdict, panic_event, rollback_event


class GrowthCycle:
    """E growing hosts, whose epochs the caller trains.

    Call `start`, train an epoch, `finish`; then `begin` with actions, train, `finish`, and so on.

    Besides the settings: the loss of a random guess; the number of answers per validation example,
    if the score is a percentage of right answers; the size of an epoch, if the compute is capped;
    and a `cooler`, if starved hosts are cooled.
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
        assert settings.max_steps  # raises ConfigError if it is not set
        self.population, self.settings, self.cooler = population, settings, cooler
        # If the learning rate decays, the latest of equally good epochs is the best one.
        self.prefer_later = settings.rates is not None and settings.rates.decay > 0.0
        self.answers_per_sample = answers_per_sample
        self.recorder: Recorder = recorder or NullRecorder()
        self.n_envs = len(population.keys)
        self.rho = np.full(self.n_envs, np.nan)  # see starvation.py; NaN if not known
        self.garden = Garden(population, settings, self.recorder)
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
        self.removed_kept = np.full(self.n_envs, -1)  # the slot of a kept seed that was removed
        self.macs_between = np.zeros(self.n_envs, dtype=np.int64)  # spent since the last step
        self.actions = wait(self.n_envs)
        self.before: Situation | None = None
        self.situation: Situation | None = None

    @property
    def table(self) -> SlotTable:
        return self.garden.table

    def start(self) -> None:
        """Prepare the hosts for their first epoch."""
        for env in range(self.n_envs):
            for slot, blueprint in self.settings.topology:
                self.garden.plant_fossil(env, slot, blueprint)
            self.garden.plant_first_blocks(env)
        self.compute_budget.check_first_epoch(evaluated_before=self.settings.trained)
        self.save_healthy()

    def save_healthy(self) -> None:
        """The running hosts are the ones to go back to."""
        self._save(self.running, self.step_count)

    def begin(self, actions: np.ndarray) -> None:
        """Apply the actions, before the next epoch."""
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
        slot, op = actions[:, SLOT], actions[:, OP]
        kept = self.table.stage[np.arange(self.n_envs), slot] == SeedStage.FOSSILIZED
        self.removed_kept = np.where(kept & (op == LifecycleOp.CULL), slot, -1)
        fossilized = self.garden.apply(actions, self.step_count, self.score)
        # Kept seeds are permanent: a rollback of the next epoch must not lose them.
        self._save(fossilized, self.step_count - 1)

    def finish(self, train: TrainReadings) -> Transition:
        """After an epoch of training: evaluate, check by the governor, tick."""
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
        missed = acted & ~verdict.rollback & self._missed(validation)
        age(self.table, acted)
        for env in np.flatnonzero(verdict.panic).tolist():
            self.recorder.event(panic_event(env, self.step_count, verdict, validation.loss[env]))
        self._record_epoch(validation, train, acted & ~verdict.rollback & ~missed, verdict.panic)
        goes_back = self.settings.snapshots != "none"
        if verdict.rollback.any() and goes_back:
            validation = self._roll_back(verdict, validation)
        if missed.any():
            validation = self._bring_back(missed, validation)
        self.score = np.where(acted, validation.score, self.score)
        # rho of a restored host is not known.
        self.rho = np.where(acted, np.where(verdict.rollback | missed, np.nan, train.rho), self.rho)
        # Stages do not advance while a network is broken: its scores say nothing about seeds.
        healthy = acted & ~verdict.panic
        # Where nothing but kept seeds acts, a tick leaves the network as it was evaluated.
        same = ~np.any(IS_LIVE[self.table.stage], axis=1)
        self.garden.tick(healthy, self.step_count)
        scores = np.where(same, validation.score, np.nan)
        self._save(healthy, self.step_count, replace(validation, score=scores))

        terminated = verdict.rollback & (self.settings.on_panic == "terminate" or not goes_back)
        over = (self.step_count >= self.settings.max_steps) | ~self.affords()
        truncated = acted & ~terminated & over
        self.running = acted & ~terminated & ~truncated
        self.broken = self.broken | terminated
        signals = self._update_signals(train, validation)
        self.situation = self._situation(signals)
        transition = Transition(
            before=self.before or self.situation,
            actions=self.actions,
            after=self.situation,
            acted=acted,
            terminated=terminated,
            truncated=truncated,
            rolled_back=verdict.rollback & goes_back,
            train_macs=self.garden.train_macs - spent + self.macs_between,
            host_macs=self.garden.host_train_macs - spent_by_hosts,
        )
        self.macs_between = np.zeros_like(self.macs_between)
        self._record_rows(transition)
        return transition

    def affords(self, more: int | np.ndarray = 0) -> np.ndarray:
        """bool[E]: whether the budget covers another epoch after `more` multiply-adds (a number or
        [E]). Check it before compute is spent between two epochs."""
        return self.compute_budget.affords(self.best, more)

    def finish_after(self, train: TrainReadings, loss: np.ndarray, score: np.ndarray) -> None:
        """After an epoch that was trained after the last step: nothing grows any more, but the
        epoch may be the best one. `loss` and `score` ([E]) are those of validation."""
        assert self.situation is not None, "finish comes before finish_after"
        before, everyone = self.situation, np.ones(self.n_envs, dtype=bool)
        self.step_count += 1
        self.steps_taken[:] = self.step_count
        self.batches_done += train.batches
        nothing = Validation.nothing(*self.table.shape, samples=0)
        validation = replace(nothing, loss=loss, score=score)
        self._keep_best(validation, everyone & np.isfinite(loss) & ~self.broken)
        self.situation = self._situation(self._update_signals(train, validation))
        none, no_macs = ~everyone, np.zeros(self.n_envs, dtype=np.int64)
        self._record_rows(
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
        """Cool the starved hosts among `envs` where the budget covers it (`paid`, bool[E])."""
        assert self.cooler is not None
        for env in np.flatnonzero(envs & ~(self.rho >= COOLING_STARVED)).tolist():
            if not paid[env]:
                reason = "the compute budget does not cover measuring the network"
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
                self.governor.forget_losses(env)
                self.recorder.event(HostCooled(env, self.step_count, done.rho, done.tau))

    # --- steps of an epoch ---------------------------------------------------------------------

    def _record_epoch(
        self, validation: Validation, train: TrainReadings, envs: np.ndarray, broken: np.ndarray
    ) -> None:
        """Record the measurements of hosts (bool[E]), some of which are `broken` (bool[E])."""
        # What a broken network shows of its seeds says nothing.
        without = np.where(broken[:, None], np.nan, validation.without_score)
        self.garden.record(replace(validation, without_score=without), envs, train)
        self._keep_best(validation, envs & ~broken)

    def _keep_best(self, validation: Validation, envs: np.ndarray) -> None:
        """Save the hosts among `envs` (bool[E]) that are better than ever; with `prefer_later` also
        those that are worse by no more than chance."""
        if not self.settings.keeps_best:
            return
        margin = np.nan_to_num(self._chance(validation)) if self.prefer_later else 0.0
        better = np.flatnonzero(envs & (validation.score > self.best_score - margin))
        self.best_score[better] = np.maximum(self.best_score, validation.score)[better]
        spare = self._spare(better, self.best, self.governor.saved)
        # Nothing is trained from them.
        found = self.garden.save(better, self.step_count, validation, moments="none", spare=spare)
        for env, saved in zip(better.tolist(), found, strict=True):
            self.best[env] = saved

    def _spare(
        self,
        envs: np.ndarray,
        replaced: list[SavedHost | None],
        others: Sequence[SavedHost | None],
    ) -> list[Tensor]:
        """Drop the hosts `envs` (int[n]) of `replaced` where there is one in `others`, and return
        the tensors that were only theirs: new snapshots are written there."""
        spare: list[Tensor] = []
        for env in envs.tolist():
            old, other = replaced[env], others[env]
            if old is None or old.host is None or other is None or other.host is None:
                continue
            replaced[env] = None
            needed = {id(tensor) for tensor in other.host.all_tensors()}
            spare += [tensor for tensor in old.host.all_tensors() if id(tensor) not in needed]
        return spare

    def _record_rows(self, transition: Transition) -> None:
        for row in self.garden.event_log.metrics_rows(transition, self.garden.total_macs()):
            self.recorder.metrics(row)

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
        """[E]: the standard error of each score, NaN if it cannot be known."""
        answers = (self.answers_per_sample or 0) * validation.samples
        return standard_error(validation.score, answers)

    def resume(self, signals: TrainingSignals) -> None:
        """Continue with restored hosts and table, and the signals of their last epoch."""
        self.situation = self.before = self._situation(signals)

    def _situation(self, signals: TrainingSignals) -> Situation:
        garden = self.garden
        return Situation(
            step=self.step_count,
            max_steps=self.settings.max_steps,
            keys=self.population.keys,
            running=self.running,
            signals=signals,
            table=garden.table.copy(),
            masks=compute_action_masks(
                garden.table,
                garden.limits,
                self.settings,
                self.running,
                self.compute_budget.affords_seed(self.best),
            ),
            slot_config=garden.event_log.slots,
            catalogue=garden.event_log.catalogue,
            host_params=garden.host_params,
            total_params=garden.total_params(),
            left=self.compute_budget.share_left(self.step_count / self.settings.max_steps),
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
        """bool[E]: whether a seed on trial may have caused a bad epoch. Not if another seed was
        removed since the last one: the host had adapted to it."""
        culled = self.garden.counts["culled"]
        removed, self.culled_before = culled > self.culled_before, culled.copy()
        return np.any(self.garden.on_trial(), axis=1) & ~removed

    def _save(self, envs: np.ndarray, trained: int, validation: Validation | None = None) -> None:
        """Save hosts (bool[E]), last trained in step `trained`, as healthy, with their validation
        if they have one."""
        which = np.flatnonzero(envs)
        best = [self.best[env] for env in which]
        same_weights = [each.host if each and each.step == trained else None for each in best]
        spare = self._spare(which, self.governor.saved, self.best)
        found = self.garden.save(which, self.step_count, validation, same_weights, spare=spare)
        for env, saved in zip(which.tolist(), found, strict=True):
            self.governor.save(env, saved)
            if saved.host is None:
                continue
            tensors = saved.host.all_tensors()
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.recorder.event(GovernorSnapshot(env, self.step_count, len(tensors), size))

    def _roll_back(self, verdict: Verdict, broken: Validation) -> Validation:
        """Restore the last healthy hosts, close the slots of suspect seeds, evaluate."""
        envs = np.flatnonzero(verdict.rollback)
        suspects = {env: self.garden.suspects(env, broken) for env in envs.tolist()}
        saved = {env: self.governor.last_healthy(env) for env in suspects}
        self.garden.restore(envs, list(saved.values()))
        self.garden.counts["rollbacks"][envs] += 1
        slots = self.garden.event_log.slots
        for env, blamed in suspects.items():
            names = [(slots.names[slot], slots.slot_ids[slot]) for slot in blamed]
            self.recorder.event(
                rollback_event(env, self.step_count, verdict, broken.loss[env], saved[env], names)
            )
            for slot in blamed:
                self.garden.embargo(env, slot, self.step_count)
            self.governor.reset_panics(env)
        restored = self.garden.evaluate(verdict.rollback)
        self.garden.record(restored, verdict.rollback)
        self._save(verdict.rollback, self.step_count)
        return broken.updated(verdict.rollback, restored)

    def _missed(self, validation: Validation) -> np.ndarray:
        """bool[E]: where the score has fallen by more than noise since a kept seed was removed."""
        least = self.score - np.nan_to_num(self.tracker.noise)
        return (self.removed_kept >= 0) & ~(validation.score >= least)

    def _bring_back(self, envs: np.ndarray, without: Validation) -> Validation:
        """Undo the removals of kept seeds in `envs` (bool[E]), and the epoch after them."""
        which = np.flatnonzero(envs)
        slots = self.removed_kept[which]
        self.garden.bring_back(
            which, slots, [self.governor.last_healthy(env) for env in which.tolist()]
        )
        for env, slot in zip(which.tolist(), slots.tolist(), strict=True):
            event = self.garden.event_log.removal_undone(
                self.table, env, slot, self.step_count, self.score[env], without.score[env]
            )
            self.recorder.event(event)
        restored = self.garden.evaluate(envs)
        self.garden.record(restored, envs)
        return without.updated(envs, restored)

    # --- the end -------------------------------------------------------------------------------

    def settle(self, envs: np.ndarray) -> tuple[Validation, np.ndarray]:
        """Restore hosts (bool[E]) at their best, or last healthy without `keep_best`, or leave them
        as they are without snapshots, and remove live seeds that do not help. Returns their
        validation, and the step that each is from (int[E], -1 elsewhere)."""
        which = np.flatnonzero(envs)
        saved = [self.best[env] or self.governor.last_healthy(env) for env in which.tolist()]
        self.garden.restore(which, saved)
        validation = Validation.nothing(*self.table.shape, samples=0)
        for env, each in zip(which.tolist(), saved, strict=True):
            if each.host is not None or each.step == self.step_count:
                validation.loss[env], validation.score[env] = each.loss, each.score
        validation = self._evaluated(envs & np.isnan(validation.score), validation)
        dropped = self.garden.drop_unproven(envs, self.step_count)
        validation = self._evaluated(dropped, validation)
        steps = np.full(self.n_envs, -1)
        steps[which] = [
            self.steps_taken[env] if each.host is None else each.step
            for env, each in zip(which.tolist(), saved, strict=True)
        ]
        return validation, steps

    def _evaluated(self, envs: np.ndarray, before: Validation) -> Validation:
        """The validation with new measurements of `envs` (bool[E]), which are also recorded."""
        if not envs.any():
            return before
        found = self.garden.evaluate(envs)
        self.garden.record(found, envs)
        return before.updated(envs, found)
