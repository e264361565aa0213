"""One slot of a live network: the seed in it and how it is blended into the host.

While TRAINING a seed learns in isolation: it reads detached features, and the network's output is
the host's own, bit for bit, although gradients reach the seed as if it were blended in. From
BLENDING on the output is `h + alpha * delta(h)` and gradients pass through the seed like through
any layer.

A residual seed reads and adds at the output of the slot's module. The others read first and add
later in the pass: a branch to the network's output, a bypass from the input of one layer to the
output of another.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.growth.blueprints.catalogue import BlueprintCatalogue, OutputSpec
from esper.growth.blueprints.modules import nearly_zero_
from esper.growth.outputs import locate_in_output, locate_in_slot
from esper.leyline import IS_BLENDED, IS_FULL, ConfigError, InjectionSpec, SeedStage, Widening


class _Isolate(torch.autograd.Function):
    """Value of the host, gradient for both: a NaN in the seed cannot touch the host's output."""

    @staticmethod
    def forward(ctx: Any, host: Tensor, seed: Tensor) -> Tensor:
        # A copy, because the host may change its own features in place further on.
        return host.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


def _safe_to_read(h: Tensor) -> Tensor:
    """`h`, or the same values as a leaf that asks for a gradient nobody uses.

    GroupNorm kills the process (torch 2.13) in the backward pass of channels-last features that
    need no gradient: those of a frozen host, and what an isolated seed reads. Strides tell, also
    for maps of one pixel, which count as contiguous.
    """
    if h.requires_grad or h.dim() not in (4, 5) or h.stride(1) != 1 or not torch.is_grad_enabled():
        return h
    return h.detach().requires_grad_()


class BlendValve(nn.Module):
    """A learned shift of alpha for each sample (or each position, where the target has them).

    For blending progress p it returns `p * (1 + (1 - p) * (2g - 1))`, which is within [0, 1], 0
    for p = 0 and 1 for p = 1 whatever its setting g: blending starts and ends smoothly.
    Features are averaged over the dimensions `pool`; the setting gets `trailing` dimensions of
    one more, so that it broadcasts against the target.
    """

    def __init__(self, channels: int, pool: tuple[int, ...] = (), trailing: int = 0) -> None:
        super().__init__()
        self.pool = pool
        self.trailing = trailing
        self.progress = 0.0
        hidden = self.hidden(channels)
        self.net = nn.Sequential(
            nn.Linear(channels, hidden), nn.GELU(), nearly_zero_(nn.Linear(hidden, 1)), nn.Sigmoid()
        )

    @staticmethod
    def hidden(channels: int) -> int:
        return max(1, channels // 4)

    @staticmethod
    def params(channels: int) -> int:
        """How many it has."""
        return (channels + 2) * BlendValve.hidden(channels) + 1

    def forward(self, h: Tensor) -> Tensor:
        """Alpha for the slot's features `h`, of a shape that broadcasts against the target."""
        if self.pool:
            h = h.mean(dim=self.pool)
        setting = self.net(h)
        if self.trailing:
            setting = setting[(..., *[None] * self.trailing)]
        return self.progress * (1.0 + (1.0 - self.progress) * (2.0 * setting - 1.0))


def make_valve(site: InjectionSpec, kind: str, output: OutputSpec | None) -> BlendValve:
    """The valve of a gated blend for a seed of that kind at `site`."""
    if kind == "bypass":
        assert site.widening is not None
        return _bypass_valve(site.widening)
    if site.topology.startswith("cnn"):
        space = len(site.shape) - 1
        pool = tuple(range(2, 2 + space))
        return BlendValve(site.channels, pool, space if kind == "residual" else 0)
    if kind == "branch" and site.topology == "transformer":
        assert output is not None
        return BlendValve(site.channels, () if output.per_position else (1,))
    return BlendValve(site.channels)


def _bypass_valve(widening: Widening) -> BlendValve:
    """It reads what the bypass reads: maps on the whole, anything else position by position."""
    reads, channels = widening.reads, _read_channels(widening)
    if widening.first.kind == "Linear":
        return BlendValve(channels)
    return BlendValve(channels, tuple(range(2, len(reads))), len(widening.adds) - 2)


def _read_channels(widening: Widening) -> int:
    return widening.reads[-1 if widening.first.kind == "Linear" else 1]


def valve_params(catalogue: BlueprintCatalogue, sites: list[InjectionSpec]) -> np.ndarray:
    """int[S, B]: parameters of the valve that a gated blend adds while it lasts."""
    bypass = np.array([spec.kind == "bypass" for spec in catalogue.specs])
    usual = [BlendValve.params(site.channels) for site in sites]
    wide = [
        0 if site.widening is None else BlendValve.params(_read_channels(site.widening))
        for site in sites
    ]
    return np.where(bypass, np.array(wide)[:, None], np.array(usual)[:, None])


class _Features:
    """What a branch or bypass read, for later in the pass.

    The host may change its features in place in the meantime: then a copy is what was read. Else
    it is the features themselves, so that gradients are summed in the same order with or without.
    """

    def __init__(self, h: Tensor) -> None:
        self.h, self.copy = h, h.clone()
        kind = h.device.type
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.version = None if self._uncounted() else h._version

    def _uncounted(self) -> bool:
        return torch.compiler.is_compiling() or self.h.is_inference()

    def casting(self) -> AbstractContextManager[None]:
        """Autocast as it was at the slot: a host may have it inside its own `forward` only."""
        kind, (enabled, dtype) = self.h.device.type, self.autocast
        if torch.is_autocast_enabled(kind) == enabled:
            return nullcontext()
        return torch.autocast(kind, dtype, enabled)

    def as_read(self) -> Tensor:
        if self._uncounted() or self.h._version != self.version:
            return self.copy
        return self.h


class _Call(threading.local):
    """What a seed keeps between where it reads and where it adds, for each thread apart.

    `begun` while this thread is inside the network. `again` is what a bypass read last: activation
    checkpoints that hold only the layer it adds to come by again, backwards. Copies start empty.
    """

    begun = False
    features: _Features | None = None
    again: _Features | None = None

    def __reduce__(self) -> tuple[type["_Call"], tuple[()]]:
        return _Call, ()


class SeedSlot(nn.Module):
    """The seed of one slot, or none. Methods called `on_...` are forward hooks; they may run in
    any number of threads at once.

    alpha   blending progress; what is applied on average is `applied_alpha`
    muted   while True the seed is taken out (alpha forced to 0), for counterfactuals
    measuring   while True the alphas of a gated blend are noted for `applied_alpha`
    """

    seed: nn.Module | None
    valve: BlendValve | None

    def __init__(self, site: InjectionSpec) -> None:
        super().__init__()
        self.site = site
        self.muted = False
        self.measuring = False
        self.clear()

    def plant(
        self, seed: nn.Module, valve: BlendValve | None, blueprint: int, blend: int, kind: str
    ) -> None:
        self.seed = seed
        self.valve = valve
        self.kind = kind
        self.blueprint, self.blend = blueprint, blend
        self.set_blend(SeedStage.GERMINATED, 0.0)

    def set_blend(self, stage: SeedStage, alpha: float) -> None:
        """A full blend needs no valve: it leaves when the ramp is over."""
        self.stage, self.alpha = stage, alpha
        if IS_FULL[stage]:
            self.valve = None
        if self.valve is not None:
            self.valve.progress = alpha

    def clear(self) -> None:
        self.seed = None
        self.valve = None
        self.kind = ""
        self.blueprint = self.blend = -1
        self.stage = SeedStage.DORMANT
        self.alpha = 0.0
        self._measured: list[tuple[Tensor, int]] = []
        self._call = _Call()

    def applied_alpha(self) -> float:
        """Mean alpha of the blends measured since the last call; without any, the scheduled one.

        Waits for the device; call it once per pass over the data.
        """
        measured, self._measured = self._measured, []
        if self.valve is None or not measured:
            return self.alpha
        total = torch.zeros((), device=measured[0][0].device)
        for alphas, _ in measured:
            total = total + alphas
        return float(total) / sum(count for _, count in measured)

    def follow_mode(self, module: nn.Module, args: Any) -> None:
        """Train and evaluate with the whole network: seeds are beside it, so that its own `eval()`
        does not reach them."""
        if self.training != module.training:
            self.train(module.training)

    def on_slot_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Blend into the output of the slot's module, or keep a branch's path for the end."""
        if self._rests:
            return None
        location = locate_in_slot(output)
        if location is None:
            raise ConfigError(
                f"module {self.site.module!r} gave an output without a tensor to extend "
                f"({type(output).__name__}), unlike on the example"
            )
        h = location.get(output)
        if self.kind == "branch":
            # Outside a pass nobody asks for it: activation checkpoints come by again, backwards.
            features = _Features(h)
            self._call.features = features if self._call.begun else None
            return None
        return location.replace(output, self._blend(h, self.change(h)))

    def on_host_input(self, module: nn.Module, args: Any) -> None:
        """A pass begins; nothing is left of one that an error ended."""
        self._call.begun, self._call.features, self._call.again = True, None, None

    def on_layer_input(self, module: nn.Module, args: Any) -> None:
        """Keep what a bypass reads for the layer that it adds to. Activation checkpoints that hold
        both layers come by again, backwards, and find it."""
        self._call.features = None if self._rests else _Features(args[0])

    def on_later_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Add a branch to the network's output or a bypass to a layer's, if this pass came by
        where it reads."""
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

    @property
    def _rests(self) -> bool:
        return self.muted or self.stage <= SeedStage.GERMINATED

    def _checkpointed(self, features: _Features | None) -> _Features | None:
        """What was read, in this pass or, for a checkpoint that runs again, in the one before."""
        call = self._call
        if features is None and not self._rests and torch._C._current_graph_task_id() != -1:
            if call.again is None:
                raise ConfigError(
                    f"a bypass in slot {self.site.slot_id} is run again in another thread than its "
                    "first layer; put both layers into one activation checkpoint"
                )
            return call.again
        call.again = features if self.training else None
        if call.again is not None and not torch.is_grad_enabled():
            # A checkpoint hides the graph: that which runs again must not go beyond it.
            call.again = _Features(call.again.as_read().detach())
        return features

    def _blend(self, target: Tensor, change: Tensor) -> Tensor:
        if self.stage == SeedStage.TRAINING:
            return _Isolate.apply(target, change)
        return target + change

    def change(self, h: Tensor) -> Tensor:
        """What the seed adds, times alpha from BLENDING on, in the layout of what it adds to."""
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
