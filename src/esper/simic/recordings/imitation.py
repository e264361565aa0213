"""Behaviour cloning: a policy that does what another controller did, as a start for PPO."""

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
from esper.simic.recordings.episodes import Episodes, decided_on


@dataclass(frozen=True)
class CloningConfig:
    """How to imitate."""

    # Passes over the episodes; the one with the lowest held-out loss is kept.
    epochs: int = 60
    learning_rate: float = 1e-3
    # Episodes per step of the optimiser, each replayed from its initial hidden state.
    minibatch: int = 8
    # Share of the episodes that is never learnt from, to measure agreement on.
    held_out: float = 0.25
    # What a step is paid for the entropies of its heads: PPO explores only as far as a clone has
    # doubts, and one without any is never in two minds again.
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
    """How often the most probable action is the teacher's, all relevant heads together.

    `always_wait` is what a policy that never does anything would reach. `acting` looks only at
    steps where the teacher did something; None if there were none.
    """

    steps: int
    overall: float
    acting: float | None
    always_wait: float


@dataclass(frozen=True)
class CloningReport:
    """The losses are mean negative log-likelihoods per step, of held-out episodes, less what their
    entropies are paid."""

    epochs: int
    best_epoch: int
    first_loss: float
    loss: float
    held_out: Agreement


@dataclass(frozen=True)
class Lesson:
    """Episodes as the network takes them: normalised observations, masks, actions, weights.

    Everything is [N, T, ...]; `weights` is 0 in padding.
    """

    observations: Tensor
    masks: MaskTensors
    actions: Tensor
    weights: Tensor

    @staticmethod
    def of(
        episodes: Episodes, scale: RunningMeanStd, weights: np.ndarray | None = None
    ) -> "Lesson":
        valid = torch.from_numpy(episodes.valid)
        seen = scale.normalize(torch.from_numpy(episodes.observations[:, :-1]))
        weight = valid.float()
        if weights is not None:
            weight = weight * torch.from_numpy(weights.astype(np.float32))
        actions = torch.from_numpy(episodes.actions)
        return Lesson(
            torch.where(valid[..., None], seen, 0.0),
            episodes.masks(),
            torch.where(valid[..., None], actions, 0),
            weight,
        )

    def rows(self, rows: Tensor) -> "Lesson":
        return Lesson(
            self.observations[rows], self.masks.rows(rows), self.actions[rows], self.weights[rows]
        )


def weighted_nll(
    network: FactoredRecurrentActorCritic, lesson: Lesson, entropy: float = 0.0
) -> Tensor:
    """Mean negative log-likelihood of the actions: masked cross entropy, relevant heads summed.

    `entropy` times their normalised entropies is subtracted (Pereyra et al., 2017)."""
    hidden = network.get_initial_hidden(len(lesson.actions))
    log_probs, entropies, _ = network.evaluate_actions(
        lesson.observations, lesson.actions, lesson.masks, hidden
    )
    gains = (log_probs + entropy * entropies).sum(dim=-1)
    return -(gains * lesson.weights).sum() / lesson.weights.sum().clamp(min=1e-8)


def fit(
    network: FactoredRecurrentActorCritic,
    lesson: Lesson,
    config: CloningConfig,
    key: int,
    after_epoch: Callable[[int], None],
) -> None:
    """Raise the weighted likelihood of the lesson's actions; the order is a function of `key`."""
    optimizer = torch.optim.Adam(
        network.parameters(), config.learning_rate, eps=constants.ADAM_EPSILON
    )
    for epoch in range(1, config.epochs + 1):
        order = generator(key, "cloning", epoch).permutation(len(lesson.actions))
        for rows in torch.from_numpy(order).split(config.minibatch):
            optimizer.zero_grad(set_to_none=True)
            weighted_nll(network, lesson.rows(rows), config.entropy).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), constants.MAX_GRAD_NORM)
            optimizer.step()
        after_epoch(epoch)


def clone(
    network: FactoredRecurrentActorCritic,
    scale: RunningMeanStd,
    episodes: Episodes,
    config: CloningConfig | None = None,
    key: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CloningReport:
    """Train `network` in place to do what was done in `episodes`; `scale` learns their scales.

    The value head is left as it is. Raises ConfigError if there are fewer than two episodes, since
    one of them has to be held out.
    """
    config = config or CloningConfig()
    learn, held_out = split(episodes, config.held_out, key)
    scale.update(decided_on(learn))
    lesson, exam = Lesson.of(learn, scale), Lesson.of(held_out, scale)
    first = best = _loss(network, exam, config.entropy)
    kept, best_epoch = copy.deepcopy(network.state_dict()), 0

    def after_epoch(epoch: int) -> None:
        nonlocal best, kept, best_epoch
        loss = _loss(network, exam, config.entropy)
        if loss < best:
            best, kept, best_epoch = loss, copy.deepcopy(network.state_dict()), epoch
        progress(epoch, config.epochs)

    fit(network, lesson, config, key, after_epoch)
    network.load_state_dict(kept)
    return CloningReport(config.epochs, best_epoch, first, best, agreement(network, exam))


def split(episodes: Episodes, share: float, key: int) -> tuple[Episodes, Episodes]:
    """(to learn from, held out), at least one episode each."""
    if len(episodes) < 2:
        raise ConfigError("imitation needs at least 2 episodes, one of them to be held out")
    order = generator(key, "held-out").permutation(len(episodes))
    held = min(max(1, round(share * len(episodes))), len(episodes) - 1)
    return episodes.rows(np.sort(order[held:])), episodes.rows(np.sort(order[:held]))


@torch.no_grad()
def _loss(network: FactoredRecurrentActorCritic, lesson: Lesson, entropy: float) -> float:
    return weighted_nll(network, lesson, entropy).item()


@torch.no_grad()
def agreement(network: FactoredRecurrentActorCritic, lesson: Lesson) -> Agreement:
    """Compare the network's most probable actions with those of the lesson."""
    hidden = network.get_initial_hidden(len(lesson.actions))
    features, _ = network.encode(lesson.observations, hidden)
    chosen, _, _, _ = network.decide(features, lesson.masks)
    valid = lesson.weights > 0
    ops = lesson.actions[..., OP]
    same = ((chosen == lesson.actions) | ~head_relevance(ops)).all(dim=-1)
    acts = valid & (ops != LifecycleOp.WAIT)
    return Agreement(
        steps=int(valid.sum()),
        overall=same[valid].float().mean().item(),
        acting=same[acts].float().mean().item() if acts.any() else None,
        always_wait=1.0 - acts.sum().item() / valid.sum().item(),
    )
