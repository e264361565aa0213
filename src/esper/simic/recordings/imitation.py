"""Behaviour cloning: a policy that imitates another controller, as a start for PPO."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.leyline import OP, ConfigError, LifecycleOp, constants, generator
from esper.simic.agent.advantages import head_relevance
from esper.simic.agent.network import FactoredRecurrentActorCritic
from esper.simic.agent.types import MaskTensors
from esper.simic.control.normalization import RunningMeanStd
from esper.simic.recordings.episodes import Episodes, acted_on


@dataclass(frozen=True)
class CloningConfig:
    """Settings of behaviour cloning."""

    # Passes over the episodes; the policy with the lowest held-out loss is kept.
    epochs: int = 60
    learning_rate: float = 1e-3
    # Episodes per step of the optimizer; each starts from the initial hidden state.
    minibatch: int = 8
    # Share of the hosts whose episodes are held out to measure agreement.
    held_out: float = 0.25
    # Weight of an entropy bonus. PPO explores by the entropy of the clone; without any it never
    # tries another action.
    entropy: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.minibatch < 1:
            raise ConfigError(
                f"epochs and minibatch must be at least 1, got {self.epochs} and {self.minibatch}"
            )
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0 < self.held_out < 1:
            raise ConfigError(f"held_out must lie between 0 and 1, got {self.held_out}")
        if not 0 <= self.entropy <= 1:
            raise ConfigError(f"entropy must lie between 0 and 1, got {self.entropy}")


@dataclass(frozen=True)
class Agreement:
    """How often the most probable action equals the recorded one in all relevant heads.

    `acting` counts only steps where the recorded action is not WAIT; None if there are none.
    `always_wait` is the agreement of a policy that always waits.
    """

    steps: int
    overall: float
    acting: float | None
    always_wait: float


@dataclass(frozen=True)
class CloningReport:
    """The losses are mean negative log-likelihoods per step of held-out episodes, minus the entropy
    bonus."""

    epochs: int
    best_epoch: int
    first_loss: float
    loss: float
    held_out: Agreement


@dataclass(frozen=True)
class EpisodeTensors:
    """Episodes as input of the network, with normalised observations. All tensors are [N, T, ...];
    `weights` is 0 in padding."""

    observations: Tensor
    masks: MaskTensors
    actions: Tensor
    weights: Tensor

    @staticmethod
    def of(
        episodes: Episodes, normalizer: RunningMeanStd, weights: np.ndarray | None = None
    ) -> "EpisodeTensors":
        valid = torch.from_numpy(episodes.valid)
        observations = normalizer.normalize(torch.from_numpy(episodes.observations[:, :-1]))
        weight = valid.float()
        if weights is not None:
            weight = weight * torch.from_numpy(weights.astype(np.float32))
        return EpisodeTensors(
            torch.where(valid[..., None], observations, 0.0),
            episodes.masks(),
            torch.where(valid[..., None], torch.from_numpy(episodes.actions), 0),
            weight,
        )

    def rows(self, rows: Tensor) -> "EpisodeTensors":
        return EpisodeTensors(
            self.observations[rows], self.masks.rows(rows), self.actions[rows], self.weights[rows]
        )


def weighted_nll(
    network: FactoredRecurrentActorCritic, batch: EpisodeTensors, entropy: float = 0.0
) -> Tensor:
    """Mean negative log-likelihood of the actions: masked cross entropy, relevant heads summed.

    `entropy` times their normalised entropies is subtracted (Pereyra et al., 2017)."""
    hidden = network.get_initial_hidden(len(batch.actions))
    log_probs, entropies, _ = network.evaluate_actions(
        batch.observations, batch.actions, batch.masks, hidden
    )
    gains = (log_probs + entropy * entropies).sum(dim=-1)
    return -(gains * batch.weights).sum() / batch.weights.sum().clamp(min=1e-8)


def fit(
    network: FactoredRecurrentActorCritic,
    tensors: EpisodeTensors,
    config: CloningConfig,
    key: int,
    after_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Minimise the weighted NLL of the actions; the order of minibatches depends on `key`."""
    optimizer = torch.optim.Adam(
        network.parameters(), config.learning_rate, eps=constants.ADAM_EPSILON
    )
    for epoch in range(1, config.epochs + 1):
        order = generator(key, "cloning", epoch).permutation(len(tensors.actions))
        for rows in torch.from_numpy(order).split(config.minibatch):
            optimizer.zero_grad(set_to_none=True)
            weighted_nll(network, tensors.rows(rows), config.entropy).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), constants.MAX_GRAD_NORM)
            optimizer.step()
        after_epoch(epoch)


def clone(
    network: FactoredRecurrentActorCritic,
    normalizer: RunningMeanStd,
    episodes: Episodes,
    config: CloningConfig | None = None,
    key: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CloningReport:
    """Train `network` in place to imitate `episodes`; the observations of those that are not held
    out update `normalizer`.

    The value head is not trained. Raises ConfigError for episodes of a single host, since one host
    is held out.
    """
    config = config or CloningConfig()
    training, held_out = split(episodes, config.held_out, key)
    normalizer.update(acted_on(training))
    tensors, check = (EpisodeTensors.of(each, normalizer) for each in (training, held_out))

    @torch.no_grad()
    def held_out_loss() -> float:
        return weighted_nll(network, check, config.entropy).item()

    first = best = held_out_loss()
    weights, best_epoch = copy.deepcopy(network.state_dict()), 0

    def after_epoch(epoch: int) -> None:
        nonlocal best, weights, best_epoch
        loss = held_out_loss()
        if loss < best:
            best, weights, best_epoch = loss, copy.deepcopy(network.state_dict()), epoch
        progress(epoch, config.epochs)

    fit(network, tensors, config, key, after_epoch)
    network.load_state_dict(weights)
    return CloningReport(config.epochs, best_epoch, first, best, agreement(network, check))


def split(episodes: Episodes, share: float, key: int) -> tuple[Episodes, Episodes]:
    """(training, held out), of different hosts, at least one each. A rule does the same in all
    episodes of one host, so that others of that host would already show what is held out."""
    numbers, host = np.unique(episodes.hosts, return_inverse=True)
    if len(numbers) < 2:
        raise ConfigError(
            "imitation needs episodes of at least 2 hosts, because one is held out; record more "
            "episodes, or fewer of each host (--group)"
        )
    order = generator(key, "held-out").permutation(len(numbers))
    held = min(max(1, round(share * len(numbers))), len(numbers) - 1)
    out = np.isin(host, order[:held])
    return episodes.rows(np.flatnonzero(~out)), episodes.rows(np.flatnonzero(out))


@torch.no_grad()
def agreement(network: FactoredRecurrentActorCritic, batch: EpisodeTensors) -> Agreement:
    """Compare the most probable actions of the network with the recorded ones."""
    hidden = network.get_initial_hidden(len(batch.actions))
    features, _ = network.encode(batch.observations, hidden)
    chosen, _, _, _ = network.decide(features, batch.masks)
    valid = batch.weights > 0
    ops = batch.actions[..., OP]
    same = ((chosen == batch.actions) | ~head_relevance(ops)).all(dim=-1)
    acts = valid & (ops != LifecycleOp.WAIT)
    return Agreement(
        steps=int(valid.sum()),
        overall=same[valid].float().mean().item(),
        acting=same[acts].float().mean().item() if acts.any() else None,
        always_wait=1.0 - acts.sum().item() / valid.sum().item(),
    )
