"""Offline learning: a policy that imitates recorded actions, the better ones more. Actions that
were not recorded are never evaluated.

The weight of an action is one of

    iql    exp(beta (Q - V)) of implicit Q-learning (Kostrikov et al., 2021): V(s) is an upper
           expectile of Q(s, a) over the recorded actions, and Q(s, a) = r + gamma V(s')
    group  the softmax of beta times the returns of all episodes with the same first observation;
           nothing is estimated, which helps where hosts differ more than actions
"""

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline import HEAD_RELEVANCE, OP, ConfigError, constants, draw_key
from esper.simic.agent.network import FactoredRecurrentActorCritic
from esper.simic.control.normalization import RunningMeanStd
from esper.simic.recordings.episodes import Episodes, acted_on
from esper.simic.recordings.imitation import CloningConfig, EpisodeTensors, fit
from esper.simic.training.env_specs import Space

Advantage = Literal["iql", "group"]


@dataclass(frozen=True)
class OfflineConfig:
    """Settings of offline learning."""

    # How actions are weighted.
    advantage: Advantage = "iql"
    # Discount of later rewards.
    gamma: float = constants.DEFAULT_GAMMA
    # Which expectile of Q is V: 0.5 is the mean of the recorded actions, 1 the best of them.
    expectile: float = 0.9
    # How strongly better actions are preferred, per standard deviation of returns; 0: not at all.
    beta: float = 5.0
    max_weight: float = 100.0
    # Optimizer steps for Q and V, and recorded steps per batch.
    steps: int = 3_000
    batch: int = 256
    learning_rate: float = 1e-3
    width: int = 128
    # Rate of the moving average of Q that V is fitted to.
    target_rate: float = 0.01
    # How the policy is fitted; nothing is held out.
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

    def effective(self) -> dict[str, Any]:
        """The settings that have an effect, by dotted name: "group" estimates no values, and
        nothing is held out."""
        settings = asdict(self)
        policy = settings.pop("policy")
        if self.advantage == "group":
            settings = {name: settings[name] for name in ("advantage", "beta")}
        of_policy = {f"policy.{name}": x for name, x in policy.items() if name != "held_out"}
        return {**settings, **of_policy}


@dataclass(frozen=True)
class OfflineReport:
    """`effective_share` is the effective sample size as a share of all steps: 1 if all weights are
    equal, near 0 if few steps have all the weight. The losses are None without IQL."""

    episodes: int
    mean_return: float
    value_loss: float | None
    q_loss: float | None
    effective_share: float


@dataclass(frozen=True)
class Steps:
    """All recorded steps as one batch. `ends` marks the last step of an episode, after which the
    value is 0: no action was recorded there."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    following: Tensor
    ends: Tensor


def encode_actions(actions: np.ndarray, space: Space) -> np.ndarray:
    """float32 [..., slots + blueprints + blends + ops]: one-hots, zeros for irrelevant heads."""
    relevant = HEAD_RELEVANCE[actions[..., OP]]
    blocks = [
        (actions[..., head, None] == np.arange(size)) & relevant[..., head, None]
        for head, size in enumerate(space.choices)
    ]
    return np.concatenate(blocks, axis=-1).astype(np.float32)


def flatten(episodes: Episodes, normalizer: RunningMeanStd) -> Steps:
    """All steps, with rewards divided by the standard deviation of the episodes' returns."""
    valid = episodes.valid
    seen = normalizer.normalize(torch.from_numpy(episodes.observations))
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


class ValueNetworks(nn.Module):
    """Two Q networks, of which the lower estimate is used, and V."""

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
) -> tuple[ValueNetworks, ValueNetworks, float, float]:
    """(Q and V, their moving average, last losses of V and Q); a function of the arguments."""
    values = ValueNetworks(
        steps.observations.shape[1], steps.actions.shape[1], config.width, draw_key(key, "values")
    )
    average = copy.deepcopy(values).requires_grad_(False)
    optimizer = torch.optim.Adam(values.parameters(), config.learning_rate)
    shuffle = torch.Generator().manual_seed(draw_key(key, "offline"))
    v_loss = q_loss = torch.zeros(())
    for step in range(config.steps):
        rows = torch.randint(len(steps.rewards), (config.batch,), generator=shuffle)
        seen, actions = steps.observations[rows], steps.actions[rows]
        with torch.no_grad():
            goal = torch.min(*average.q(seen, actions))
            future = torch.where(steps.ends[rows], 0.0, values.value(steps.following[rows]))
            target = steps.rewards[rows] + config.gamma * future
        v_loss = expectile_loss(goal - values.value(seen), config.expectile)
        first, second = values.q(seen, actions)
        q_loss = F.mse_loss(first, target) + F.mse_loss(second, target)
        optimizer.zero_grad(set_to_none=True)
        (v_loss + q_loss).backward()
        optimizer.step()
        with torch.no_grad():
            for own, other in zip(average.parameters(), values.parameters(), strict=True):
                own.lerp_(other, config.target_rate)
        if (step + 1) % 100 == 0:
            progress(step + 1, config.steps)
    return values, average, v_loss.item(), q_loss.item()


def learn_offline(
    network: FactoredRecurrentActorCritic,
    normalizer: RunningMeanStd,
    episodes: Episodes,
    config: OfflineConfig | None = None,
    key: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> OfflineReport:
    """Train `network` in place on recorded episodes; their observations update `normalizer`.

    The value head is not trained. Raises ConfigError if there are no episodes, if none can be
    compared, or if the values diverge.
    """
    config = config or OfflineConfig()
    if len(episodes) == 0:
        raise ConfigError("there are no episodes to learn from")
    normalizer.update(acted_on(episodes))
    v_loss = q_loss = None
    if config.advantage == "group":
        weights = np.repeat(group_weights(episodes, config.beta), episodes.lengths)
    else:
        steps = flatten(episodes, normalizer)
        values, average, v_loss, q_loss = fit_values(steps, config, key, progress)
        with torch.no_grad():
            q = torch.min(*average.q(steps.observations, steps.actions))
            advantages = (q - values.value(steps.observations)).numpy()
        if not np.isfinite(advantages).all():
            raise ConfigError("the values diverged; lower the learning rate or check the rewards")
        weights = np.exp(config.beta * advantages).clip(max=config.max_weight)
    padded = np.zeros(episodes.valid.shape, dtype=np.float32)
    padded[episodes.valid] = weights
    fit(network, EpisodeTensors.of(episodes, normalizer, padded), config.policy, key)
    return OfflineReport(
        episodes=len(episodes),
        mean_return=float(episodes.returns.mean()),
        value_loss=v_loss,
        q_loss=q_loss,
        effective_share=float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
    )


def group_weights(episodes: Episodes, beta: float) -> np.ndarray:
    """float64 [N]: the softmax of returns within the episodes with the same first observation,
    times their number. `beta` is per standard deviation of returns from the mean of their group,
    over all groups.

    An episode without another one to compare has weight 0. Raises ConfigError if all have.
    """
    _, start = np.unique(episodes.observations[:, 0], axis=0, return_inverse=True)
    start, returns = start.reshape(-1), episodes.returns
    count = np.bincount(start)[start]
    if not (count > 1).any():
        raise ConfigError(
            "no two of these episodes start with the same observation, so none can be compared; "
            "record episodes with --family, which plays each host several times"
        )
    ahead = returns - (np.bincount(start, weights=returns)[start] / count)
    spread = float(ahead[count > 1].std())
    weights = np.exp(beta * ahead / (spread if spread > 1e-8 else 1.0))
    share = weights / np.bincount(start, weights=weights)[start]
    return np.where(count > 1, count * share, 0.0)
