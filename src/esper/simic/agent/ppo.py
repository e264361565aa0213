"""Recurrent PPO over factored, masked actions (Schulman et al., 2017)."""

import logging
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.growth.devices import wide_dtype
from esper.leyline import HEAD_NAMES, OP, ActionMasks, ConfigError, constants
from esper.simic.agent.advantages import (
    compute_gae,
    compute_per_head_advantages,
    head_relevance,
    leave_one_out,
    normalize_advantages,
)
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.metrics import Minibatch, PPOUpdateMetrics, measure, to_host
from esper.simic.agent.network import FactoredRecurrentActorCritic
from esper.simic.agent.optimization import (
    clip_gradients,
    clipped_surrogate,
    compiled_parts,
    explained_variance,
    gradient_norm,
    joint_kl,
    keep_gradients,
    make_optimizer,
    masked_mean,
    value_errors,
)
from esper.simic.agent.rollout import TamiyoRolloutBuffer
from esper.simic.agent.types import Decision, Hidden, MaskTensors, SequenceBatch
from esper.simic.telemetry.debug_telemetry import (
    RatioExplosionDiagnostic,
    collect_per_layer_gradients,
)
from esper.simic.telemetry.health import (
    GradientHealthMetrics,
    GradientThresholds,
    measure_gradients,
)
from esper.tamiyo.policy.masked_categorical import check_drawn

logger = logging.getLogger(__name__)


class ReplayMismatchError(RuntimeError):
    """A mask, observation or hidden state of the update differs from that of acting."""


class PPOAgent:
    """A policy that acts and learns from whole episodes.

    `act` and `value` are functions of their arguments and the parameters; only `update` changes
    the parameters. `update_count` counts the updates that had data, also those that were stopped
    by KL or skipped.
    """

    def __init__(
        self,
        network: FactoredRecurrentActorCritic,
        config: PPOConfig | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config or PPOConfig()
        self.device = torch.device(device)
        self.network = network.to(self.device)
        self._exact = wide_dtype(self.device.type)
        self.network.validate_masks = self.config.validate_masks
        self.update_count = 0
        self.optimizer = make_optimizer(network, self.config)
        parts = compiled_parts(network, self.config.compile_backend)
        self._get_action = partial(network.get_action, parts=parts)
        self._evaluate = partial(network.evaluate_actions, parts=parts)

    def new_buffer(self, num_envs: int, max_steps: int) -> TamiyoRolloutBuffer:
        return TamiyoRolloutBuffer(num_envs, max_steps, self.network.config, self.device)

    def initial_hidden(self, num_envs: int) -> Hidden:
        return self.network.get_initial_hidden(num_envs, self.device)

    @torch.inference_mode()
    def act(
        self,
        observations: np.ndarray | Tensor,
        hidden: Hidden,
        masks: ActionMasks,
        draws: np.ndarray | None,
    ) -> Decision:
        """One decision per environment for normalised observations [E, D].

        `draws` [E, 4] are uniform numbers in [0, 1), one per head, so that the action of an
        environment does not depend on the other environments; without them the most probable
        action is taken.
        """
        uniforms = None if draws is None else torch.from_numpy(draws).to(self.device, self._exact)
        actions, log_probs, values, hidden = self._get_action(
            self._finite(observations), hidden, MaskTensors.of(masks, self.device), uniforms
        )
        if self.config.compile_backend is not None and self.config.validate_masks:
            check_drawn(log_probs)
        return Decision(actions.cpu().numpy(), log_probs, values, hidden)

    @torch.inference_mode()
    def value(self, observations: np.ndarray | Tensor, hidden: Hidden) -> Tensor:
        """V [E] of states without an action, such as those after a truncated step."""
        return self.network.value(self._finite(observations), hidden)

    def _finite(self, observations: np.ndarray | Tensor) -> Tensor:
        observed = torch.as_tensor(observations, dtype=torch.float32, device=self.device)
        # One reduction instead of isfinite().all(); NaN fails the comparison as well.
        if observed.numel() and not observed.abs().amax() < math.inf:
            env, column = (~torch.isfinite(observed)).nonzero()[0].tolist()
            raise ValueError(
                f"observations must be finite: environment {env}, column {column} "
                f"is {observed[env, column].item()}"
            )
        return observed

    def update(
        self, buffer: TamiyoRolloutBuffer, generator: torch.Generator, *, detailed: bool = False
    ) -> PPOUpdateMetrics:
        """Learn from the episodes in `buffer`; `generator` shuffles environments into minibatches.

        Raises ReplayMismatchError if the log-probs of the stored actions are not those of acting.
        A non-finite loss or gradient ends the update before its step and is reported as
        `skipped`. With `detailed` the metrics include `layers` and `ratios`; nothing else changes.
        """
        if buffer.network != self.network.config:
            raise ConfigError(
                f"the buffer was made for {buffer.network}, the network is {self.network.config}"
            )
        if len(buffer) == 0:
            return PPOUpdateMetrics(steps=0, skipped="the buffer is empty")
        batch = buffer.sequences()
        advantages, returns = compute_gae(
            batch.rewards,
            batch.values,
            batch.bootstrap_values,
            batch.terminated,
            batch.truncated,
            self.config.gamma,
            self.config.gae_lambda,
        )
        if self.config.group_baseline:
            advantages = leave_one_out(advantages, batch.groups, batch.valid)
        self.update_count += 1
        replay_error = self._check_replay(batch)
        normalized = normalize_advantages(advantages, batch.valid)
        metrics = self._learn(batch, normalized, returns, generator, detailed)
        valid = advantages[batch.valid]
        explained = explained_variance(batch.values[batch.valid], returns[batch.valid])
        metrics.report({"replay_error": replay_error, "explained_variance": explained})
        spread = {
            "advantage_mean": valid.mean(),
            "advantage_std": valid.std(correction=0),
            "advantage_min": valid.min(),
            "advantage_max": valid.max(),
        }
        metrics.report(to_host(spread))
        if metrics.skipped:
            logger.warning(
                "the rest of update %d is skipped: %s", self.update_count, metrics.skipped
            )
        metrics.reduce()
        if detailed:
            metrics.ratios = self._ratios(batch)
        return metrics

    def _learn(
        self,
        batch: SequenceBatch,
        advantages: Tensor,
        returns: Tensor,
        generator: torch.Generator,
        detailed: bool,
    ) -> PPOUpdateMetrics:
        """One step per minibatch, until KL exceeds its limit or a number is not finite."""
        config = self.config
        stop_at_kl = math.inf
        if config.target_kl is not None:
            stop_at_kl = constants.KL_STOP_FACTOR * config.target_kl
        entropy_coef = self.get_entropy_coef(batch.masks.op[batch.valid])
        metrics = PPOUpdateMetrics(steps=int(batch.valid.sum()))
        metrics.report({"entropy_coef": entropy_coef})
        for epoch, rows in self._minibatches(len(batch.valid), generator):
            losses = self._losses(batch.rows(rows), advantages[rows], returns[rows])
            if not metrics.report(to_host(losses)):
                break
            if metrics.reported["approx_kl"][-1] > stop_at_kl:
                metrics.early_stop_epoch = epoch
                break
            self.optimizer.zero_grad(set_to_none=True)
            total = (
                losses["policy_loss"]
                + config.value_coef * losses["value_loss"]
                - entropy_coef * losses["entropy_bonus"]
            )
            total.backward()
            if self._critic_only:
                keep_gradients(self.network, "critic")
            if detailed:
                metrics.layers = collect_per_layer_gradients(self.network)
            if not metrics.report(self._step()):
                break
            metrics.optimizer_steps += 1
        return metrics

    @property
    def _critic_only(self) -> bool:
        return self.update_count <= self.config.critic_first

    def _minibatches(self, rows: int, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
        """(epoch, environments): every epoch has each environment once, in a new order."""
        repeats = constants.CRITIC_FIRST_REPEATS if self._critic_only else 1
        for epoch in range(self.config.epochs * repeats):
            order = torch.randperm(rows, generator=generator).to(self.device)
            for chosen in order.tensor_split(self.config.minibatches_of(rows)):
                yield epoch, chosen

    @torch.no_grad()
    def _replay(self, batch: SequenceBatch) -> Tensor:
        """Log-probs [N, T, heads] of the stored actions under the current policy."""
        return self._evaluate(batch.observations, batch.actions, batch.masks, batch.hidden)[0]

    def _check_replay(self, batch: SequenceBatch) -> float:
        """Largest |ratio - 1| of any head and step before the first optimizer step."""
        error = torch.expm1(self._replay(batch) - batch.log_probs)[batch.valid].abs()
        worst = error.amax(dim=0)
        largest = worst.max().item()
        # Not 'largest > tolerance': that would let NaN pass.
        if not largest <= constants.REPLAY_RATIO_TOLERANCE:
            raise ReplayMismatchError(
                f"before any step the ratio of the {HEAD_NAMES[int(worst.argmax())]} head is off "
                f"by {largest:.2e}; acting and learning must use the same masks, normalised "
                "observations and initial hidden state"
            )
        return largest

    def _ratios(self, batch: SequenceBatch) -> RatioExplosionDiagnostic:
        actions = batch.actions[batch.valid]
        return RatioExplosionDiagnostic.from_batch(
            batch.log_probs[batch.valid],
            self._replay(batch)[batch.valid],
            head_relevance(actions[:, OP]),
            actions,
            max_ratio=self.config.ratio_explosion,
            min_ratio=self.config.ratio_collapse,
        )

    def _losses(self, batch: SequenceBatch, advantages: Tensor, returns: Tensor) -> dict[Any, Any]:
        """Loss terms, and the sources of METRICS that are known before the gradient."""
        config, valid = self.config, batch.valid
        log_probs, entropies, values = self._evaluate(
            batch.observations, batch.actions, batch.masks, batch.hidden
        )
        ops = batch.actions[..., OP][valid]
        relevant = head_relevance(ops)
        minibatch = Minibatch(
            config,
            (log_probs - batch.log_probs)[valid].masked_fill(~relevant, 0.0),
            relevant,
            entropies[valid],
            values[valid],
            returns[valid],
            advantages[valid],
        )
        per_head = compute_per_head_advantages(minibatch.advantages, ops)
        credit = torch.stack([per_head[name] for name in HEAD_NAMES], dim=-1)
        surrogate = clipped_surrogate(minibatch.ratio, credit, config.clip_ratio)
        errors = value_errors(
            minibatch.values,
            minibatch.returns,
            batch.values[valid],
            config.value_clip,
            config.huber_delta if config.value_loss == "huber" else None,
        )
        head_entropies = masked_mean(minibatch.entropies, relevant)
        weights = head_entropies.new_tensor(
            [config.entropy_coef_per_head.get(name, 1.0) for name in HEAD_NAMES]
        )
        return {
            "policy_loss": -masked_mean(surrogate, relevant).sum(),
            "value_loss": errors.mean(),
            "entropy_bonus": (head_entropies * weights).sum(),
            "head_entropies": head_entropies,
            "head_counts": relevant.sum(dim=0).float(),
            "approx_kl": joint_kl(minibatch.log_ratio.detach(), relevant),
            **measure(minibatch),
        }

    def _step(self) -> dict[str, Any]:
        """One optimizer step if the gradient is finite; returns measures from before clipping."""
        limit = self.config.max_grad_norm
        gradients = measure_gradients(
            self.network.parameters(), GradientThresholds.for_clip_norm(limit)
        )
        heads = [self.network.head(name).parameters() for name in (*HEAD_NAMES, "value")]
        measured = to_host(
            {
                "gradients": gradients,
                "head_grad_norms": torch.stack([gradient_norm(head) for head in heads]),
                "grad_norm": clip_gradients(self.network, limit, self.config.clip_separately),
            }
        )
        if math.isfinite(measured["grad_norm"]):
            self.optimizer.step()
        health = GradientHealthMetrics.from_row(measured.pop("gradients"))
        return measured | {
            "gradient_health": health.health,
            "vanishing_tensors": health.vanishing,
            "exploding_tensors": health.exploding,
            "zero_gradient_fraction": health.zero_fraction,
        }

    def get_entropy_coef(self, op_masks: Tensor | None = None) -> float:
        """The coefficient of this update; `op_masks` [steps, ops] set the adaptive floor."""
        config = self.config
        floor = config.entropy_coef_min
        if config.adaptive_entropy_floor and op_masks is not None:
            floor *= entropy_floor_scale(op_masks)
        coef = config.entropy_coef
        if config.entropy_anneal_updates:
            progress = min(1.0, max(0, self.update_count - 1) / config.entropy_anneal_updates)
            coef += progress * (config.final_entropy_coef - config.entropy_coef)
        return max(coef, floor)


def entropy_floor_scale(op_masks: Tensor) -> float:
    """ln(all ops) / ln(mean number of legal ops) within [1, 3]; 1 if all or only one is legal.

    Normalised entropy over few legal actions is equal to fewer nats, so the floor has to be higher.
    """
    total = op_masks.shape[-1]
    legal = op_masks.float().sum(dim=-1).mean().item()
    if legal >= total or legal <= 1.0:
        return 1.0
    return min(constants.ENTROPY_FLOOR_MAX_SCALE, math.log(total) / math.log(legal))
