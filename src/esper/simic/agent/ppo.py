"""Recurrent PPO over factored, masked actions (Schulman et al., 2017)."""

import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES, OP, ActionMasks, ConfigError, constants
from esper.simic.agent.advantages import (
    compute_gae,
    compute_per_head_advantages,
    head_relevance,
    leave_one_out,
    normalize_advantages,
)
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.losses import (
    clipped_surrogate,
    explained_variance,
    masked_mean,
    ratio_diagnostics,
    value_errors,
)
from esper.simic.agent.metrics import (
    Collected,
    PPOUpdateMetrics,
    collect,
    new_collection,
    non_finite,
    reduce_all,
    to_host,
)
from esper.simic.agent.network import FactoredRecurrentActorCritic
from esper.simic.agent.optimization import (
    clip_gradients,
    compiled_or_eager,
    grad_norm,
    keep_gradients,
    make_optimizer,
)
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.agent.types import Decision, Hidden, MaskTensors, SequenceBatch
from esper.simic.telemetry.debug_telemetry import collect_per_layer_gradients
from esper.simic.telemetry.gradient_collector import GradientThresholds, start_collecting
from esper.simic.telemetry.ratio_diagnostic import RatioExplosionDiagnostic

logger = logging.getLogger(__name__)


class ReplayMismatchError(RuntimeError):
    """Learning does not see what acting saw: a mask, an observation or a hidden state differs."""


class PPOAgent:
    """A policy that acts, and learns from whole episodes.

    `act` and `value` are functions of their arguments and the parameters; `update` is the only
    thing that changes them. `update_count` counts calls of `update` that had something to learn
    from, also when KL stopped them or they had to be skipped.
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
        self.update_count = 0
        self.optimizer = make_optimizer(network, self.config)
        backend = self.config.compile_backend
        self._get_action = compiled_or_eager(network.get_action, backend)
        self._evaluate = compiled_or_eager(network.evaluate_actions, backend)

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

        `draws` [E, 4] are uniform numbers in [0, 1), one per head, so that an environment's action
        does not depend on its neighbours; without them the most probable action is taken.
        """
        observed = self._observed(observations)
        uniforms = None if draws is None else torch.from_numpy(draws).to(self.device)
        actions, log_probs, values, hidden = self._get_action(
            observed, hidden, MaskTensors.of(masks, self.device), uniforms
        )
        return Decision(actions.cpu().numpy(), log_probs, values, hidden)

    @torch.inference_mode()
    def value(self, observations: np.ndarray | Tensor, hidden: Hidden) -> Tensor:
        """V [E] of states in which nobody acts: what a truncated episode would still have got."""
        return self.network.value(self._observed(observations), hidden)

    def _observed(self, observations: np.ndarray | Tensor) -> Tensor:
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
        self, buffer: TamiyoRolloutBuffer, generator: torch.Generator, *, closely: bool = False
    ) -> PPOUpdateMetrics:
        """Learn from the episodes in `buffer`; `generator` shuffles environments into minibatches.

        Raises ReplayMismatchError if the episodes cannot be replayed as they were acted. A
        non-finite loss or gradient ends the update before its step and is reported as `skipped`.
        Looking `closely` costs time and changes nothing: the result then has `layers` and `ratios`.
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
        metrics, collected = PPOUpdateMetrics(steps=len(buffer)), new_collection()
        shown = {
            "replay_error": self._check_replay(batch),
            "entropy_coef": self.get_entropy_coef(batch.masks.op[batch.valid]),
            "explained_variance": explained_variance(
                values=batch.values[batch.valid], returns=returns[batch.valid]
            ),
            **_advantage_metrics(advantages[batch.valid]),
        }
        collect(collected, shown)
        self._learn(
            batch,
            normalize_advantages(advantages, batch.valid),
            returns,
            self._minibatches(len(batch.valid), generator),
            shown["entropy_coef"],
            closely,
            metrics,
            collected,
        )
        if metrics.skipped:
            logger.warning(
                "the rest of update %d is skipped: %s", self.update_count, metrics.skipped
            )
        metrics.values = reduce_all(collected)
        if closely:
            metrics.ratios = self._ratios(batch)
        return metrics

    def _learn(
        self,
        batch: SequenceBatch,
        advantages: Tensor,
        returns: Tensor,
        minibatches: Iterator[tuple[int, Tensor]],
        entropy_coef: float,
        closely: bool,
        metrics: PPOUpdateMetrics,
        collected: Collected,
    ) -> None:
        """Step through the minibatches until they, the KL or finite numbers end."""
        target_kl = self.config.target_kl
        stop_at_kl = math.inf if target_kl is None else constants.KL_STOP_FACTOR * target_kl
        for epoch, rows in minibatches:
            losses = self._losses(batch.rows(rows), advantages[rows], returns[rows])
            total = (
                losses["policy_loss"]
                + self.config.value_coef * losses["value_loss"]
                - entropy_coef * losses["entropy_bonus"]
            )
            shown = to_host(losses)
            metrics.skipped = non_finite(shown)
            if metrics.skipped:
                return
            collect(collected, shown)
            if shown["approx_kl"] > stop_at_kl:
                metrics.early_stop_epoch = epoch
                return
            self._backward(total)
            if closely:
                metrics.layers = collect_per_layer_gradients(self.network)
            shown = self._step()
            metrics.skipped = non_finite(shown)
            if metrics.skipped:
                return
            collect(collected, shown)
            metrics.optimizer_steps += 1

    @property
    def _critic_only(self) -> bool:
        return self.update_count <= self.config.critic_first

    def _minibatches(self, rows: int, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
        """(epoch, environments): every epoch sees each environment once, in a new order."""
        repeats = constants.CRITIC_FIRST_REPEATS if self._critic_only else 1
        for epoch in range(self.config.epochs * repeats):
            order = torch.randperm(rows, generator=generator).to(self.device)
            for chosen in order.tensor_split(min(self.config.minibatches, rows)):
                yield epoch, chosen

    @torch.no_grad()
    def _replay(self, batch: SequenceBatch) -> Tensor:
        """Log-probs [N, T, heads] of what was done, under the policy as it is now."""
        return self._evaluate(batch.observations, batch.actions, batch.masks, batch.hidden)[0]

    def _check_replay(self, batch: SequenceBatch) -> float:
        """Largest |ratio - 1| of any head and step before the first optimiser step."""
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

    def _losses(
        self, batch: SequenceBatch, advantages: Tensor, returns: Tensor
    ) -> dict[str, Tensor]:
        """Loss terms and diagnostics of some episodes, replayed from their first hidden state."""
        config, valid = self.config, batch.valid
        log_probs, entropies, values = self._evaluate(
            batch.observations, batch.actions, batch.masks, batch.hidden
        )
        ops = batch.actions[..., OP][valid]
        relevant = head_relevance(ops)
        log_ratio = (log_probs - batch.log_probs)[valid].masked_fill(~relevant, 0.0)
        per_head = compute_per_head_advantages(advantages[valid], ops)
        credit = torch.stack([per_head[name] for name in HEAD_NAMES], dim=-1)
        surrogate = clipped_surrogate(log_ratio.exp(), credit, config.clip_ratio)
        errors = value_errors(
            values[valid],
            returns[valid],
            batch.values[valid],
            config.value_clip,
            config.huber_delta if config.value_loss == "huber" else None,
        )
        head_entropies = masked_mean(entropies[valid], relevant)
        weights = head_entropies.new_tensor(
            [config.entropy_coef_per_head.get(name, 1.0) for name in HEAD_NAMES]
        )
        return {
            "policy_loss": -masked_mean(surrogate, relevant).sum(),
            "value_loss": errors.mean(),
            "entropy_bonus": (head_entropies * weights).sum(),
            "head_entropies": head_entropies,
            "head_counts": relevant.sum(dim=0).float(),
            **ratio_diagnostics(
                log_ratio,
                relevant,
                config.clip_ratio,
                config.ratio_collapse,
                config.ratio_explosion,
            ),
        }

    def _backward(self, total: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        if self._critic_only:
            keep_gradients(self.network, "critic")

    def _step(self) -> dict[str, Any]:
        """One optimiser step if the gradient is finite; what the gradient was before clipping."""
        config = self.config
        pending = start_collecting(
            self.network.parameters(), GradientThresholds.for_clip_norm(config.max_grad_norm)
        )
        # The critic's head always has a gradient, and the policy is of one type on one device.
        assert pending is not None
        (row,) = pending.rows
        heads = [grad_norm(self.network.head(name)) for name in (*HEAD_NAMES, "value")]
        shown = to_host(
            {
                "gradients": row,
                "head_grad_norms": torch.stack(heads),
                "grad_norm": clip_gradients(
                    self.network, config.max_grad_norm, config.clip_separately
                ),
            }
        )
        if math.isfinite(shown["grad_norm"]):
            self.optimizer.step()
        gradients = pending.read([shown.pop("gradients")])
        return shown | {
            "gradient_health": gradients.health,
            "vanishing_tensors": gradients.vanishing,
            "exploding_tensors": gradients.exploding,
            "zero_gradient_fraction": gradients.zero_fraction,
        }

    def get_entropy_coef(self, op_masks: Tensor | None = None) -> float:
        """The coefficient of this update; `op_masks` [steps, ops] feed the adaptive floor.

        The floor rises with ln(all ops) / ln(mean number of legal ops), at most threefold:
        normalised entropy over few legal actions is worth fewer nats.
        """
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
    """ln(n_total) / ln(mean n_legal) within [1, 3]; 1 if all or only one of the ops is legal."""
    total = op_masks.shape[-1]
    legal = op_masks.float().sum(dim=-1).mean().item()
    if legal >= total or legal <= 1.0:
        return 1.0
    return min(constants.ENTROPY_FLOOR_MAX_SCALE, math.log(total) / math.log(legal))


def _advantage_metrics(advantages: Tensor) -> dict[str, float]:
    """Before normalisation, over the valid steps."""
    stats = [
        advantages.mean(),
        advantages.std(correction=0),
        advantages.min(),
        advantages.max(),
    ]
    names = ("advantage_mean", "advantage_std", "advantage_min", "advantage_max")
    return dict(zip(names, torch.stack(stats).tolist(), strict=True))
