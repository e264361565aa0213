"""The vectorised growth environment: E host trainings, one decision for each per epoch.

    reset:  new hosts -> warm-up epoch -> evaluate                                 -> situation
    step:   apply the actions -> train an epoch -> evaluate (with counterfactuals)
            -> governor -> lifecycle tick                                          -> transition

Gymnasium's order: the action comes first, its consequences follow, and the situation that comes
back is the one after all of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from esper.growth import LifecycleRules, SlotTable, age
from esper.leyline import InvalidStateMachineError, NullRecorder, Recorder, TrainingSignals
from esper.leyline.events import (
    GovernorPanic,
    GovernorRollback,
    GovernorSnapshot,
    HostStabilized,
)
from esper.tamiyo import (
    SignalTracker,
    Situation,
    TrialPlan,
    TrialScores,
    compute_action_masks,
    wait,
)
from esper.tolaria.garden import Budget, Garden, SavedHost, Validation
from esper.tolaria.governor import Governor, Verdict
from esper.tolaria.narrator import absent
from esper.tolaria.objectives import standard_error
from esper.tolaria.population import Hosts, Population, TrainReadings
from esper.tolaria.transition import Transition


class GrowthCycle:
    """E growing hosts, step by step around epochs that somebody else trains.

    Call `start`, train an epoch, `finish`; then `begin` with actions, train, `finish`, and so on.

    on_panic         what a rollback means: the end of the episode ('terminate'), or that the run
                     goes on without the culprit ('continue')
    keep_best        also keep each host as it was at its best validation score, for `settle`
    counterfactuals  measure what every seed is worth by leaving it out; without, a network that is
                     not going to change pays for plain validation only
    answers_per_sample   of validation, where the score is the percentage of right ones
    """

    def __init__(
        self,
        population: Hosts,
        rules: LifecycleRules,
        *,
        budget: Budget | None = None,
        max_seeds: int | None = None,
        on_panic: Literal["terminate", "continue"] = "terminate",
        random_guess_loss: float | None = None,
        recorder: Recorder | None = None,
        keep_best: bool = False,
        counterfactuals: bool = True,
        answers_per_sample: int | None = None,
    ) -> None:
        self.population, self.rules = population, rules
        self.on_panic, self.keep_best = on_panic, keep_best
        self.answers_per_sample = answers_per_sample
        self.recorder: Recorder = recorder or NullRecorder()
        self.n_envs = len(population.keys)
        self.garden = Garden(
            population, rules, budget or Budget(), max_seeds, self.recorder, counterfactuals
        )
        self.tracker = SignalTracker(self.n_envs)
        self.governor = Governor(self.n_envs, random_guess_loss)
        self.running = np.ones(self.n_envs, dtype=bool)
        self.broken = np.zeros(self.n_envs, dtype=bool)  # the governor has ended the episode
        self.step_count = 0
        self.batches_done = 0
        self.score = np.full(self.n_envs, np.nan)
        self.best: list[SavedHost | None] = [None] * self.n_envs
        self.best_score = np.full(self.n_envs, -np.inf)
        self.culled_before = np.zeros(self.n_envs, dtype=np.int64)
        self.trial_macs = np.zeros(self.n_envs, dtype=np.int64)  # since the last step
        self.actions = wait(self.n_envs)
        self.before: Situation | None = None
        self.situation: Situation | None = None

    @property
    def table(self) -> SlotTable:
        return self.garden.table

    def start(self, topology: Sequence[tuple[int, int]] = ()) -> None:
        """Make the hosts ready for their first epoch."""
        for env in range(self.n_envs):
            for slot, blueprint in topology:
                self.garden.plant_fossil(env, slot, blueprint)
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
            self._announce_panic(env, verdict, validation)
        self._take_in(validation, train, acted & ~verdict.rollback, verdict.panic)
        if verdict.rollback.any():
            validation = self._roll_back(verdict, validation)
        self.score = np.where(acted, validation.score, self.score)
        # Nothing moves on while a network is broken: what it shows is not the seeds' doing.
        healthy = acted & ~verdict.panic
        self.garden.tick(healthy, self.step_count)
        self._save(healthy)

        terminated = verdict.rollback & (self.on_panic == "terminate")
        truncated = acted & ~terminated & (self.step_count >= self.rules.max_steps)
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
            train_macs=self.garden.train_macs - spent + self.trial_macs,
            host_macs=self.garden.host_train_macs - spent_by_hosts,
        )
        self.trial_macs = np.zeros_like(self.trial_macs)
        self._tell(transition)
        return transition

    def finish_after(self, train: TrainReadings, loss: np.ndarray, score: np.ndarray) -> None:
        """Take in an epoch that was trained after the last step: nothing changes any more, but the
        hosts are compared with their best. `loss` and `score` ([E]) are those of validation."""
        assert self.situation is not None, "there is no epoch after the last before the first"
        before, everyone = self.situation, np.ones(self.n_envs, dtype=bool)
        self.step_count += 1
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
        """Remember the hosts among `envs` (bool[E]) that have never been better."""
        if not self.keep_best:
            return
        better = np.flatnonzero(envs & (validation.score > self.best_score))
        self.best_score[better] = validation.score[better]
        for env, saved in zip(better.tolist(), self._snapshots(better), strict=True):
            self.best[env] = saved

    def _tell(self, transition: Transition) -> None:
        for row in self.garden.narrator.metrics_rows(transition, self.garden.total_macs()):
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
            masks=compute_action_masks(garden.table, garden.limits, self.rules, self.running),
            slot_config=garden.narrator.slots,
            catalogue=garden.narrator.catalogue,
            host_params=garden.host_params,
            total_params=garden.total_params(),
            max_seeds=garden.limits.max_seeds,
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

    def _announce_panic(self, env: int, verdict: Verdict, validation: Validation) -> None:
        self.recorder.event(
            GovernorPanic(
                env,
                self.step_count,
                reason=verdict.reasons[env],
                loss=absent(validation.loss[env]),
                threshold=absent(verdict.threshold[env]),
                consecutive_panics=int(verdict.consecutive[env]),
            )
        )

    def _roll_back(self, verdict: Verdict, broken: Validation) -> Validation:
        """Restore the last healthy hosts, close their culprits' slots, evaluate what is left."""
        envs = np.flatnonzero(verdict.rollback)
        culprits = {env: self.garden.suspects(env, broken) for env in envs.tolist()}
        saved = {env: self.governor.last_healthy(env) for env in culprits}
        self.garden.restore(envs, list(saved.values()))
        self.garden.counts["rollbacks"][envs] += 1
        slots = self.garden.narrator.slots
        for env, blamed in culprits.items():
            self.recorder.event(
                GovernorRollback(
                    env,
                    self.step_count,
                    reason=verdict.reasons[env],
                    loss_at_panic=absent(broken.loss[env]),
                    loss_threshold=absent(verdict.threshold[env]),
                    consecutive_panics=int(verdict.consecutive[env]),
                    restored_step=saved[env].step,
                    culprit_modules=tuple(slots.names[slot] for slot in blamed),
                    culprit_slots=tuple(slots.slot_ids[slot] for slot in blamed),
                )
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


class GrowthEnv(GrowthCycle):
    """E environments that train their own hosts: `reset` and `step` are all a controller's loop
    needs. The settings are those of `GrowthCycle`."""

    population: Population

    def reset(self, topology: Sequence[tuple[int, int]] = ()) -> Situation:
        """Warm up the hosts for an epoch; call it once. `topology` lists (slot, blueprint) pairs
        that every host has from birth, as fossils."""
        self.start(topology)
        return self.finish(self.population.train_epoch(self.running, 0)).after

    def try_candidates(self, plan: TrialPlan, envs: np.ndarray) -> Situation:
        """Find out what candidates would bring to some running hosts (bool[E]) before the next
        step; the situation then has it."""
        assert self.situation is not None, "reset comes before the first trial"
        garden, situation = self.garden, self.situation
        tried = plan.candidates(situation.masks, situation.catalogue)
        tried &= (envs & self.running)[:, None, None]
        if not tried.any():
            return situation
        found = self.population.try_candidates(tried, plan, self.step_count)
        spent = garden.charge_trials(tried, found)
        self.trial_macs += spent
        scores = TrialScores(
            found.gain, found.error, garden.limits.params, garden.limits.macs, self.step_count
        )
        for env in np.flatnonzero(tried.any(axis=(1, 2))).tolist():
            self.recorder.event(garden.narrator.trials(scores, env, int(spent[env])))
        self.situation = replace(situation, trials=scores)
        return self.situation

    def step(self, actions: np.ndarray) -> Transition:
        """`actions` is int [E, 4] in the order of HEAD_NAMES. An illegal one raises
        InvalidStateMachineError and changes nothing."""
        self.begin(actions)
        return self.finish(self.population.train_epoch(self.running, self.step_count))
