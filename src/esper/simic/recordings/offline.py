"""A better policy from recorded episodes alone: it imitates the recorded actions, the better ones
more. No action that was not recorded is ever valued, so nothing is made up about it.

How much more is a choice:

    iql    by exp(beta (Q - V)), from implicit Q-learning (Kostrikov et al., 2021): V(s) is an upper
           expectile of Q(s, a) over the actions that were taken, and Q(s, a) = r + gamma V(s')
    group  by the softmax of beta times the returns of all episodes that began with the same
           observation: where hosts differ more than actions do, nothing has to be estimated
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline import BLEND_NAMES, HEAD_RELEVANCE, NUM_OPS, OP, ConfigError, constants, draw_key
from esper.simic.agent.network import FactoredRecurrentActorCritic
from esper.simic.control.normalization import RunningMeanStd
from esper.simic.recordings.episodes import Episodes, decided_on
from esper.simic.recordings.imitation import CloningConfig, Lesson, fit
from esper.simic.training.space import Space

Advantage = Literal["iql", "group"]


@dataclass(frozen=True)
class OfflineConfig:
    """How to learn from recorded episodes."""

    # Where the advantage of an action comes from.
    advantage: Advantage = "iql"
    # Discount of later rewards.
    gamma: float = constants.DEFAULT_GAMMA
    # Which expectile of Q is the value of a state: 0.5 is the recorder's own, 1 the best it did.
    expectile: float = 0.9
    # How strongly the policy prefers what was better than usual, in deviations of the return; with
    # 0 it imitates all alike.
    beta: float = 5.0
    max_weight: float = 100.0
    # Steps of the optimiser for Q and V, and how many recorded steps each looks at.
    steps: int = 3_000
    batch: int = 256
    learning_rate: float = 1e-3
    width: int = 128
    # How fast the slow copy of Q, which V follows, moves towards Q.
    target_rate: float = 0.01
    # The policy is extracted like a clone; nothing is held out.
    policy: CloningConfig = field(default_factory=lambda: CloningConfig(epochs=30, minibatch=32))

    def __post_init__(self) -> None:
        for name, low, high in (
            ("gamma", 0.0, 1.0),
            ("expectile", 0.5, 1.0),
            ("target_rate", 0.0, 1.0),
            ("beta", 0.0, math.inf),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(
                    f"{name} must lie between {low} and {high}, got {getattr(self, name)}"
                )
        for name in ("max_weight", "learning_rate", "steps", "batch", "width"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class OfflineReport:
    """`effective_share` is the share of steps that the weights leave in play: 1 if all count
    alike, next to 0 if a few steps decide everything. The losses are of implicit Q-learning only.
    """

    episodes: int
    mean_return: float
    value_loss: float | None
    q_loss: float | None
    effective_share: float


@dataclass(frozen=True)
class Steps:
    """All recorded steps side by side. `ends` marks the last of an episode: what follows is worth
    nothing, because nobody ever acted there and its value could only be invented."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    following: Tensor
    ends: Tensor


def encode_actions(actions: np.ndarray, space: Space) -> np.ndarray:
    """float32 [..., slots + blueprints + blends + ops]: one-hots, zeros for irrelevant heads."""
    sizes = (space.num_slots, len(space.blueprints), len(BLEND_NAMES), NUM_OPS)
    relevant = HEAD_RELEVANCE[actions[..., OP]]
    blocks = [
        (actions[..., head, None] == np.arange(size)) & relevant[..., head, None]
        for head, size in enumerate(sizes)
    ]
    return np.concatenate(blocks, axis=-1).astype(np.float32)


def flatten(episodes: Episodes, scale: RunningMeanStd) -> Steps:
    """Rewards are divided by the deviation of the episodes' returns, so that beta has a unit."""
    valid = episodes.valid
    seen = scale.normalize(torch.from_numpy(episodes.observations))
    last = np.arange(valid.shape[1]) == episodes.lengths[:, None] - 1
    spread = float(episodes.returns.std())
    rewards = episodes.rewards / (spread if spread > 1e-8 else 1.0)
    return Steps(
        seen[:, :-1][valid],
        torch.from_numpy(encode_actions(episodes.actions, episodes.space)[valid]),
        torch.from_numpy(rewards[valid].astype(np.float32)),
        seen[:, 1:][valid],
        torch.from_numpy(last[valid]),
    )


def expectile_loss(errors: Tensor, expectile: float) -> Tensor:
    """Mean of |expectile - (error < 0)| error^2, where error is Q - V."""
    weight = torch.where(errors < 0, 1.0 - expectile, expectile)
    return (weight * errors.square()).mean()


class Values(nn.Module):
    """Two Q networks, of which the lower counts, and V."""

    def __init__(self, observation_dim: int, action_dim: int, width: int, key: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key)
            self.q1 = _mlp(observation_dim + action_dim, width)
            self.q2 = _mlp(observation_dim + action_dim, width)
            self.v = _mlp(observation_dim, width)

    def q(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([observations, actions], dim=-1)
        return self.q1(both).squeeze(-1), self.q2(both).squeeze(-1)

    def value(self, observations: Tensor) -> Tensor:
        return self.v(observations).squeeze(-1)


def _mlp(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def fit_values(
    steps: Steps,
    config: OfflineConfig,
    key: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Values, Values, float, float]:
    """(Q and V, their slow copy, last losses of V and Q); a function of its arguments."""
    values = Values(
        steps.observations.shape[1], steps.actions.shape[1], config.width, draw_key(key, "values")
    )
    slow = copy.deepcopy(values).requires_grad_(False)
    optimizer = torch.optim.Adam(values.parameters(), config.learning_rate)
    shuffle = torch.Generator().manual_seed(draw_key(key, "offline"))
    v_loss = q_loss = torch.zeros(())
    for step in range(config.steps):
        rows = torch.randint(len(steps.rewards), (config.batch,), generator=shuffle)
        seen, actions = steps.observations[rows], steps.actions[rows]
        with torch.no_grad():
            goal = torch.min(*slow.q(seen, actions))
            future = torch.where(steps.ends[rows], 0.0, values.value(steps.following[rows]))
            target = steps.rewards[rows] + config.gamma * future
        v_loss = expectile_loss(goal - values.value(seen), config.expectile)
        first, second = values.q(seen, actions)
        q_loss = F.mse_loss(first, target) + F.mse_loss(second, target)
        optimizer.zero_grad(set_to_none=True)
        (v_loss + q_loss).backward()
        optimizer.step()
        with torch.no_grad():
            for own, other in zip(slow.parameters(), values.parameters(), strict=True):
                own.lerp_(other, config.target_rate)
        if (step + 1) % 100 == 0:
            progress(step + 1, config.steps)
    return values, slow, v_loss.item(), q_loss.item()


def learn_offline(
    network: FactoredRecurrentActorCritic,
    scale: RunningMeanStd,
    episodes: Episodes,
    config: OfflineConfig | None = None,
    key: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> OfflineReport:
    """Train `network` in place on recorded episodes; `scale` learns their scales.

    Only the policy is trained: the value head is left as it is. Raises ConfigError without
    episodes, without any that can be compared, or if the values diverge.
    """
    config = config or OfflineConfig()
    if len(episodes) == 0:
        raise ConfigError("there are no episodes to learn from")
    scale.update(decided_on(episodes))
    v_loss = q_loss = None
    if config.advantage == "group":
        found = group_weights(episodes, config.beta)
        weights = np.broadcast_to(found[:, None], episodes.valid.shape)[episodes.valid]
    else:
        advantages, v_loss, q_loss = _iql_advantages(episodes, scale, config, key, progress)
        weights = np.exp(config.beta * advantages).clip(max=config.max_weight)
    padded = np.zeros(episodes.valid.shape, dtype=np.float32)
    padded[episodes.valid] = weights
    fit(network, Lesson.of(episodes, scale, padded), config.policy, key, lambda epoch: None)
    return OfflineReport(
        episodes=len(episodes),
        mean_return=float(episodes.returns.mean()),
        value_loss=v_loss,
        q_loss=q_loss,
        effective_share=float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
    )


def _iql_advantages(
    episodes: Episodes,
    scale: RunningMeanStd,
    config: OfflineConfig,
    key: int,
    progress: Callable[[int, int], None],
) -> tuple[np.ndarray, float, float]:
    """Of all recorded steps, in deviations of the return; and the last losses of V and Q."""
    steps = flatten(episodes, scale)
    values, slow, v_loss, q_loss = fit_values(steps, config, key, progress)
    with torch.no_grad():
        advantages = torch.min(*slow.q(steps.observations, steps.actions))
        advantages = advantages - values.value(steps.observations)
    if not torch.isfinite(advantages).all():
        raise ConfigError("the values diverged; lower the learning rate or check the rewards")
    return advantages.numpy(), v_loss, q_loss


def group_weights(episodes: Episodes, beta: float) -> np.ndarray:
    """float64 [N]: of the episodes that began alike the softmax of their returns, times how many
    they are. `beta` is in the deviation of returns from their group's mean. Every group counts as
    much as it has episodes, and those that differ little stay alike.

    0 for an episode that nothing can be compared with; raises ConfigError if that is so for all.
    """
    _, start = np.unique(episodes.observations[:, 0], axis=0, return_inverse=True)
    start, returns = start.reshape(-1), episodes.returns
    count = np.bincount(start)[start]
    if not (count > 1).any():
        raise ConfigError(
            "no two of these episodes began alike, so that none can be compared with others; "
            "record them on a family, or keep those of a run with groups"
        )
    ahead = returns - (np.bincount(start, weights=returns)[start] / count)
    spread = float(ahead[count > 1].std())
    weights = np.exp(beta * ahead / (spread if spread > 1e-8 else 1.0))
    share = weights / np.bincount(start, weights=weights)[start]
    return np.where(count > 1, count * share, 0.0)
