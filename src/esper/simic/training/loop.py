"""The training loop. One round reads top to bottom:

    play an episode in every environment -> update the policy -> look for anomalies
    -> one row of metrics -> checkpoint

Everything random in it is a function of (key, purpose, round, environment, step), so the state
before a round and the config decide all that follows.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from esper.leyline import EpisodeOutcome, RoundRecorder, draw_key
from esper.leyline.events import Event, GovernorSnapshot
from esper.simic.agent import (
    PPOUpdateMetrics,
    TamiyoRolloutBuffer,
    VectorEnv,
    action_draws,
    play_round,
)
from esper.simic.telemetry import (
    Escalation,
    LSTMHealth,
    TelemetryLevel,
    collect_per_layer_gradients,
    compute_lstm_health,
    resident_mb,
)
from esper.simic.training.clock import Clock
from esper.simic.training.config import TrainingConfig
from esper.simic.training.scaling import ScaledEnv
from esper.simic.training.state import TrainState


class Tally:
    """The recorder that environments talk to: passes on, and remembers the round's outcomes.

    Snapshots of the governor, one per environment and step, are told only when telemetry is
    escalated.
    """

    def __init__(self, recorder: RoundRecorder) -> None:
        self.recorder = recorder

    def begin(self, round_: int, escalation: Escalation, clock: Clock) -> None:
        self.outcomes: list[EpisodeOutcome] = []
        self.escalation, self.clock = escalation, clock
        self.recorder.begin_round(round_)

    def event(self, event: Event) -> None:
        if isinstance(event, GovernorSnapshot) and not self.escalation.wants(TelemetryLevel.DEBUG):
            return
        with self.clock.phase("telemetry"):
            self.recorder.event(event)

    def metrics(self, row: Mapping[str, Any]) -> None:
        with self.clock.phase("telemetry"):
            self.recorder.metrics(row)

    def outcome(self, outcome: EpisodeOutcome) -> None:
        self.outcomes.append(outcome)
        with self.clock.phase("telemetry"):
            self.recorder.outcome(outcome)


@dataclass(frozen=True)
class Hooks:
    """What the caller wants to know and say while a run goes on.

    on_round  after each round: its number, its row of metrics, its row of timings
    on_step   after each step of a round; what it raises ends the run within the round
    stop      asked before each round: is it time to end the run?
    """

    on_round: Callable[[int, dict[str, Any], dict[str, Any]], None] = lambda *rows: None
    on_step: Callable[[int], None] = lambda step: None
    stop: Callable[[], bool] = lambda: False


def run_training(
    config: TrainingConfig,
    state: TrainState,
    env: VectorEnv,
    max_steps: int,
    tally: Tally,
    *,
    save: Callable[[TrainState], None] = lambda state: None,
    hooks: Hooks | None = None,
) -> TrainState:
    """Play and learn until `config.rounds` are done or a hook ends the run.

    `env` is any vectorised environment with episodes of at most `max_steps`; if it is a growth
    environment, `tally` is its recorder. `save` gets the state after each round.
    """
    hooks = hooks or Hooks()
    buffer = state.agent.new_buffer(env.num_envs, max_steps)
    while state.round < config.rounds and not hooks.stop():
        clock = Clock()
        tally.begin(state.round, state.escalation, clock)
        reward_seconds = getattr(env, "reward_seconds", 0.0)
        scaled = ScaledEnv(
            env, state.observations, state.rewards, config.mode_of, clock, hooks.on_step
        )
        with clock.phase("policy"):
            draws = action_draws(config.key, state.round, env.num_envs, max_steps)
            play_round(state.agent, scaled, buffer, state.round, draws)
        # Rewards are computed where the hosts are, possibly in other processes.
        clock.move(getattr(env, "reward_seconds", 0.0) - reward_seconds, "hosts", "reward")
        with clock.phase("update"):
            shuffle = torch.Generator().manual_seed(draw_key(config.key, "shuffle", state.round))
            metrics = state.agent.update(buffer, shuffle)
        with clock.phase("telemetry"):
            row = round_row(config, state, buffer, scaled.returns, tally.outcomes, metrics)
            health = compute_lstm_health(buffer.last_hidden)
            diagnose(config, state, metrics, tally, row, health)
            tally.recorder.metrics(row)
        state.round += 1
        with clock.phase("checkpoint"):
            save(state)
        timing = clock.row(len(buffer)) | {"memory_mb": resident_mb()}
        tally.recorder.timing(timing)
        hooks.on_round(state.round - 1, row, timing)
    return state


def round_row(
    config: TrainingConfig,
    state: TrainState,
    buffer: TamiyoRolloutBuffer,
    returns: np.ndarray,
    outcomes: list[EpisodeOutcome],
    metrics: PPOUpdateMetrics,
) -> dict[str, Any]:
    """What one round came to; scores and sizes are means over episodes, None without any."""
    row: dict[str, Any] = {
        "kind": "round",
        "episodes": len(returns),
        "return": float(returns.mean()),
        "return_std": float(returns.std()),
    }
    for mode in config.modes:
        own = np.array([config.mode_of(env) == mode for env in range(len(returns))])
        row[f"return.{mode}"] = float(returns[own].mean())
        row[f"reward_std.{mode}"] = state.rewards[mode].std
    for name in ("val_score", "params", "train_macs", "germinated", "fossilized", "culled"):
        row[name] = _mean([getattr(outcome, name) for outcome in outcomes])
    row["rollbacks"] = sum(outcome.rollbacks for outcome in outcomes)
    return row | {"env_steps": len(buffer)} | metrics.flat()


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def diagnose(
    config: TrainingConfig,
    state: TrainState,
    metrics: PPOUpdateMetrics,
    tally: Tally,
    row: dict[str, Any],
    health: LSTMHealth | None = None,
) -> None:
    """Tell of anomalies that began with this update; any that lasts escalates telemetry.

    `health` is that of the hidden states that episodes ended with. While telemetry is escalated,
    the gradient of every layer in the last minibatch is told too.
    """
    drift = state.gradients.update(metrics.flat()["grad_norm"], None)
    hidden = {} if health is None else health.flat()
    report = state.detector.check_update(
        metrics.flat() | hidden,
        current_round=state.round + 1,
        total_rounds=config.rounds,
        norm_drift=drift.norm,
    )
    for event in report.events(state.round):
        tally.recorder.event(event)
    state.escalation.note(report.has_anomaly)
    row |= _finite(hidden)
    row["anomalies"] = ", ".join(report.anomaly_types) or None
    row["telemetry_level"] = state.escalation.level.name
    if state.escalation.wants(TelemetryLevel.DEBUG):
        for layer in collect_per_layer_gradients(state.agent.network):
            tally.recorder.metrics({"kind": "layer", **_finite(asdict(layer))})


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """What is not finite was not measured; the counts beside it say what it was."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
