"""The vectorised growth environment: E host trainings, one decision for each per epoch.

    reset:  new hosts -> warm-up epoch -> evaluate                               -> situation
    step:   apply the actions -> train an epoch -> evaluate (with counterfactuals) -> governor
            -> lifecycle tick                                                    -> transition

Gymnasium's order: the action comes first, its consequences follow, and the situation that comes
back is the one after all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from esper.growth import (
    LifecycleRules,
    SlotTable,
    StageChange,
    age,
    count_params,
    cull,
    fossilize,
    gate_params,
    germinate,
    one_slot,
    seed_costs,
    tick,
)
from esper.growth.alpha import GATED
from esper.growth.lifecycle import move
from esper.leyline import (
    IS_ACTIVE,
    IS_BLENDED,
    IS_LIVE,
    ConfigError,
    InvalidStateMachineError,
    LifecycleOp,
    NullRecorder,
    Recorder,
    SeedStage,
    draw_key,
)
from esper.leyline.events import (
    GovernorPanic,
    GovernorRollback,
    GovernorSnapshot,
    HostStabilized,
)
from esper.tamiyo import (
    GrowthLimits,
    SignalTracker,
    Situation,
    compute_action_masks,
    usable_blueprints,
    wait,
)
from esper.tolaria.governor import Governor, SavedHost, Verdict
from esper.tolaria.narrator import Narrator, absent
from esper.tolaria.population import Evaluation, Population, TrainReadings

_ABSENT = np.full(1, np.nan)
NOT_EVALUATED = Evaluation(loss=_ABSENT, score=_ABSENT, alpha=_ABSENT, samples=0)
# A backward pass costs about twice a forward pass.
TRAINING_COST = 3


@dataclass(frozen=True)
class Budget:
    """Hard caps on a grown network, as multiples of its host; None for no cap."""

    params: float | None = None
    macs: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("params", self.params), ("macs", self.macs)):
            if value is not None and not value >= 1.0:
                raise ConfigError(
                    f"budget {name}={value} is below the host itself; give 1.0 or more"
                )


@dataclass(frozen=True)
class Transition:
    """One step of E environments: situation, action, situation.

    terminated  bool[E], the governor ended the episode
    truncated   bool[E], the episode reached its length
    rolled_back bool[E], the governor restored the host
    train_macs  int[E], multiply-adds spent in this step, evaluations included
    """

    before: Situation
    actions: np.ndarray
    after: Situation
    terminated: np.ndarray
    truncated: np.ndarray
    rolled_back: np.ndarray
    train_macs: np.ndarray


class GrowthEnv:
    """`on_panic` says what a rollback means: the end of the episode, or going on without culprit.

    keep_best   also keep each host as it was at its best validation score (see `settle`)
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
    ) -> None:
        self.population, self.rules = population, rules
        self.on_panic, self.keep_best = on_panic, keep_best
        self.recorder: Recorder = recorder or NullRecorder()
        template = population.template
        self.narrator = Narrator(template)
        self.host_params, self.host_macs = count_params(template.host), template.host_macs
        self.limits = self._limits(budget or Budget(), max_seeds)
        n_envs, n_slots = len(population.seeds), len(template.sites)
        self.table = SlotTable.empty(n_envs, n_slots)
        self.tracker = SignalTracker(n_envs)
        self.governor = Governor(n_envs, random_guess_loss)
        self.running = np.ones(n_envs, dtype=bool)
        self.step_count = -1
        self.batches_done = 0
        self.score = np.full(n_envs, np.nan)
        self.train_macs = np.zeros(n_envs, dtype=np.int64)
        self.counts = {
            name: np.zeros(n_envs, dtype=np.int64)
            for name in ("germinated", "fossilized", "culled", "rollbacks")
        }
        self.best: list[SavedHost | None] = [None] * n_envs
        self.best_score = np.full(n_envs, -np.inf)
        self.situation: Situation | None = None

    def _limits(self, budget: Budget, max_seeds: int | None) -> GrowthLimits:
        template = self.population.template
        fits, params, macs = seed_costs(template.catalogue, template.sites, template.output)
        # Any blend might be gated: its gate has to fit the budget while it lasts.
        self.gate_params = gate_params(template.sites)
        return GrowthLimits(
            fits=usable_blueprints(template.catalogue, fits),
            params=params + self.gate_params[:, None],
            macs=macs,
            max_params=_cap(budget.params, self.host_params),
            max_macs=_cap(budget.macs, self.host_macs),
            max_seeds=max_seeds,
        )

    @property
    def n_envs(self) -> int:
        return len(self.population.seeds)

    # --- the two doors -------------------------------------------------------------------------

    def reset(self, topology: Sequence[tuple[int, int]] = ()) -> Situation:
        """Warm up the new hosts for an epoch. `topology` lists (slot, blueprint) pairs that every
        host has from birth, as fossils."""
        self.start(topology)
        return self.finish(self.population.train_epoch(self.running, 0)).after

    def step(self, actions: np.ndarray) -> Transition:
        """`actions` is int [E, 4] in the order of HEAD_NAMES; an illegal one raises
        InvalidStateMachineError and changes nothing."""
        self.begin(actions)
        return self.finish(self.population.train_epoch(self.running, self.step_count))

    # --- their two halves, for a training loop of the user's own -------------------------------

    def start(self, topology: Sequence[tuple[int, int]] = ()) -> None:
        for env in range(self.n_envs):
            for slot, blueprint in topology:
                self._plant_fossil(env, slot, blueprint)
            self._save(env)
        self.before: Situation | None = None
        self.actions = wait(self.n_envs)
        self.step_count = 0

    def begin(self, actions: np.ndarray) -> None:
        """Apply the actions; the epoch that shows their consequences comes next."""
        assert self.situation is not None, "reset comes before the first step"
        if self.step_count >= self.rules.max_steps:
            raise InvalidStateMachineError("the episode is over; reset the environment")
        legal = self.situation.masks.allows(actions)
        if not legal.all():
            env = int(np.flatnonzero(~legal)[0])
            raise InvalidStateMachineError(
                f"action {actions[env].tolist()} is not legal in environment {env}"
            )
        self.before, self.actions = self.situation, actions.copy()
        self.step_count += 1
        table_before = self.table.copy()
        changes = [self._apply(env, *action) for env, action in enumerate(actions.tolist())]
        self._tell(table_before, [change for change in changes if change is not None])

    def finish(self, train: TrainReadings) -> Transition:
        """Take in an epoch of training: evaluate, govern, tick; gives the whole transition."""
        spent_before = self.train_macs.copy()
        self._charge_training(train.samples)
        self.batches_done += train.batches
        evaluations = [
            self._evaluate(env) if self.running[env] else NOT_EVALUATED
            for env in range(self.n_envs)
        ]
        verdict = self.governor.check(_first(evaluations, "loss"), train.loss, self.running)
        self._announce_panics(verdict, _first(evaluations, "loss"))
        age(self.table, self.running)
        for env in np.flatnonzero(self.running & ~verdict.rollback):
            self._record(int(env), evaluations[env], train)
            if verdict.panic[env]:
                # What is measured on a broken network says nothing about its seeds.
                self.table.contribution[env] = np.nan
            else:
                self._keep_if_best(int(env), float(evaluations[env].score[0]))
        for env in np.flatnonzero(verdict.rollback):
            evaluations[env] = self._roll_back(int(env), verdict, float(evaluations[env].loss[0]))
        ended = verdict.rollback & (self.on_panic == "terminate")
        self._tick(self.running & ~verdict.rollback)
        for env in np.flatnonzero(self.running & ~verdict.panic):
            self._save(int(env))
        return self._conclude(train, evaluations, verdict, ended, spent_before)

    # --- parts of a step -----------------------------------------------------------------------

    def _apply(
        self, env: int, slot: int, blueprint: int, blend: int, op: int
    ) -> StageChange | None:
        where = one_slot(self.table, env, slot)
        if op == LifecycleOp.GERMINATE:
            key = draw_key(int(self.population.seeds[env]), "seed", self.step_count, slot)
            self.population.germinate(env, slot, blueprint, blend, key)
            self.counts["germinated"][env] += 1
            reserve = self.gate_params[slot]
            return germinate(
                self.table,
                env,
                slot,
                blueprint=blueprint,
                blend=blend,
                params=self.limits.params[slot, blueprint] - (0 if blend == GATED else reserve),
                macs=self.limits.macs[slot, blueprint],
                score=self.score[env],
            )
        if op == LifecycleOp.CULL:
            self.population.remove(env, slot)
            self.counts["culled"][env] += 1
            return cull(self.table, where, "controller")
        if op == LifecycleOp.FOSSILIZE:
            self.counts["fossilized"][env] += 1
            change = fossilize(self.table, where)
            self._show_blend(env, slot)
            # Fossils are for good: a later rollback must not lose this one.
            self._save(env)
            return change
        return None

    def _plant_fossil(self, env: int, slot: int, blueprint: int) -> None:
        """A seed that was there from the start."""
        self.step_count = -1
        self._apply(env, slot, blueprint, 0, LifecycleOp.GERMINATE)
        where = one_slot(self.table, env, slot)
        for stage in (
            SeedStage.TRAINING,
            SeedStage.BLENDING,
            SeedStage.HOLDING,
            SeedStage.FOSSILIZED,
        ):
            move(self.table, where, stage)
        self.table.alpha[where] = 1.0
        self._show_blend(env, slot)

    def _show_blend(self, env: int, slot: int) -> None:
        stage, alpha = SeedStage(self.table.stage[env, slot]), float(self.table.alpha[env, slot])
        self.population.set_blend(env, slot, stage, alpha)

    def _evaluate(self, env: int) -> Evaluation:
        """The whole network, then without each seed that acts on its output."""
        n_slots = self.table.shape[1]
        acting = np.flatnonzero(IS_BLENDED[self.table.stage[env]])
        coalitions = np.ones((1 + len(acting), n_slots), dtype=bool)
        coalitions[np.arange(1, 1 + len(acting)), acting] = False
        evaluation = self.population.evaluate(env, coalitions)
        macs = self.host_macs + (coalitions * self._acting_macs(env)).sum(axis=1)
        self.train_macs[env] += int(macs.sum()) * evaluation.samples
        return evaluation

    def _acting_macs(self, env: int) -> np.ndarray:
        return np.where(IS_ACTIVE[self.table.stage[env]], self.table.macs[env], 0)

    def _charge_training(self, samples: int) -> None:
        per_example = self.host_macs + np.where(
            IS_ACTIVE[self.table.stage], self.table.macs, 0
        ).sum(axis=1)
        self.train_macs += np.where(self.running, TRAINING_COST * samples * per_example, 0)

    def _record(self, env: int, evaluation: Evaluation, train: TrainReadings | None) -> None:
        """Enter into the table what was measured of the seeds of one host."""
        table, held = self.table, self.table.holds_seed[env]
        acting = np.flatnonzero(IS_BLENDED[table.stage[env]])
        self.score[env] = evaluation.score[0]
        table.score[env, held] = evaluation.score[0]
        table.contribution[env] = np.nan
        table.contribution[env, acting] = evaluation.score[0] - evaluation.score[1:]
        blending = table.stage[env] == SeedStage.BLENDING
        table.alpha[env, blending] = evaluation.alpha[blending]
        if train is not None:
            table.gradient_ratio[env] = train.gradient_ratio[env]
            table.gradient_norm[env] = train.gradient_norm[env]
            table.gradient_health[env] = train.gradient_health[env]
            table.healthy[env] &= train.seed_finite[env]

    def _tick(self, envs: np.ndarray) -> None:
        before = self.table.copy()
        changes = tick(self.table, self.rules, envs)
        for change in changes:
            if change.target == SeedStage.CULLED:
                for env, slot in np.argwhere(change.where):
                    self.population.remove(int(env), int(slot))
                    self.counts["culled"][env] += 1
            if change.target == SeedStage.HOLDING:
                gated = change.where & (self.table.blend == GATED)
                self.table.params[gated] -= np.broadcast_to(self.gate_params, gated.shape)[gated]
        for env, slot in np.argwhere(self.table.holds_seed & envs[:, None]):
            self._show_blend(int(env), int(slot))
        self._tell(before, changes)
        for event in self.narrator.closed_gates(self.table, self.rules, envs, self.step_count):
            self.recorder.event(event)

    def _tell(self, before: SlotTable, changes: list[StageChange]) -> None:
        for event in self.narrator.changes(before, self.table, changes, self.step_count):
            self.recorder.event(event)

    # --- the governor --------------------------------------------------------------------------

    def _save(self, env: int) -> None:
        host = self.population.snapshot(env)
        self.governor.save(env, self.step_count, host, self.table.row(env))
        tensors = host.all_tensors()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.recorder.event(GovernorSnapshot(env, self.step_count, len(tensors), size))

    def _announce_panics(self, verdict: Verdict, loss: np.ndarray) -> None:
        for env in np.flatnonzero(verdict.panic):
            self.recorder.event(
                GovernorPanic(
                    int(env),
                    self.step_count,
                    reason=verdict.reasons[env],
                    loss=absent(loss[env]),
                    threshold=absent(verdict.threshold[env]),
                    consecutive_panics=int(verdict.consecutive[env]),
                )
            )

    def _roll_back(self, env: int, verdict: Verdict, loss: float) -> Evaluation:
        """Restore the last healthy host, and close the slot of the seed that was blended last."""
        culprits = self._culprits(env)
        saved = self.governor.last_healthy(env)
        self.population.restore(env, saved.host)
        self.table.set_row(env, saved.row)
        self.governor.forgive(env)
        self.counts["rollbacks"][env] += 1
        self.recorder.event(
            GovernorRollback(
                env,
                self.step_count,
                reason=verdict.reasons[env],
                loss_at_panic=absent(loss),
                loss_threshold=absent(verdict.threshold[env]),
                consecutive_panics=int(verdict.consecutive[env]),
                restored_step=saved.step,
                culprit_slots=tuple(self.narrator.slots.slot_ids[slot] for slot in culprits),
            )
        )
        for slot in culprits:
            self._embargo(env, slot)
        evaluation = self._evaluate(env)
        self._record(env, evaluation, None)
        self._save(env)
        return evaluation

    def _culprits(self, env: int) -> list[int]:
        """The youngest seed that acts on the output and is not yet a fossil, if there is one."""
        acting = IS_LIVE[self.table.stage[env]] & IS_BLENDED[self.table.stage[env]]
        if not acting.any():
            return []
        return [int(np.where(acting, self.table.epochs_total[env], np.inf).argmin())]

    def _embargo(self, env: int, slot: int) -> None:
        before, where = self.table.copy(), one_slot(self.table, env, slot)
        if self.table.stage[env, slot] == SeedStage.DORMANT:
            move(self.table, where, SeedStage.GERMINATED)
        if IS_LIVE[self.table.stage[env, slot]]:
            self.population.remove(env, slot)
            self.counts["culled"][env] += 1
            self._tell(before, [cull(self.table, where, "governor_rollback")])

    # --- the best network ----------------------------------------------------------------------

    def _keep_if_best(self, env: int, score: float) -> None:
        if self.keep_best and score > self.best_score[env]:
            self.best_score[env] = score
            self.best[env] = SavedHost(
                self.step_count, self.population.snapshot(env), self.table.row(env)
            )

    def settle(self, env: int) -> tuple[Evaluation, int]:
        """Bring back a host as it was at its best and drop seeds that do not help it.

        Gives its evaluation and the step it is from; needs `keep_best`.
        """
        best = self.best[env]
        if best is None:
            best = self.governor.last_healthy(env)
        self.population.restore(env, best.host)
        self.table.set_row(env, best.row)
        evaluation = self._evaluate(env)
        self._record(env, evaluation, None)
        for slot in np.flatnonzero(IS_LIVE[self.table.stage[env]]):
            if not self.table.contribution[env, slot] > 0.0:
                self.population.remove(env, int(slot))
                cull(self.table, one_slot(self.table, env, int(slot)), "unproven")
        evaluation = self._evaluate(env)
        self._record(env, evaluation, None)
        return evaluation, best.step

    # --- what comes back -----------------------------------------------------------------------

    def total_params(self) -> np.ndarray:
        return self.host_params + self.table.params.sum(axis=1)

    def total_macs(self) -> np.ndarray:
        return self.host_macs + np.where(IS_BLENDED[self.table.stage], self.table.macs, 0).sum(1)

    def _conclude(
        self,
        train: TrainReadings,
        evaluations: list[Evaluation],
        verdict: Verdict,
        ended: np.ndarray,
        spent_before: np.ndarray,
    ) -> Transition:
        was_stabilized = self.tracker.stabilized.copy()
        signals = self.tracker.update(
            epoch=self.step_count,
            global_step=self.batches_done,
            train_loss=train.loss,
            train_accuracy=train.score,
            val_loss=_first(evaluations, "loss"),
            val_accuracy=_first(evaluations, "score"),
        )
        for env in np.flatnonzero(signals.host_stabilized & ~was_stabilized):
            loss = float(signals.val_loss[env])
            self.recorder.event(HostStabilized(int(env), self.step_count, loss))
        truncated = self.running & ~ended & (self.step_count >= self.rules.max_steps)
        acted = self.running
        self.running = self.running & ~ended & ~truncated
        self.situation = Situation(
            step=self.step_count,
            max_steps=self.rules.max_steps,
            seeds=self.population.seeds,
            running=self.running,
            signals=signals,
            table=self.table.copy(),
            masks=compute_action_masks(self.table, self.limits, self.rules, self.running),
            slot_config=self.narrator.slots,
            catalogue=self.narrator.catalogue,
            host_params=self.host_params,
            total_params=self.total_params(),
            max_seeds=self.limits.max_seeds,
        )
        spent = self.train_macs - spent_before
        for env in np.flatnonzero(acted):
            self.recorder.metrics(
                self.narrator.metrics_row(
                    int(env),
                    self.step_count,
                    self.actions[env],
                    signals,
                    self.table,
                    int(self.situation.total_params[env]),
                    int(self.total_macs()[env]),
                    int(spent[env]),
                )
            )
        return Transition(
            before=self.before or self.situation,
            actions=self.actions,
            after=self.situation,
            terminated=ended,
            truncated=truncated,
            rolled_back=verdict.rollback,
            train_macs=spent,
        )


def _cap(multiple: float | None, of_host: int) -> int | None:
    return None if multiple is None else int((multiple - 1.0) * of_host)


def _first(evaluations: list[Evaluation], name: str) -> np.ndarray:
    return np.array([getattr(evaluation, name)[0] for evaluation in evaluations])
