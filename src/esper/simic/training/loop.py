"""The training loop. One round reads top to bottom:

    play an episode in every environment -> update the policy -> check for anomalies
    -> every so often, score the policy on validation hosts -> one row of metrics -> checkpoint

All randomness is a function of (key, purpose, round, environment, step), so the state before a
round and the config determine everything that follows.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from esper.leyline import EpisodeOutcome, draw_key
from esper.simic.agent.advantages import check_groups
from esper.simic.agent.metrics import PPOUpdateMetrics
from esper.simic.agent.rollout import TamiyoRolloutBuffer, VectorEnv, action_draws, play_round
from esper.simic.telemetry.debug_telemetry import check_numerical_stability, summarize_layers
from esper.simic.telemetry.health import LSTMHealth, compute_lstm_health
from esper.simic.training.config import TrainingConfig
from esper.simic.training.round_log import RoundLog, ScaledEnv, scale_returns
from esper.simic.training.state import BestPolicy, TrainState


@dataclass(frozen=True)
class Hooks:
    """Callbacks of a run.

    on_round  called after each round with its number, its row of metrics and its row of timings
    on_step   called after each step of a round; an exception ends the run within the round
    stop      called before each round; True ends the run
    """

    on_round: Callable[[int, dict[str, Any], dict[str, Any]], None] = lambda *rows: None
    on_step: Callable[[int], None] = lambda step: None
    stop: Callable[[], bool] = lambda: False


class PolicyValidator(Protocol):
    """`keep` is called with every state that scores higher than all before."""

    def score(self, state: TrainState) -> float: ...

    def keep(self, state: TrainState) -> None: ...


def run_training(
    config: TrainingConfig,
    state: TrainState,
    env: VectorEnv,
    max_steps: int,
    log: RoundLog,
    *,
    save: Callable[[TrainState], None] = lambda state: None,
    validation: PolicyValidator | None = None,
    traced: Callable[[int, str], AbstractContextManager[None]] = lambda *phase: nullcontext(),
    hooks: Hooks | None = None,
) -> TrainState:
    """Play and learn until `config.rounds` are done or a hook ends the run.

    `env` has episodes of at most `max_steps`; growth environments record to `log`. `save` gets the
    state after each round, `validation` every `config.validate_every` rounds. Rounds run inside the
    contexts `traced(round, "play")` and `traced(round, "update")`.
    """
    hooks = hooks or Hooks()
    # A resumed run has saved the counts of the detector, not its limits.
    state.detector.thresholds = config.anomalies
    state.detector.ratios = (config.ppo.ratio_collapse, config.ppo.ratio_explosion)
    if config.ppo.group_baseline:
        check_groups(torch.from_numpy(env.groups))
    buffer = state.agent.new_buffer(env.num_envs, max_steps)
    while state.round < config.rounds and not hooks.stop():
        number, detailed = state.round, state.escalation.detailed
        log.begin(number, detailed=detailed)
        clock = log.clock
        rewards = None if config.scale_returns else state.rewards
        scaled = ScaledEnv(env, state.observations, rewards, clock, hooks.on_step)
        with traced(number, "play"), clock.phase("policy"):
            draws = action_draws(config.key, number, env.num_envs, max_steps)
            play_round(state.agent, scaled, buffer, number, draws)
            if config.scale_returns:
                scale_returns(buffer, state.rewards, config.ppo.gamma)
        with traced(number, "update"), clock.phase("update"):
            shuffle = torch.Generator().manual_seed(draw_key(config.key, "shuffle", number))
            metrics = state.agent.update(buffer, shuffle, detailed=detailed)
        with clock.phase("telemetry"):
            row = round_row(config, state, buffer, scaled.returns, log.outcomes, metrics)
            row |= diagnose(config, state, metrics, compute_lstm_health(buffer.last_hidden), log)
        state.round += 1
        with clock.phase("validation"):
            row |= validation_column(config, state, validation)
        with clock.phase("telemetry"):
            for detail in details(state, metrics):
                log.metrics(_finite(detail))
            log.metrics(row)
        with clock.phase("checkpoint"):
            save(state)
        hooks.on_round(number, row, log.end(len(buffer)))
    return state


def round_row(
    config: TrainingConfig,
    state: TrainState,
    buffer: TamiyoRolloutBuffer,
    returns: np.ndarray,
    outcomes: list[EpisodeOutcome],
    metrics: PPOUpdateMetrics,
) -> dict[str, Any]:
    """The row of a round; scores and sizes are means over episodes, None without any."""
    row: dict[str, Any] = {
        "kind": "round",
        "episodes": len(returns),
        "return": float(returns.mean()),
        "return_std": float(returns.std()),
    }
    row[f"return.{config.reward_mode}"] = row["return"]
    row[f"reward_std.{config.reward_mode}"] = state.rewards.std
    for name in ("val_score", "params", "train_macs", "germinated", "fossilized", "culled"):
        known = [x for x in (getattr(outcome, name) for outcome in outcomes) if x is not None]
        row[name] = float(np.mean(known)) if known else None
    row["rollbacks"] = sum(outcome.rollbacks for outcome in outcomes)
    return row | {"env_steps": len(buffer)} | metrics.flat()


def diagnose(
    config: TrainingConfig,
    state: TrainState,
    metrics: PPOUpdateMetrics,
    health: LSTMHealth | None,
    log: RoundLog,
) -> dict[str, Any]:
    """Columns of the round's row; logs anomalies that began with this update.

    `health` is about the hidden states at the end of episodes. During an anomaly and for some
    rounds after it, telemetry is detailed.
    """
    flat, hidden = metrics.flat(), {} if health is None else health.flat()
    drift = state.gradients.update(flat["grad_norm"], flat["gradient_health"])
    report = state.detector.check_all(
        flat | hidden | drift, current_round=state.round + 1, total_rounds=config.rounds
    )
    for event in report.events(state.round):
        log.event(event)
    state.escalation.note(report.has_anomaly)
    return {
        **_finite(hidden),
        "anomalies": ", ".join(report.anomaly_types) or None,
        "telemetry_level": "DEBUG" if state.escalation.detailed else "NORMAL",
        **summarize_layers(metrics.layers),
    }


def validation_column(
    config: TrainingConfig, state: TrainState, validation: PolicyValidator | None
) -> dict[str, float | None]:
    """The score on validation hosts, None if they were not played in this round."""
    every = config.validate_every
    if validation is None or every is None or state.round % every:
        return {"validation_hosts_score": None}
    score = validation.score(state)
    if state.best is None or score > state.best.score:
        state.best = BestPolicy(state.round, score)
        validation.keep(state)
    return {"validation_hosts_score": score}


def details(state: TrainState, metrics: PPOUpdateMetrics) -> Iterator[dict[str, Any]]:
    """Rows of detailed telemetry, and a report of what is not finite if the update was skipped."""
    for layer in metrics.layers:
        yield {"kind": "layer", **asdict(layer)}
    if metrics.ratios is not None:
        yield {"kind": "ratios", **metrics.ratios.flat()}
        for example in metrics.ratios.examples:
            yield {"kind": "ratio", **example}
    if metrics.skipped is not None and metrics.steps:
        report = check_numerical_stability(state.agent.network, metrics.flat()["grad_norm_max"])
        yield {"kind": "stability", "skipped": metrics.skipped, **report.flat()}


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """The row with None for numbers that are not finite; the counts in it say what they were."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
