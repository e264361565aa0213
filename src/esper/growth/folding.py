"""Bypasses become channels of the layers that they widen.

The first layer of a bypass joins the hidden layer as more outputs, its last one the next layer as
more inputs, and its norms join those in between. That is exact where the host treats every channel
alone and all of them alike.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.blueprints.bypass import path
from esper.growth.dataflow import LAYERS
from esper.growth.hooks import has_own_hooks
from esper.growth.seed_slot import SeedSlot
from esper.leyline import LayerSpec, Widening

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NORMS = (*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm)
_NORM_STEPS = ("BatchNorm", "GroupNorm", "LayerNorm")
_MIXING_STEPS = ("RMSNorm", "PReLU")
_GROUPS = "groups"
_TENSORS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked", _GROUPS}
_OTHER_BLUEPRINT = "a blueprint that is not built in"


class _Obstacle(Exception):
    """Why a bypass cannot be folded."""


class Folding:
    """Folds bypasses into the layers of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())

    def obstacle(self, widening: Widening) -> str:
        """Why a bypass with as many channels as the layer cannot be folded; "" if it can."""
        try:
            self._columns(widening, _path(widening, widening.first.outputs))
        except _Obstacle as obstacle:
            return str(obstacle)
        return ""

    def choose(self, acting: Sequence[SeedSlot]) -> tuple[list[SeedSlot], dict[str, str]]:
        """Which bypasses among `acting` can be folded, in the order that `fold` needs, and the
        reasons of the others by slot."""
        folding: list[SeedSlot] = []
        staying: list[SeedSlot] = []
        reasons: dict[str, str] = {}
        for slot in acting:
            if slot.kind == "bypass":
                try:
                    self._check_seed(slot, acting)
                    folding.append(slot)
                except _Obstacle as obstacle:
                    staying.append(slot)
                    reasons[slot.site.slot_id] = str(obstacle)
        # A second path keeps the widths that it was made for. The list grows while it is read.
        for other in staying:
            for slot in [a for a in folding if _follows(a, other) or _follows(other, a)]:
                folding.remove(slot)
                staying.append(slot)
                reasons[slot.site.slot_id] = f"next to the second path of {other.site.slot_id}"
        # In a chain the last one first: what is added to a layer then needs no more inputs.
        ordered: list[SeedSlot] = []
        while folding:
            ready = [a for a in folding if not any(_follows(b, a) for b in folding)]
            ordered += ready
            folding = [a for a in folding if a not in ready]
        return ordered, reasons

    def fold(self, slot: SeedSlot) -> None:
        """Make the layers wider by a bypass that `choose` returned."""
        widening = _widening(slot)
        seed: Any = slot.seed
        before, after = self._columns(widening, _path(widening, len(seed[0].weight)))
        first, second = self._ends(widening)
        _append(first, seed[0])
        setattr(first, f"out_{_unit(first)}", len(first.weight))
        added = [module for module in seed if type(module) in _NORMS]
        for name, norm in zip(self._norms(widening), added, strict=True):
            self._replace(name, _wider_norm(self.modules[name], norm))
        self._add_inputs(second, slot.alpha * seed[-1].weight.detach(), before, after)

    def _ends(self, widening: Widening) -> tuple[Any, Any]:
        return self.modules[widening.first.module], self.modules[widening.second.module]

    def _norms(self, widening: Widening) -> list[str]:
        return [name for name in widening.wider if type(self.modules[name]) in _NORMS]

    def _replace(self, name: str, module: nn.Module) -> None:
        if module is not self.modules[name]:
            self.model.set_submodule(name, module)
            self.modules[name] = module

    def _add_inputs(self, layer: Any, weight: Tensor, before: int, after: int) -> None:
        # No outputs for channels that the layer has got as the first one of another bypass.
        missing = len(layer.weight) - len(weight)
        weight = torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])])
        parts = [w.unflatten(1, (before, -1, after)) for w in (layer.weight, weight)]
        joined = torch.cat(parts, 2).flatten(1, 3).detach()
        layer.weight = nn.Parameter(joined, layer.weight.requires_grad)
        setattr(layer, f"in_{_unit(layer)}", joined.shape[1])

    def _check_seed(self, slot: SeedSlot, acting: Sequence[SeedSlot]) -> None:
        widening = _widening(slot)
        seed: Any = slot.seed
        if slot.valve is not None:
            raise _Obstacle("blended with a gate")
        seeds = {other.site.module for other in acting if other.kind != "bypass"}
        for name in seeds.intersection(widening.wider):
            raise _Obstacle(f"another seed at {name!r}")
        if type(seed) is not nn.Sequential or not isinstance(seed[0], LAYERS):
            raise _Obstacle(_OTHER_BLUEPRINT)
        try:
            usual = _path(widening, len(seed[0].weight))
        except (ValueError, RuntimeError):
            raise _Obstacle(_OTHER_BLUEPRINT) from None
        if repr(seed) != repr(nn.Sequential(*usual)):
            raise _Obstacle(_OTHER_BLUEPRINT)
        self._columns(widening, usual)
        layers = [*self._ends(widening), *(self.modules[name] for name in self._norms(widening))]
        kinds = {
            (p.dtype, p.device, p.requires_grad)
            for module in (*layers, seed)
            for p in module.parameters()
        }
        if len(kinds) > 1:
            raise _Obstacle("types, devices or frozen parameters differ")

    def _columns(self, widening: Widening, bypass: list[Any]) -> tuple[int, int]:
        """How many inputs of the second layer there are for each channel, before and after it:
        (before, channels, after) are flattened. Raises _Obstacle. The bypass is on the meta device.
        """
        self._check_modules(widening)
        norms = iter(self._norms(widening))
        before = after = 1
        with torch.device("meta"), torch.no_grad():
            x = bypass[0](torch.zeros(widening.reads))
            at = x.dim() - 1 - _space(widening.first)
            for (kind, *settings), layer in zip(widening.steps, bypass[1:-1], strict=True):
                shape, x = x.shape, layer.eval()(x)
                if kind == "Permute":
                    at = settings.index(at)
                elif kind == "Unsqueeze":
                    at += settings[0] % x.dim() <= at
                elif kind == "Flatten":
                    start, end = settings
                    if start <= at <= end:
                        before *= math.prod(shape[start:at])
                        after *= math.prod(shape[at + 1 : end + 1])
                    at = min(at, start) if at <= end else at - (end - start)
                elif kind == "Mean":
                    dims = {dim % len(shape) for dim in settings[0] or range(len(shape))}
                    if at in dims:
                        raise _Obstacle("mean over channels")
                    at -= 0 if settings[1:] == [True] else sum(dim < at for dim in dims)
                elif "Pool" in kind and at >= len(shape) - int(kind[-2]):
                    raise _Obstacle(f"{kind} over channels")
                elif kind in _NORM_STEPS:
                    if at != 1 or before > 1:
                        raise _Obstacle(kind)
                    _check_norm(self.modules[next(norms)], layer, len(shape))
                elif kind in _MIXING_STEPS:
                    raise _Obstacle(kind)
        if at != x.dim() - 1 - _space(widening.second):
            raise _Obstacle("channels become positions")
        return before, after

    def _check_modules(self, widening: Widening) -> None:
        if widening.obstacle:
            raise _Obstacle(widening.obstacle)
        first, second = self._ends(widening)
        norms = [self.modules[name] for name in self._norms(widening)]
        for layer in (first, second):
            if type(layer) not in LAYERS:
                raise _Obstacle(type(layer).__name__)
            if getattr(layer, "groups", 1) != 1:
                raise _Obstacle("convolution in groups")
        steps = [step[0] for step in widening.steps if step[0] in _NORM_STEPS]
        if len(steps) != len(norms):
            raise _Obstacle(f"{steps[0]} that is not a module of torch")
        for module in (*(self.modules[name] for name in widening.wider), second):
            if has_own_hooks(module):
                raise _Obstacle(f"hooks on {type(module).__name__}")
        for module in (first, *norms, second):
            if not _TENSORS.issuperset([*module._parameters, *module._buffers]):
                raise _Obstacle(f"other parameters in {type(module).__name__}")
            if any(self.owners[id(p)] > 1 for p in module.parameters()):
                raise _Obstacle("shared parameters")


def _widening(slot: SeedSlot) -> Widening:
    assert slot.site.widening is not None
    return slot.site.widening


def _follows(slot: SeedSlot, other: SeedSlot) -> bool:
    """Whether the layer that `slot` widens is the one that `other` adds to."""
    return _widening(slot).first.module == _widening(other).second.module


def _path(widening: Widening, width: int) -> list[Any]:
    with torch.device("meta"):
        return path(widening, width)


def _space(layer: LayerSpec) -> int:
    return 0 if layer.kind == "Linear" else int(layer.kind[-2])


def _unit(layer: nn.Module) -> str:
    return "features" if isinstance(layer, nn.Linear) else "channels"


def _check_norm(norm: Any, added: Any, dims: int) -> None:
    """Can a norm of the host get the channels of a bypass? Raises _Obstacle."""
    if [name for name, _ in norm.named_parameters()] != [n for n, _ in added.named_parameters()]:
        raise _Obstacle(f"{type(norm).__name__} without bias")
    if isinstance(norm, _BATCH_NORMS):
        if norm.momentum is None:
            raise _Obstacle("BatchNorm over all batches")
        return
    if isinstance(added, nn.LayerNorm) and dims != 2:
        raise _Obstacle("LayerNorm")
    one, other = _as_groups(norm), _as_groups(added)
    if one.num_channels * other.num_groups != other.num_channels * one.num_groups:
        raise _Obstacle(f"{type(added).__name__} over groups of another size")


def _as_groups(norm: nn.Module) -> nn.GroupNorm:
    """A LayerNorm of vectors is a GroupNorm with one group."""
    if isinstance(norm, nn.GroupNorm):
        return norm
    assert isinstance(norm, nn.LayerNorm)
    groups = nn.GroupNorm(1, norm.normalized_shape[-1], norm.eps, affine=False)
    groups._parameters.update(norm._parameters)
    groups.affine = norm.elementwise_affine
    return groups.train(norm.training)


def _wider_norm(norm: Any, added: Any) -> nn.Module:
    if isinstance(norm, _BATCH_NORMS):
        norm.num_features += added.num_features
    else:
        wide, added = _as_groups(norm), _as_groups(added)
        wide.num_groups += added.num_groups
        wide.num_channels += added.num_channels
        if wide is not norm or _GROUPS in norm._buffers:
            # So that a LayerNorm of this width refuses the state dict.
            like = next(norm.parameters(), torch.empty(0))
            wide.register_buffer(_GROUPS, torch.tensor(wide.num_groups, device=like.device))
        norm = wide
    _append(norm, added)
    return norm


def _append(module: nn.Module, added: nn.Module) -> None:
    """Append what `added` has for each channel: weights, biases and running statistics."""
    for name, old in (*module.named_parameters(), *module.named_buffers()):
        if old.dim() > 0:
            joined = torch.cat([old, getattr(added, name)]).detach()
            if isinstance(old, nn.Parameter):
                joined = nn.Parameter(joined, old.requires_grad)
            setattr(module, name, joined)
