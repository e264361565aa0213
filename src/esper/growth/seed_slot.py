"""One slot of a live network: the seed in it and how it is blended into the host.

A TRAINING seed learns in isolation: it reads detached features and the network's output is exactly
the host's, but gradients reach the seed as if it were blended in. From BLENDING on the output is
`h + alpha * seed(h)`, and gradients pass through the seed as through any layer.

A residual seed reads and adds at the output of the slot's module. The others read first and add
later in the pass: a branch to the network's output, a bypass from the input of one layer to the
output of another. Blocks are part of the host; as long as alpha is below 1 each adds only that
share of its change.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.growth.blueprints.catalogue import BlueprintCatalogue, OutputSpec
from esper.growth.blueprints.modules import nearly_zero_
from esper.growth.hooks import REASON
from esper.growth.outputs import locate_in_output, locate_in_slot, main_argument
from esper.leyline import IS_BLENDED, IS_FULL, ConfigError, InjectionSpec, SeedStage, Widening

# Compiled code calls these hooks as Python does, and all that they call.
_between_graphs = torch.compiler.disable(reason=REASON)


class _Isolate(torch.autograd.Function):
    """Value of the host, gradient for both: a NaN in the seed cannot affect the host's output."""

    @staticmethod
    def forward(ctx: Any, host: Tensor, seed: Tensor) -> Tensor:
        # A copy, because the host may change its features in place later.
        return host.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


def _safe_to_read(h: Tensor) -> Tensor:
    """`h`, or the same values as a leaf with an unused gradient.

    GroupNorm crashes (torch 2.13) in the backward pass of channels-last features that need no
    gradient: those of a frozen host, and the input of an isolated seed. Strides show the layout,
    also for maps of one pixel, which count as contiguous.
    """
    if h.requires_grad or h.dim() not in (4, 5) or h.stride(1) != 1 or not torch.is_grad_enabled():
        return h
    return h.detach().requires_grad_()


class BlendValve(nn.Module):
    """A learned shift of alpha for each sample (or each position, if the target has them).

    For blending progress p and gate g it returns `p * (1 + (1 - p) * (2g - 1))`, which is in
    [0, 1], 0 for p = 0 and 1 for p = 1. Features are averaged over the dimensions `pool`; the gate
    gets `trailing` more dimensions of size 1, to broadcast against the target.
    """

    def __init__(self, channels: int, pool: tuple[int, ...] = (), trailing: int = 0) -> None:
        super().__init__()
        self.pool, self.trailing, self.progress = pool, trailing, 0.0
        hidden = self.hidden(channels)
        self.net = nn.Sequential(
            nn.Linear(channels, hidden), nn.GELU(), nearly_zero_(nn.Linear(hidden, 1)), nn.Sigmoid()
        )

    @staticmethod
    def hidden(channels: int) -> int:
        return max(1, channels // 4)

    @staticmethod
    def params(channels: int) -> int:
        """Number of parameters."""
        return (channels + 2) * BlendValve.hidden(channels) + 1

    def forward(self, h: Tensor) -> Tensor:
        if self.pool:
            h = h.mean(dim=self.pool)
        gate = self.net(h)
        if self.trailing:
            gate = gate[(..., *[None] * self.trailing)]
        return self.progress * (1.0 + (1.0 - self.progress) * (2.0 * gate - 1.0))


def make_valve(site: InjectionSpec, kind: str, output: OutputSpec | None) -> BlendValve:
    """The valve of a gated blend for a seed of that kind at `site`."""
    if kind == "bypass":
        assert site.widening is not None
        channels = _read_channels(site.widening)
        if site.widening.first.kind == "Linear":
            return BlendValve(channels)
        pool = tuple(range(2, len(site.widening.reads)))
        return BlendValve(channels, pool, len(site.widening.adds) - 2)
    if site.topology.startswith("cnn"):
        space = len(site.shape) - 1
        pool = tuple(range(2, 2 + space))
        return BlendValve(site.channels, pool, space if kind == "residual" else 0)
    if kind == "branch" and site.topology == "transformer":
        assert output is not None
        return BlendValve(site.channels, () if output.per_position else (1,))
    return BlendValve(site.channels)


def _read_channels(widening: Widening) -> int:
    return widening.reads[-1 if widening.first.kind == "Linear" else 1]


def valve_params(catalogue: BlueprintCatalogue, sites: list[InjectionSpec]) -> np.ndarray:
    """int[S, B]: parameters of the valve of a gated blend; blocks are blended without one."""
    bypass = np.array([spec.kind == "bypass" for spec in catalogue.specs])
    usual = [0 if site.blocks else BlendValve.params(site.channels) for site in sites]
    wide = [
        0 if site.widening is None else BlendValve.params(_read_channels(site.widening))
        for site in sites
    ]
    return np.where(bypass, np.array(wide)[:, None], np.array(usual)[:, None])


class _Features:
    """The features that a branch or bypass read, for later in the pass.

    If the host changed them in place, `as_read` is a copy. Else it is the same tensor, so that
    gradients are summed in the same order.
    """

    def __init__(self, h: Tensor) -> None:
        self.h, self.copy = h, h.clone()
        kind = h.device.type
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.version = None if self._uncounted() else h._version

    def _uncounted(self) -> bool:
        return self.h.is_inference()

    def casting(self) -> AbstractContextManager[None]:
        """Autocast as at the slot: a host may enable it only inside its own `forward`."""
        kind, (enabled, dtype) = self.h.device.type, self.autocast
        if torch.is_autocast_enabled(kind) == enabled:
            return nullcontext()
        return torch.autocast(kind, dtype, enabled)

    def as_read(self) -> Tensor:
        if self._uncounted() or self.h._version != self.version:
            return self.copy
        return self.h


class _Call(threading.local):
    """What a seed stores between reading and adding, per thread; copies start empty.

    `begun` is True while this thread is inside the network. `last` is what a bypass read last, for
    activation checkpoints that recompute only the layer it adds to.
    """

    begun = False
    features: _Features | None = None
    last: _Features | None = None

    def __reduce__(self) -> tuple[type["_Call"], tuple[()]]:
        return _Call, ()


class SeedSlot(nn.Module):
    """The seed of one slot, or none. Methods `on_...` are forward hooks, for any number of threads.

    alpha       blending progress; `applied_alpha` is the average that was applied
    muted       the seed does not act, for counterfactuals
    measuring   the alphas of a gated blend are recorded for `applied_alpha`
    """

    seed: nn.Module | None
    valve: BlendValve | None

    def __init__(self, site: InjectionSpec) -> None:
        super().__init__()
        self.site = site
        self.muted = self.measuring = False
        self.clear()

    def plant(
        self, seed: nn.Module, valve: BlendValve | None, blueprint: int, blend: int, kind: str
    ) -> None:
        self.seed, self.valve, self.kind = seed, valve, kind
        self.blueprint, self.blend = blueprint, blend
        self.set_blend(SeedStage.GERMINATED, 0.0)

    def set_blend(self, stage: SeedStage, alpha: float) -> None:
        """A full blend needs no valve: it is removed at the end of the ramp."""
        self.stage, self.alpha = stage, alpha
        if IS_FULL[stage]:
            self.valve = None
        if self.valve is not None:
            self.valve.progress = alpha

    def clear(self) -> None:
        self.seed = self.valve = None
        self.kind = ""
        self.blueprint = self.blend = -1
        self.stage = SeedStage.DORMANT
        self.alpha = 0.0
        self._measured: list[tuple[Tensor, int]] = []
        self._call = _Call()

    def applied_alpha(self) -> float:
        """Mean alpha of the blends measured since the last call, else the scheduled one.

        It waits for the device: call it once per pass over the data.
        """
        measured, self._measured = self._measured, []
        if self.valve is None or not measured:
            return self.alpha
        total = torch.zeros((), device=measured[0][0].device)
        for alphas, _ in measured:
            total = total + alphas
        return float(total) / sum(count for _, count in measured)

    @_between_graphs
    def follow_mode(self, module: nn.Module, args: Any) -> None:
        """Follow the host's train/eval mode: seeds are not its submodules."""
        if self.training != module.training:
            self.train(module.training)

    @_between_graphs
    def on_slot_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Blend into the output of the slot's module, or store a branch's features for the end."""
        if self._idle:
            return None
        location = locate_in_slot(output)
        if location is None:
            raise ConfigError(
                f"module {self.site.module!r} returned an output without a tensor to extend "
                f"({type(output).__name__}), unlike on the example"
            )
        h = location.get(output)
        if self.kind == "branch":
            # Outside a pass it is not needed: an activation checkpoint is being recomputed.
            features = _Features(h)
            self._call.features = features if self._call.begun else None
            return None
        return location.replace(output, self._blend(h, self.change(h)))

    @_between_graphs
    def on_host_input(self, module: nn.Module, args: Any) -> None:
        """A pass begins; drop what is left of a failed one."""
        self._call.begun, self._call.features, self._call.last = True, None, None

    @_between_graphs
    def on_layer_input(self, module: nn.Module, args: Any) -> None:
        """Store what a bypass reads for the layer that it adds to."""
        self._call.features = None if self._idle else _Features(args[0])

    @_between_graphs
    def on_later_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Add a branch to the network's output or a bypass to a layer's, if this pass ran the
        module that it reads from."""
        features = self._call.features
        self._call.begun, self._call.features = False, None
        if self.kind == "bypass":
            features = self._checkpointed(features)
        if features is None:
            return None
        location = locate_in_output(output)
        if location is None:
            raise ConfigError(
                f"the network's output ({type(output).__name__}) has no tensor for the branch "
                f"from {self.site.module!r}, unlike on the example"
            )
        with features.casting():
            change = self.change(features.as_read())
        return location.replace(output, self._blend(location.get(output), change))

    @_between_graphs
    def on_block_output(
        self, adding: bool, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Blend a block in: `adding` says that the host adds its output to its input."""
        location = locate_in_slot(output)
        assert location is not None
        result = location.get(output)
        if adding:
            return location.replace(output, self.alpha * result)
        read = main_argument((*args, *kwargs.values()), result)
        assert read is not None
        return location.replace(output, read + self.alpha * (result - read))

    @property
    def _idle(self) -> bool:
        return self.muted or self.stage <= SeedStage.GERMINATED

    def _checkpointed(self, features: _Features | None) -> _Features | None:
        """What was read in this pass or, in a recomputed checkpoint, in the one before."""
        call = self._call
        if features is None and not self._idle and torch._C._current_graph_task_id() != -1:
            if call.last is None:
                raise ConfigError(
                    f"a bypass in slot {self.site.slot_id} is recomputed in another thread than "
                    "its first layer; put both layers into one activation checkpoint"
                )
            return call.last
        call.last = features if self.training else None
        if call.last is not None and not torch.is_grad_enabled():
            # Inside a checkpoint: the recomputed graph must not extend beyond it.
            call.last = _Features(call.last.as_read().detach())
        return features

    def _blend(self, target: Tensor, change: Tensor) -> Tensor:
        change = change.to(target.device)  # a network may be spread over devices
        if self.stage == SeedStage.TRAINING:
            return _Isolate.apply(target, change)
        return target + change

    def change(self, h: Tensor) -> Tensor:
        """What the seed adds, times alpha from BLENDING on, in the layout of its target."""
        assert self.seed is not None
        isolated = self.stage == SeedStage.TRAINING
        reading = () if self.kind == "bypass" else self.site.reading
        writing = self.site.writing if self.kind == "residual" else ()
        h = h.permute(reading) if reading else h
        change = self.seed(_safe_to_read(h.detach() if isolated else h))
        if not isolated:
            assert IS_BLENDED[self.stage]
            if self.valve is not None:
                change = self._applied(self.valve(h)) * change
            elif self.alpha != 1.0:
                change = self.alpha * change
        return change.permute(writing) if writing else change

    def _applied(self, alpha: Tensor) -> Tensor:
        if self.measuring:
            self._measured.append((alpha.detach().sum(), alpha.numel()))
        return alpha
