"""The transition of a step, and its events and rows of metrics for the recorder."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.growth.blueprints.catalogue import BlueprintCatalogue
from esper.growth.grown_module import GrownModule
from esper.growth.lifecycle import StageChange, failed_checks
from esper.growth.slot_table import SlotTable, metrics_columns
from esper.leyline import (
    BLEND_NAMES,
    GATE_FOR_TARGET,
    GateLevel,
    LifecycleOp,
    SeedStage,
    SeedStateReport,
    SlotConfig,
)
from esper.leyline.events import (
    Event,
    RemovalUndone,
    SeedCulled,
    SeedFossilized,
    SeedGateEvaluated,
    SeedGerminated,
    SeedStageChanged,
)
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.situation import Situation


@dataclass(frozen=True)
class Transition:
    """One step of E environments: situation, actions, situation.

    acted        bool[E], the environment was running when the step began
    terminated   bool[E], the governor ended the episode
    truncated    bool[E], the episode reached its length
    ended        bool[E], either of them: no decision follows
    rolled_back  bool[E], the governor restored the host
    train_macs   int[E], multiply-adds spent in this step, evaluations included
    host_macs    int[E], the multiply-adds of the host alone
    final_score, final_params   float[E], of the settled networks of ended episodes; NaN elsewhere,
                 None if none was settled
    """

    before: Situation
    actions: np.ndarray
    after: Situation
    acted: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    rolled_back: np.ndarray
    train_macs: np.ndarray
    host_macs: np.ndarray
    final_score: np.ndarray | None = None
    final_params: np.ndarray | None = None

    @property
    def ended(self) -> np.ndarray:
        return self.terminated | self.truncated


def absent(value: float) -> float | None:
    """None instead of NaN or infinity, for records."""
    return float(value) if math.isfinite(value) else None


class EventLog:
    """Makes events and rows, with names instead of indices."""

    def __init__(self, template: GrownModule) -> None:
        self.slots: SlotConfig = template.slot_config
        self.catalogue: BlueprintCatalogue = template.catalogue

    def changes(
        self, before: SlotTable, after: SlotTable, changes: list[StageChange], step: int
    ) -> list[Event]:
        """Events for changes of stage; `before` is the table before all of them."""
        events: list[Event] = []
        for change in changes:
            for env, slot in np.argwhere(change.where):
                events += self._change(before, after, change, int(env), int(slot), step)
        return events

    def _change(
        self,
        before: SlotTable,
        after: SlotTable,
        change: StageChange,
        env: int,
        slot: int,
        step: int,
    ) -> list[Event]:
        table = after if change.target == SeedStage.GERMINATED else before
        names = self._names(table, env, slot, step)
        source = SeedStage(change.source[env, slot]).name
        events: list[Event] = [
            SeedStageChanged(**names, from_stage=source, to_stage=change.target.name)
        ]
        if change.target == SeedStage.GERMINATED:
            blend = BLEND_NAMES[table.blend[env, slot]]
            params = int(table.params[env, slot])
            events.append(SeedGerminated(**names, blend=blend, params=params))
        if change.target in (SeedStage.CULLED, SeedStage.FOSSILIZED):
            life: dict[str, Any] = {
                "epochs_total": int(table.epochs_total[env, slot]),
                "epochs_in_stage": int(table.epochs_in_stage[env, slot]),
                "improvement": absent(table.total_improvement[env, slot]),
                "counterfactual": absent(table.contribution[env, slot]),
                "params": int(table.params[env, slot]),
            }
            if change.target == SeedStage.CULLED:
                events.append(SeedCulled(**names, **life, reason=change.reason or ""))
            else:
                events.append(SeedFossilized(**names, **life))
        return events

    def removal_undone(
        self, table: SlotTable, env: int, slot: int, step: int, before: float, without: float
    ) -> Event:
        return RemovalUndone(
            **self._names(table, env, slot, step),
            score_before=before,
            score_without=absent(without),
        )

    def closed_gates(
        self, table: SlotTable, settings: GrowthSettings, running: np.ndarray, step: int
    ) -> list[Event]:
        """For every seed that is old enough for its next stage but held back: the failed checks."""
        waiting = {
            SeedStage.TRAINING: (SeedStage.BLENDING, settings.training_epochs),
            SeedStage.BLENDING: (SeedStage.HOLDING, settings.blending_steps),
        }
        events: list[Event] = []
        for stage, (target, patience) in waiting.items():
            kept = (table.stage == stage) & (table.epochs_in_stage >= patience) & running[:, None]
            for env, slot in np.argwhere(kept):
                gate: GateLevel = GATE_FOR_TARGET[target]
                failed = failed_checks(gate, table, settings, int(env), int(slot))
                events.append(
                    SeedGateEvaluated(
                        **self._names(table, int(env), int(slot), step),
                        gate=gate.name,
                        passed=not failed,
                        target_stage=target.name,
                        checks_failed=failed,
                    )
                )
        return events

    def _names(self, table: SlotTable, env: int, slot: int, step: int) -> dict[str, Any]:
        """The fields that every event about a seed has."""
        return {
            "env": env,
            "step": step,
            "module": self.slots.names[slot],
            "slot_id": self.slots.slot_ids[slot],
            "blueprint": self.blueprint_name(table.blueprint[env, slot]),
        }

    def blueprint_name(self, index: int) -> str:
        return self.catalogue[index].name if index >= 0 else ""

    def report(self, table: SlotTable, env: int, slot: int) -> SeedStateReport:
        at = (env, slot)
        return SeedStateReport(
            module=self.slots.names[slot],
            slot_id=self.slots.slot_ids[slot],
            blueprint=self.blueprint_name(table.blueprint[at]),
            blend=BLEND_NAMES[table.blend[at]],
            stage=SeedStage(table.stage[at]).name,
            previous_stage=SeedStage(table.previous_stage[at]).name,
            epochs_in_stage=int(table.epochs_in_stage[at]),
            epochs_total=int(table.epochs_total[at]),
            alpha=float(table.alpha[at]),
            improvement_since_stage_start=absent(table.improvement_since_stage_start[at]),
            total_improvement=absent(table.total_improvement[at]),
            counterfactual_contribution=absent(table.contribution[at]),
            gradient_norm_ratio=absent(table.gradient_ratio[at]),
            params=int(table.params[at]),
            is_healthy=bool(table.healthy[at]),
        )

    def metrics_rows(self, transition: Transition, macs: np.ndarray) -> list[dict[str, Any]]:
        """One flat row for each environment that took the step."""
        table = transition.after.table
        # Elements of lists cost a tenth of those of arrays.
        columns = {name: getattr(table, name).tolist() for name in metrics_columns()}
        stages, blueprints = table.stage.tolist(), table.blueprint.tolist()
        rows = []
        for env in np.flatnonzero(transition.acted).tolist():
            row = self._metrics_row(transition, env, int(macs[env]))
            for s, module in enumerate(self.slots.names):
                row[f"{module}.stage"] = SeedStage(stages[env][s]).name
                row[f"{module}.blueprint"] = self.blueprint_name(blueprints[env][s]) or None
                for name, values in columns.items():
                    row[f"{module}.{name}"] = absent(values[env][s])
            rows.append(row)
        return rows

    def _metrics_row(self, transition: Transition, env: int, macs: int) -> dict[str, Any]:
        """Without the slots."""
        after = transition.after
        signals, table = after.signals, after.table
        slot, blueprint, blend, op = transition.actions[env].tolist()
        germinates = op == LifecycleOp.GERMINATE
        return {
            "kind": "step",
            "env": env,
            "step": after.step,
            "op": LifecycleOp(op).name,
            "slot": None if op == LifecycleOp.WAIT else self.slots.names[slot],
            "blueprint": self.blueprint_name(blueprint) if germinates else None,
            "blend": BLEND_NAMES[blend] if germinates else None,
            "train_loss": absent(signals.train_loss[env]),
            "train_score": absent(signals.train_score[env]),
            "val_loss": absent(signals.val_loss[env]),
            "val_score": absent(signals.val_score[env]),
            "score_noise": absent(table.noise[env, 0]),
            "plateau_epochs": int(signals.plateau_epochs[env]),
            "host_stabilized": bool(signals.host_stabilized[env]),
            "rolled_back": bool(transition.rolled_back[env]),
            "params": int(after.total_params[env]),
            "macs": macs,
            "train_macs": int(transition.train_macs[env]),
        }
