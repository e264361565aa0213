"""The vectorised growth environment: E host trainings, one decision for each per epoch.

    reset:  new hosts -> warm-up epoch -> evaluate                                 -> situation
    step:   apply the actions -> train an epoch -> evaluate (with counterfactuals)
            -> governor -> lifecycle tick                                          -> transition

Gymnasium's order: the action comes first, its consequences follow, and the situation that comes
back is the one after all of them.
"""

from collections.abc import Sequence
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
from esper.tamiyo import SignalTracker, Situation, compute_action_masks, wait
from esper.tolaria.garden import Budget, Garden, SavedHost
from esper.tolaria.governor import Governor, Verdict
from esper.tolaria.narrator import absent
from esper.tolaria.population import Evaluation, Population, TrainReadings
from esper.tolaria.transition import Transition

_ABSENT = np.full(1, np.nan)
NOT_EVALUATED = Evaluation(loss=_ABSENT, score=_ABSENT, alpha=_ABSENT, samples=0)


class GrowthEnv:
    """E environments. `reset` and `step` are all a controller's loop needs.

    on_panic         what a rollback means: the end of the episode ('terminate'), or that the run
                     goes on without the culprit ('continue')
    keep_best        also keep each host as it was at its best validation score, for `settle`
    counterfactuals  measure what every seed is worth by leaving it out; without, a network that is
                     not going to change pays for plain validation only
    """

    def __init__(
        self,
        population: Population,
        rules: LifecycleRules,
        *,
        budget: Budget | None = None,
        max_seeds: int | None = None,
        on_panic: Literal["terminate", "continue"] = "terminate",
        random_guess_loss: float | None = None,
        recorder: Recorder | None = None,
        keep_best: bool = False,
        counterfactuals: bool = True,
    ) -> None:
        self.population, self.rules = population, rules
        self.on_panic, self.keep_best = on_panic, keep_best
        self.recorder: Recorder = recorder or NullRecorder()
        self.n_envs = len(population.keys)
        self.garden = Garden(
            population, rules, budget or Budget(), max_seeds, self.recorder, counterfactuals
        )
        self.tracker = SignalTracker(self.n_envs)
        self.governor = Governor(self.n_envs, random_guess_loss)
        self.running = np.ones(self.n_envs, dtype=bool)
        self.step_count = 0
        self.batches_done = 0
        self.score = np.full(self.n_envs, np.nan)
        self.best: list[SavedHost | None] = [None] * self.n_envs
        self.best_score = np.full(self.n_envs, -np.inf)
        self.culled_before = np.zeros(self.n_envs, dtype=np.int64)
        self.actions = wait(self.n_envs)
        self.before: Situation | None = None
        self.situation: Situation | None = None

    @property
    def table(self) -> SlotTable:
        return self.garden.table

    def reset(self, topology: Sequence[tuple[int, int]] = ()) -> Situation:
        """Warm up the hosts for an epoch; call it once. `topology` lists (slot, blueprint) pairs
        that every host has from birth, as fossils."""
        self.start(topology)
        return self.finish(self.population.train_epoch(self.running, 0)).after

    def step(self, actions: np.ndarray) -> Transition:
        """`actions` is int [E, 4] in the order of HEAD_NAMES. An illegal one raises
        InvalidStateMachineError and changes nothing."""
        self.begin(actions)
        return self.finish(self.population.train_epoch(self.running, self.step_count))

    # --- the halves of reset and step, for a training loop of the user's own -------------------

    def start(self, topology: Sequence[tuple[int, int]] = ()) -> None:
        """Make the hosts ready for their first epoch."""
        for env in range(self.n_envs):
            for slot, blueprint in topology:
                self.garden.plant_fossil(env, slot, blueprint)
            self._save(env)

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
        for env in np.flatnonzero(fossilized).tolist():
            # Fossils are for good: a rollback of this very epoch must not lose this one.
            self._save(env)

    def finish(self, train: TrainReadings) -> Transition:
        """Take in an epoch of training: evaluate, govern, tick."""
        acted, spent = self.running, self.garden.train_macs.copy()
        spent_by_hosts = self.garden.host_train_macs.copy()
        self.batches_done += train.batches
        self.garden.charge_training(train.samples, acted)
        evaluations = [
            self.garden.evaluate(env) if acted[env] else NOT_EVALUATED for env in range(self.n_envs)
        ]
        verdict = self.governor.check(
            _first(evaluations, "loss"),
            _first(evaluations, "score"),
            train.finite,
            acted,
            self._on_trial(),
            max(evaluation.samples for evaluation in evaluations),
        )
        age(self.table, acted)
        for env in np.flatnonzero(acted).tolist():
            if verdict.panic[env]:
                self._announce_panic(env, verdict, evaluations[env])
            if verdict.rollback[env]:
                evaluations[env] = self._roll_back(env, verdict, evaluations[env])
            else:
                self._take_in(env, evaluations[env], train, healthy=not verdict.panic[env])
        self.score = np.where(acted, _first(evaluations, "score"), self.score)
        # Nothing moves on while a network is broken: what it shows is not the seeds' doing.
        self.garden.tick(acted & ~verdict.panic, self.step_count)
        for env in np.flatnonzero(acted & ~verdict.panic).tolist():
            self._save(env)

        terminated = verdict.rollback & (self.on_panic == "terminate")
        truncated = acted & ~terminated & (self.step_count >= self.rules.max_steps)
        self.running = acted & ~terminated & ~truncated
        signals = self._update_signals(train, evaluations)
        self.situation = self._look(signals)
        transition = Transition(
            before=self.before or self.situation,
            actions=self.actions,
            after=self.situation,
            acted=acted,
            terminated=terminated,
            truncated=truncated,
            rolled_back=verdict.rollback,
            train_macs=self.garden.train_macs - spent,
            host_macs=self.garden.host_train_macs - spent_by_hosts,
        )
        for row in self.garden.narrator.metrics_rows(transition, self.garden.total_macs()):
            self.recorder.metrics(row)
        return transition

    # --- parts of a step -----------------------------------------------------------------------

    def _take_in(
        self, env: int, evaluation: Evaluation, train: TrainReadings, *, healthy: bool
    ) -> None:
        self.garden.record(env, evaluation, train)
        score = float(evaluation.score[0])
        if not healthy:
            # What is measured on a broken network says nothing about its seeds.
            self.table.contribution[env] = np.nan
        elif self.keep_best and score > self.best_score[env]:
            self.best_score[env] = score
            self.best[env] = self.garden.save(env, self.step_count)

    def _update_signals(
        self, train: TrainReadings, evaluations: list[Evaluation]
    ) -> TrainingSignals:
        was_stable = self.tracker.stabilized
        signals = self.tracker.update(
            epoch=self.step_count,
            global_step=self.batches_done,
            train_loss=train.loss,
            train_score=train.score,
            val_loss=_first(evaluations, "loss"),
            val_score=_first(evaluations, "score"),
        )
        for env in np.flatnonzero(signals.host_stabilized & ~was_stable).tolist():
            self.recorder.event(HostStabilized(env, self.step_count, signals.val_loss[env].item()))
        return signals

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

    def _save(self, env: int) -> None:
        saved = self.garden.save(env, self.step_count)
        self.governor.save(env, saved)
        tensors = saved.host.all_tensors()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.recorder.event(GovernorSnapshot(env, self.step_count, len(tensors), size))

    def _announce_panic(self, env: int, verdict: Verdict, evaluation: Evaluation) -> None:
        self.recorder.event(
            GovernorPanic(
                env,
                self.step_count,
                reason=verdict.reasons[env],
                loss=absent(evaluation.loss[0]),
                threshold=absent(verdict.threshold[env]),
                consecutive_panics=int(verdict.consecutive[env]),
            )
        )

    def _roll_back(self, env: int, verdict: Verdict, broken: Evaluation) -> Evaluation:
        """Restore the last healthy host and close the culprit's slot; evaluates what is left."""
        culprits = self.garden.suspects(env, broken)
        saved = self.governor.last_healthy(env)
        self.garden.restore(env, saved)
        self.garden.counts["rollbacks"][env] += 1
        self.recorder.event(
            GovernorRollback(
                env,
                self.step_count,
                reason=verdict.reasons[env],
                loss_at_panic=absent(broken.loss[0]),
                loss_threshold=absent(verdict.threshold[env]),
                consecutive_panics=int(verdict.consecutive[env]),
                restored_step=saved.step,
                culprit_slots=tuple(self.garden.narrator.slots.slot_ids[s] for s in culprits),
            )
        )
        for slot in culprits:
            self.garden.embargo(env, slot, self.step_count)
        evaluation = self.garden.evaluate(env)
        self.garden.record(env, evaluation, None)
        self.governor.forgive(env)
        self._save(env)
        return evaluation

    # --- the end -------------------------------------------------------------------------------

    def settle(self, env: int) -> tuple[Evaluation, int]:
        """Bring a host back as it was at its best, or last healthy without `keep_best`, and drop
        live seeds that do not help it. Gives its evaluation and the step it is from."""
        saved = self.best[env] or self.governor.last_healthy(env)
        self.garden.restore(env, saved)
        self.garden.record(env, self.garden.evaluate(env), None)
        self.garden.drop_unproven(env)
        evaluation = self.garden.evaluate(env)
        self.garden.record(env, evaluation, None)
        return evaluation, saved.step


def _first(evaluations: list[Evaluation], name: str) -> np.ndarray:
    """[E]: what was measured with all seeds present."""
    return np.array([getattr(evaluation, name)[0] for evaluation in evaluations])
