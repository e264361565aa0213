"""Trials of candidates: how much would each seed, briefly trained in the frozen host, lower the
validation loss?

Newborns and batches are functions of the host's key and the step; all candidates of a host see the
same batches. Host, optimiser and generators are as before afterwards, bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth import (
    CandidatePass,
    GrownModule,
    batch_size,
    call_model,
    frozen,
    keyed,
    lent,
    macs_behind,
    new_candidate,
)
from esper.leyline import SeedStage, draw_key
from esper.tamiyo import TrialPlan
from esper.tolaria.batches import Batch, DataSource

if TYPE_CHECKING:
    from esper.tolaria.recipe import HostRecipe

# Validation is cut into parts of this size; how gains differ between them tells their error.
PART = 128

Pass = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class TrialReadings:
    """Trials of the candidates of E hosts: gain and error [E, S, B] as in `TrialScores`.

    train_samples, val_samples   examples that each candidate saw
    shared   bool[S, B], ran on the pass that all share; else on one of its own
    behind   int[S, B], multiply-adds per example that a host does behind the place of a candidate
    """

    gain: np.ndarray
    error: np.ndarray
    train_samples: int
    val_samples: int
    shared: np.ndarray
    behind: np.ndarray

    @staticmethod
    def nothing(tried: np.ndarray, shared: np.ndarray, behind: np.ndarray) -> "TrialReadings":
        gain, error = np.full((2, *tried.shape), np.nan)
        return TrialReadings(gain, error, 0, 0, shared, behind)


def candidate_key(key: int, step: int, slot: int, blueprint: int) -> int:
    return draw_key(key, "trial", step, slot, blueprint)


def trial_batches(data: DataSource, key: int, step: int, plan: TrialPlan) -> Iterator[Batch]:
    """`plan.steps` training batches for one host; where an epoch has fewer, another begins."""
    done, epoch = 0, 0
    while True:
        for batch in data.train_batches(draw_key(key, "trial", step, epoch)):
            for piece in cut(batch, plan.batch):
                yield piece
                done += 1
                if done == plan.steps:
                    return
        epoch += 1


def trial_parts(data: DataSource, plan: TrialPlan) -> Iterator[Batch]:
    """The first examples of validation, in parts; batches that cannot be cut are taken whole."""
    left = plan.val_samples
    for batch in data.val_batches():
        for piece in cut(batch, PART):
            if left <= 0:
                return
            yield piece
            left -= batch_size(piece[0])


def cut(batch: Batch, size: int) -> Iterator[Batch]:
    """Pieces of at most `size` examples, where input and target are plain tensors."""
    inputs, target = batch
    if isinstance(inputs, Tensor) and isinstance(target, Tensor):
        return zip(inputs.split(size), target.split(size), strict=True)
    return iter([batch])


def summed_up(losses: np.ndarray, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Gains [C] and their errors from losses [parts, ..., 1 + C], the host's own first."""
    falls = losses[..., :1] - losses[..., 1:]
    gain = np.average(falls, axis=0, weights=sizes)
    if len(sizes) < 2:
        return np.nan_to_num(gain, nan=-np.inf), np.full(gain.shape, np.nan)
    with np.errstate(invalid="ignore"):
        spread = np.average((falls - gain) ** 2, axis=0, weights=sizes)
    return np.nan_to_num(gain, nan=-np.inf), np.sqrt(spread / (len(sizes) - 1))


def behind_candidates(network: GrownModule, example: Any) -> np.ndarray:
    """int[S, B]: multiply-adds per example that the host does behind what a candidate adds."""
    branch, bypass = (
        np.array([spec.kind == kind for spec in network.catalogue.specs])
        for kind in ("branch", "bypass")
    )
    slot, layer = macs_behind(network, example)[:, :, None]
    return np.where(branch, 0, np.where(bypass, layer, slot))


class HostTrials:
    """The trials of one host: `pairs` are its candidates, (slot, blueprint)."""

    def __init__(
        self,
        recipe: "HostRecipe",
        network: GrownModule,
        optimizer: Optimizer,
        key: int,
        step: int,
        plan: TrialPlan,
        casting: Callable[[], AbstractContextManager[None]],
        batches: Callable[[Iterator[Batch]], Iterator[Batch]],
    ) -> None:
        self.recipe, self.network, self.optimizer = recipe, network, optimizer
        self.key, self.step, self.plan = key, step, plan
        self.casting, self.batches = casting, batches

    def run(
        self, pairs: Sequence[tuple[int, int]], shared: Sequence[bool]
    ) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
        """Gain and error [C] of the candidates, and the examples for training and validation."""
        with frozen(self.network), keyed(draw_key(self.key, "trial noise", self.step)):
            together = [i for i, each in enumerate(shared) if each]
            groups = [together] if together else []
            groups += [[i] for i, each in enumerate(shared) if not each]
            gain, error, samples = *np.full((2, len(pairs)), np.nan), (0, 0)
            for group in groups:
                form = self._all if group is together else self._alone
                with form([pairs[i] for i in group]) as (params, run):
                    trained = self._train(params, run)
                    losses, sizes = self._evaluate(run)
                gain[group], error[group] = summed_up(losses, sizes)
                samples = trained, sum(sizes)
        return gain, error, samples

    @contextmanager
    def _all(
        self, pairs: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[list[list[nn.Parameter]], Pass]]:
        """All candidates on one pass."""
        seeds = [
            new_candidate(self.network, *pair, candidate_key(self.key, self.step, *pair))
            for pair in pairs
        ]
        with CandidatePass(self.network, seeds).acting() as run:
            yield [[p for p in seed.parameters() if p.requires_grad] for seed in seeds], run

    @contextmanager
    def _alone(
        self, pairs: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[list[list[nn.Parameter]], Pass]]:
        """One candidate, planted in the network for a while."""
        network, ((slot, blueprint),) = self.network, pairs
        here = [index == slot for index, _ in network.each_slot()]
        key = candidate_key(self.key, self.step, slot, blueprint)
        network.germinate(slot, blueprint, 0, key)
        network.set_blend(slot, SeedStage.HOLDING, 1.0)

        def run(inputs: Any) -> list[Any]:
            if torch.is_grad_enabled():
                return [None, call_model(network.host, inputs)]
            with network.coalition([not each for each in here]):
                host = call_model(network.host, inputs)
            return [host, call_model(network.host, inputs)]

        try:
            yield [network.seed_parameters(slot)], run
        finally:
            network.remove(slot)

    def _train(self, params: list[list[nn.Parameter]], run: Pass) -> int:
        """A few steps on the candidates' parameters; gives the number of examples."""
        recipe, every, samples = self.recipe, [p for own in params for p in own], 0
        batches = trial_batches(recipe.data, self.key, self.step, self.plan)
        with lent(self.optimizer, every):
            for inputs, target in self.batches(batches):
                with torch.enable_grad(), self.casting():
                    losses = [recipe.loss(output, target) for output in run(inputs)[1:]]
                    found = torch.autograd.grad(
                        torch.stack(losses).sum(), every, materialize_grads=True
                    )
                for param, gradient in zip(every, found, strict=True):
                    param.grad = gradient
                if recipe.max_grad_norm is not None:
                    for own in params:
                        nn.utils.clip_grad_norm_(own, recipe.max_grad_norm)
                self.optimizer.step()
                samples += batch_size(inputs)
        return samples

    def _evaluate(self, run: Pass) -> tuple[np.ndarray, list[int]]:
        """Losses [parts, 1 + C] and the sizes of the parts."""
        losses, sizes = [], []
        with self.casting():
            for inputs, target in self.batches(trial_parts(self.recipe.data, self.plan)):
                outputs = run(inputs)
                losses.append(torch.stack([self.recipe.loss(each, target) for each in outputs]))
                sizes.append(batch_size(inputs))
        return torch.stack(losses).double().cpu().numpy(), sizes
