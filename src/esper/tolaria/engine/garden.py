"""The garden: hosts and the table of their slots.

Every change of a slot is made here, so that modules, optimizers, table and events stay consistent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from esper.growth.blueprints.catalogue import seed_costs
from esper.growth.lifecycle import (
    GATED,
    StageChange,
    act_from_start,
    cull,
    fossilize,
    germinate,
    move,
    one_slot,
    removable,
    remove_kept,
    tick,
)
from esper.growth.seed_slot import valve_params
from esper.growth.slot_table import SlotTable
from esper.growth.snapshot import Moments
from esper.leyline import (
    IS_BLENDED,
    IS_LIVE,
    OP,
    ConfigError,
    LifecycleOp,
    Recorder,
    SeedStage,
    draw_key,
)
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.policy.action_masks import GrowthLimits, usable_blueprints
from esper.tamiyo.situation import describe_slots
from esper.tolaria.engine.event_log import EventLog
from esper.tolaria.engine.population import Hosts, Snapshot, TrainReadings

# A backward pass costs about twice a forward pass.
TRAINING_COST = 3


@dataclass(frozen=True)
class Validation:
    """Measurements of E hosts; NaN where a host was not evaluated.

    loss, score    [E], with all seeds present
    without_loss, without_score   [E, S], with the seed of one slot taken out
    alpha          [E, S], what each seed's blend applied
    samples        number of examples; 0 if not known
    """

    loss: np.ndarray
    score: np.ndarray
    without_loss: np.ndarray
    without_score: np.ndarray
    alpha: np.ndarray
    samples: int

    @staticmethod
    def nothing(n_envs: int, n_slots: int, samples: int) -> "Validation":
        loss, score = np.full((2, n_envs), np.nan)
        without_loss, without_score, alpha = np.full((3, n_envs, n_slots), np.nan)
        return Validation(loss, score, without_loss, without_score, alpha, samples)

    def updated(self, envs: np.ndarray, later: "Validation") -> "Validation":
        """A copy with the measurements of `later` for the hosts of `envs` (bool[E])."""
        mine, new = vars(self), vars(later)
        arrays = {name: mine[name].copy() for name in mine if name != "samples"}
        for name, array in arrays.items():
            array[envs] = new[name][envs]
        return Validation(**arrays, samples=later.samples)


@dataclass(frozen=True)
class SavedHost:
    """A host after `step` (None without snapshots), with its row of the slot table, and its
    validation; NaN if this network was not evaluated."""

    step: int
    host: Snapshot | None
    row: SlotTable
    loss: float = math.nan
    score: float = math.nan


class Garden:
    """E hosts with S slots each. `counts` are numbers of seeds and rollbacks, [E] each."""

    def __init__(
        self,
        population: Hosts,
        settings: GrowthSettings,
        recorder: Recorder,
    ) -> None:
        self.population, self.settings, self.recorder = population, settings, recorder
        template = population.template
        self.event_log = EventLog(template)
        # Those of a frozen host count, too.
        self.host_params = sum(p.numel() for p in template.host_parameters())
        self.host_macs = template.host_macs
        self.valve_params = valve_params(template.catalogue, template.sites)
        self.limits = self._limits(settings)
        self._check_limits()
        self.facts = describe_slots(template, self.limits)
        # bool[S]: slots of blocks, which are never isolated.
        self.acts_from_start = np.array([site.blocks is not None for site in template.sites])
        n_envs = len(population.keys)
        self.table = SlotTable.empty(n_envs, len(template.sites))
        self.counts = {
            name: np.zeros(n_envs, dtype=np.int64)
            for name in ("germinated", "fossilized", "culled", "rollbacks")
        }
        self.train_macs = np.zeros(n_envs, dtype=np.int64)
        self.host_train_macs = np.zeros(n_envs, dtype=np.int64)

    def _limits(self, settings: GrowthSettings) -> GrowthLimits:
        template = self.population.template
        fits, params, macs = seed_costs(template.catalogue, template.sites, template.output)
        max_params, max_macs = settings.budget.left_for_seeds(self.host_params, self.host_macs)
        return GrowthLimits(
            fits=usable_blueprints(template.catalogue, fits),
            # The blend may be gated, and then its valve counts too.
            params=params + self.valve_params,
            macs=macs,
            max_params=max_params,
            max_macs=max_macs,
            max_seeds=settings.max_seeds,
        )

    def _check_limits(self) -> None:
        """Raises ConfigError, with the smallest budget that works, if nothing can grow."""
        limits, names = self.limits, ", ".join(self.event_log.slots.names)
        if not limits.fits.any():
            raise ConfigError(f"no blueprint fits {names}: choose other slots, or add blueprints")
        if not limits.affordable.any():
            params = 1.0 + limits.params[limits.fits] / self.host_params
            macs = 1.0 + limits.macs[limits.fits] / max(1, self.host_macs)
            least = (params + macs).argmin()
            raise ConfigError(
                f"the budget is too small for any seed in {names}: the smallest one needs "
                f"params={_rounded_up(params[least])} and macs={_rounded_up(macs[least])}"
            )

    # --- actions -------------------------------------------------------------------------------

    def apply(self, actions: np.ndarray, step: int, score: np.ndarray) -> np.ndarray:
        """Apply legal actions [E, 4]; `score` [E] is the last validation score. Returns bool[E]:
        where a seed was fossilized."""
        before = self.table.copy()
        changes = []
        for env in np.flatnonzero(actions[:, OP] != LifecycleOp.WAIT).tolist():
            slot, blueprint, blend, op = actions[env].tolist()
            if op == LifecycleOp.GERMINATE:
                changes.append(self._germinate(env, slot, blueprint, blend, step, score[env]))
                self.counts["germinated"][env] += 1
                if self.acts_from_start[slot] or self.settings.seeds_incubate == "joint":
                    blocks = self.population.template.sites[slot].blocks
                    new = one_slot(self.table, env, slot)
                    fully = blocks is None or blocks.silent
                    changes += act_from_start(self.table, new, self.settings, fully=fully)
                    self._show_blend(env, slot)
            elif op == LifecycleOp.CULL and self.table.stage[env, slot] == SeedStage.FOSSILIZED:
                where = one_slot(self.table, env, slot)
                changes.append(remove_kept(self.table, where, self.settings))
                self._remove(where)
                self.counts["fossilized"][env] -= 1
            elif op == LifecycleOp.CULL:
                changes.append(self._cull(one_slot(self.table, env, slot), "controller"))
            else:
                changes.append(fossilize(self.table, one_slot(self.table, env, slot)))
                self.counts["fossilized"][env] += 1
                self._show_blend(env, slot)
        self._record_changes(before, changes, step)
        return actions[:, OP] == LifecycleOp.FOSSILIZE

    def plant_fossil(self, env: int, slot: int, blueprint: int) -> None:
        """Add a seed that a host has from the start."""
        fits = self.limits.fits
        if not (0 <= slot < len(fits) and 0 <= blueprint < fits.shape[1] and fits[slot, blueprint]):
            raise ConfigError(
                f"topology names slot {slot} and blueprint {blueprint}, which do not fit this "
                f"network with {len(fits)} slots and {fits.shape[1]} blueprints"
            )
        self._germinate(env, slot, blueprint, blend=0, step=-1, score=np.nan)
        self._keep_new(env, slot)

    def plant_first_blocks(self, env: int) -> None:
        """With a frozen host nothing else is trained, so the first new blocks are there from the
        start, and stay; they do not change the output."""
        template = self.population.template
        if template.stacks is None or not template.stacks.plan.freeze_host:
            return
        if not self.limits.affordable[0].any():
            raise ConfigError(
                "with freeze_host=True only new blocks are trained, and the budget is too small "
                f"for the first of them ({template.sites[0].name})"
            )
        before = self.table.copy()
        changes = [
            self._germinate(env, 0, 0, blend=0, step=0, score=np.nan),
            *self._keep_new(env, 0),
        ]
        self.counts["germinated"][env] += 1
        self.counts["fossilized"][env] += 1
        self._record_changes(before, changes, 0)

    def _keep_new(self, env: int, slot: int) -> list[StageChange]:
        """A new seed is kept at once."""
        where = one_slot(self.table, env, slot)
        stages = (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)
        changes = [move(self.table, where, stage) for stage in stages]
        changes.append(fossilize(self.table, where))
        self.table.alpha[where] = 1.0
        self._show_blend(env, slot)
        return changes

    def _germinate(
        self, env: int, slot: int, blueprint: int, blend: int, step: int, score: float
    ) -> StageChange:
        key = draw_key(int(self.population.keys[env]), "seed", step, slot)
        self.population.germinate(env, slot, blueprint, blend, key)
        valve = 0 if blend == GATED else self.valve_params[slot, blueprint]
        return germinate(
            self.table,
            env,
            slot,
            blueprint=blueprint,
            blend=blend,
            params=self.limits.params[slot, blueprint] - valve,
            macs=self.limits.macs[slot, blueprint],
            score=score,
        )

    def _cull(self, where: np.ndarray, reason: str) -> StageChange:
        self._remove(where)
        return cull(self.table, where, reason)

    def _remove(self, where: np.ndarray) -> None:
        for env, slot in np.argwhere(where).tolist():
            self.population.remove(env, slot)
            self.counts["culled"][env] += 1

    def _show_blend(self, env: int, slot: int) -> None:
        stage, alpha = SeedStage(self.table.stage[env, slot]), float(self.table.alpha[env, slot])
        self.population.set_blend(env, slot, stage, alpha)

    def _record_changes(self, before: SlotTable, changes: list[StageChange], step: int) -> None:
        for event in self.event_log.changes(before, self.table, changes, step):
            self.recorder.event(event)

    # --- measuring -----------------------------------------------------------------------------

    def left_out(self, table: SlotTable) -> np.ndarray:
        """bool[E, S]: the seeds without which hosts of this table are evaluated, too, after an
        epoch. The contribution of a kept seed is not read before its audit."""
        if self.settings.counterfactuals == "none":
            return np.zeros(table.shape, dtype=bool)
        if self.settings.counterfactuals == "all":
            return IS_BLENDED[table.stage]
        return _on_trial(table) | removable(table, self.settings, ahead=1)

    def evaluate(self, envs: np.ndarray) -> Validation:
        """Evaluate the networks of `envs` (bool[E]), also without each seed of `left_out`."""
        shape, chosen = self.table.shape, np.flatnonzero(envs)
        measured = envs[:, None] & self.left_out(self.table)
        without = np.argwhere(measured)
        rows = np.concatenate([chosen, without[:, 0]])
        present = np.ones((len(rows), shape[1]), dtype=bool)
        present[np.arange(len(chosen), len(rows)), without[:, 1]] = False
        found = self.population.evaluate(rows, present)
        np.add.at(self.train_macs, rows, self.coalition_macs(rows, present) * found.samples)
        self.host_train_macs[chosen] += self.host_macs * found.samples
        validation = Validation.nothing(*shape, found.samples)
        whole = slice(0, len(chosen))
        validation.loss[chosen], validation.score[chosen] = found.loss[whole], found.score[whole]
        validation.alpha[chosen] = found.alpha[whole]
        validation.without_loss[measured] = found.loss[len(chosen) :]
        validation.without_score[measured] = found.score[len(chosen) :]
        return validation

    def coalition_macs(self, envs: np.ndarray, present: np.ndarray) -> np.ndarray:
        """int[K]: multiply-adds per example of hosts `envs` (int[K]) with some of their seeds."""
        return self.host_macs + (present * self.table.active_macs[envs]).sum(axis=1)

    def record(
        self, validation: Validation, envs: np.ndarray, train: TrainReadings | None = None
    ) -> None:
        """Write the measurements of an evaluation, and of the epoch before it, to the table."""
        table, held = self.table, envs[:, None] & self.table.holds_seed
        acting = envs[:, None] & IS_BLENDED[table.stage]
        scores = np.broadcast_to(validation.score[:, None], table.shape)
        table.score[held] = scores[held]
        # NaN where no seed was left out; of a kept seed the last value stays.
        known = (table.stage == SeedStage.FOSSILIZED) & np.isnan(validation.without_score)
        measured = envs[:, None] & ~known
        table.contribution[measured] = (scores - validation.without_score)[measured]
        table.alpha[acting] = validation.alpha[acting]
        for name, readings in (train.seeds if train is not None else {}).items():
            if name == "healthy":
                table.healthy[envs] &= readings[envs]
            else:
                getattr(table, name)[envs] = readings[envs]

    def charge_training(self, samples: int, running: np.ndarray) -> None:
        per_example = self.host_macs + self.table.active_macs.sum(axis=1)
        self.train_macs += np.where(running, TRAINING_COST * samples * per_example, 0)
        self.host_train_macs += np.where(running, TRAINING_COST * samples * self.host_macs, 0)

    def total_params(self) -> np.ndarray:
        """int[E]: trainable parameters of host and seeds."""
        return self.host_params + self.table.params.sum(axis=1)

    def total_macs(self) -> np.ndarray:
        """int[E]: multiply-adds per example of host and the seeds that act on its output."""
        acting = np.where(IS_BLENDED[self.table.stage], self.table.macs, 0)
        return self.host_macs + acting.sum(axis=1)

    # --- time ----------------------------------------------------------------------------------

    def tick(self, envs: np.ndarray, step: int) -> None:
        """Advance the stages at the end of an epoch, for the environments in `envs` (bool[E])."""
        before = self.table.copy()
        changes = tick(self.table, self.settings, envs, lasting=self.acts_from_start)
        for change in changes:
            if change.target == SeedStage.CULLED:
                self._remove(change.where)
            if change.target == SeedStage.HOLDING:
                gated = change.where & (self.table.blend == GATED)
                slots = np.nonzero(gated)[1]
                self.table.params[gated] -= self.valve_params[slots, self.table.blueprint[gated]]
        for env, slot in np.argwhere(self.table.holds_seed & envs[:, None]).tolist():
            self._show_blend(env, slot)
        self._record_changes(before, changes, step)
        for event in self.event_log.closed_gates(self.table, self.settings, envs, step):
            self.recorder.event(event)

    # --- going back ----------------------------------------------------------------------------

    def save(
        self,
        envs: np.ndarray,
        step: int,
        validation: Validation | None = None,
        same_weights: Sequence[Snapshot | None] | None = None,
        *,
        moments: Moments = "half",
        spare: Sequence[Tensor] = (),
    ) -> list[SavedHost]:
        """Snapshots of the hosts `envs` (int[n]), with the validation of exactly these networks, if
        there was one of all that they hold; the rest is as in `Hosts.snapshot`. Rounded moments are
        enough to go on after a rollback (decision 004)."""
        loss, score = np.full((2, self.table.shape[0]), np.nan)
        if validation is not None:
            unmeasured = self.on_trial() & np.isnan(validation.without_score)
            known = ~unmeasured.any(axis=1)
            loss[known], score[known] = validation.loss[known], validation.score[known]
        hosts: Sequence[Snapshot | None] = [None] * len(envs)
        if self.settings.snapshots != "none":
            hosts = self.population.snapshot(envs, same_weights, moments=moments, spare=spare)
        return [
            SavedHost(step, host, self.table.row(env), float(loss[env]), float(score[env]))
            for env, host in zip(envs.tolist(), hosts, strict=True)
        ]

    def restore(self, envs: np.ndarray, saved: Sequence[SavedHost]) -> None:
        """Restore the hosts `envs` (int[n]); they stay as they are without snapshots."""
        if any(each.host is None for each in saved):
            return
        self.population.restore(envs, [each.host for each in saved])
        for env, each in zip(envs.tolist(), saved, strict=True):
            self.table.set_row(env, each.row)

    def bring_back(self, envs: np.ndarray, slots: np.ndarray, saved: Sequence[SavedHost]) -> None:
        """Restore the hosts `envs` (int[n]) as they were before the kept seeds in `slots` (int[n])
        were removed; another grace period begins."""
        self.restore(envs, saved)
        self.table.epochs_in_stage[envs, slots] = 0
        self.counts["culled"][envs] -= 1
        self.counts["fossilized"][envs] += 1

    def on_trial(self) -> np.ndarray:
        """bool[E, S]: seeds that act on the output and are not yet kept."""
        return _on_trial(self.table)

    def suspects(self, env: int, broken: Validation) -> list[int]:
        """The seed on trial without which the broken network has the best loss; if losses are equal
        or unknown, the best score; else the youngest seed. Empty without a seed on trial."""
        loss = np.nan_to_num(broken.without_loss[env], nan=np.inf)
        deficit = np.nan_to_num(-broken.without_score[env], nan=np.inf)
        age = self.table.epochs_total[env]
        candidates = np.flatnonzero(self.on_trial()[env]).tolist()
        ranked = sorted(candidates, key=lambda slot: (loss[slot], deficit[slot], age[slot]))
        return ranked[:1]

    def embargo(self, env: int, slot: int, step: int) -> None:
        """Close a slot for a while after a rollback, and cull the seed in it unless it is kept."""
        before, where = self.table.copy(), one_slot(self.table, env, slot)
        if self.table.stage[env, slot] == SeedStage.DORMANT:
            move(self.table, where, SeedStage.GERMINATED)
        if IS_LIVE[self.table.stage[env, slot]]:
            self._record_changes(before, [self._cull(where, "governor_rollback")], step)

    def drop_unproven(self, envs: np.ndarray, step: int) -> np.ndarray:
        """Remove live seeds of hosts (bool[E]) without a positive contribution, and blocks that
        are not blended in: the user's class cannot hold a part of a block. Returns bool[E]: the
        hosts that another evaluation is needed of, because such a seed acted."""
        before = self.table.copy()
        partly = self.acts_from_start & (self.table.alpha < 1.0)
        unproven = ~(self.table.contribution > 0.0) | partly
        live = envs[:, None] & IS_LIVE[self.table.stage] & unproven
        self._record_changes(before, [self._cull(live, "unproven")], step)
        return np.any(live & IS_BLENDED[before.stage], axis=1)


def _on_trial(table: SlotTable) -> np.ndarray:
    return IS_LIVE[table.stage] & IS_BLENDED[table.stage]


def _rounded_up(multiple: float) -> str:
    return f"{math.ceil(multiple * 1000) / 1000:g}"
