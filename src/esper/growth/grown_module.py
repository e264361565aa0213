"""A network that can grow: any nn.Module, with slots at the outputs of chosen modules.

The host is neither copied nor rewritten. A seed acts through forward hooks that exist as long as
the seed, so an ungrown network has no overhead and gives exactly the host's output. Calling the
host or the GrownModule is the same, unless the host is given as `torch.compile(host)`: then the
GrownModule calls that.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growth.blueprints.catalogue import BlueprintCatalogue, OutputSpec, default_catalogue
from esper.growth.depth import BLOCKS, plan_depth
from esper.growth.devices import devices_of, input_device, keyed, on_device
from esper.growth.hooks import (
    GROWING,
    SEEDS_SAVED,
    check_breakable,
    has_flag,
    hooks_of_esper,
    is_wrapper,
    mark,
    original,
    unmark,
    without_graphs,
)
from esper.growth.lifecycle import GATED
from esper.growth.rehearsal import check_growth
from esper.growth.seed_slot import BlendValve, SeedSlot, make_valve
from esper.growth.sites import (
    Layouts,
    ModelInspection,
    SlotChoice,
    evaluating,
    explaining,
    inspect_model,
)
from esper.growth.slot_choice import choose_slots
from esper.growth.stacks import Stacks
from esper.leyline import (
    ConfigError,
    EsperWarning,
    InjectionSpec,
    InvalidStateMachineError,
    SeedStage,
    SlotConfig,
)
from esper.leyline.depth import Depth, DepthPlan


def check_not_growing(host: nn.Module) -> None:
    for name, module in host.named_modules():
        if isinstance(module, GrownModule) or has_flag(module, GROWING) or hooks_of_esper(module):
            raise ConfigError(
                f"{type(host).__name__} is growing already (see {name or 'the model itself'}); "
                "end that with finish() of its body, or grow the module that export() returns"
            )


def _is_like(module: nn.Module, like: Tensor) -> bool:
    """Are all tensors on that device and of that type? The check is faster than `module.to`."""
    tensors = chain(module.parameters(), module.buffers())
    return all((each.device, each.dtype) == (like.device, like.dtype) for each in tensors)


def _warn_of_partial_state(host: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not has_flag(host, SEEDS_SAVED) and not prefix.endswith("host."):
        warnings.warn(
            "state_dict() of the model holds none of the seeds that have grown in it; save that of "
            "the GrownModule (body.model, or the model that grow returns), or export() it",
            EsperWarning,
            stacklevel=3,
        )


class GrownModule(nn.Module):
    """`host` with slots at `sites`; slots are addressed by their index in `sites`.

    This class holds modules, the SlotTable holds the state of the lifecycle.
    """

    def __init__(
        self,
        host: nn.Module,
        sites: list[InjectionSpec],
        output: OutputSpec | None,
        catalogue: BlueprintCatalogue,
        host_macs: int,
        plan: DepthPlan | None = None,
    ) -> None:
        """With a `plan` the host grows in depth, and loses the blocks that come later."""
        super().__init__()
        check_breakable(host)
        self.host = original(host)
        # In a tuple, so that it is not a submodule: its parameters are the host's.
        self._compiled = (host,) if is_wrapper(host) else ()
        self.sites = sites
        self.output = output
        self.catalogue = catalogue
        self.host_macs = host_macs
        self.slots = nn.ModuleDict({site.slot_id: SeedSlot(site) for site in sites})
        self.stacks = None if plan is None else Stacks(plan, self.host)
        self._handles: dict[int, list[RemovableHandle]] = {}
        self._later: list[RemovableHandle] = []

    @staticmethod
    def wrap(
        host: nn.Module,
        slots: SlotChoice | Depth,
        example: Any,
        catalogue: BlueprintCatalogue | None = None,
        *,
        layout: Layouts | None = None,
        causal: bool | None = None,
    ) -> "GrownModule":
        """Find the chosen slots by running `host` once on `example`; raises ConfigError.

        `layout` gives layouts of outputs by module name where they are unknown ({"encoder":
        "BTC"}). With `causal` seeds do not look ahead along positions; None detects it (see
        `ModelInspection`).
        """
        plain = original(host)
        check_not_growing(plain)
        if isinstance(slots, Depth):
            return _wrap_stacks(host, plain, slots, example)
        found = inspect_model(plain, example, layout)
        return GrownModule(
            host,
            choose_slots(
                plain, slots, found.slots, causal=found.causal if causal is None else causal
            ),
            found.output,
            default_catalogue() if catalogue is None else catalogue,
            found.macs,
        )

    def around(self, host: nn.Module) -> "GrownModule":
        """Another host of the same architecture with the same slots, all empty; it is not run."""
        plan = None if self.stacks is None else self.stacks.plan
        return GrownModule(host, self.sites, self.output, self.catalogue, self.host_macs, plan)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.entry(*args, **kwargs)

    @property
    def entry(self) -> nn.Module:
        """What to call: the host, or what `torch.compile(host)` returned."""
        return self._compiled[0] if self._compiled else self.host

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """DistributedDataParallel expects a gradient of each parameter that existed when it was
        made; seeds come and go, so a Body averages their gradients instead."""
        if not has_flag(self.host, GROWING):
            return []
        parts = chain(self.slots.named_parameters(), self.slots.named_buffers())
        return [f"slots.{name}" for name, _ in parts]

    @property
    def slot_config(self) -> SlotConfig:
        return SlotConfig.from_specs(self.sites)

    def slot(self, index: int) -> SeedSlot:
        slot = self.slots[self.sites[index].slot_id]
        assert isinstance(slot, SeedSlot)
        return slot

    def each_slot(self) -> Iterator[tuple[int, SeedSlot]]:
        return ((index, self.slot(index)) for index in range(len(self.sites)))

    def host_parameters(self) -> list[nn.Parameter]:
        """Those that are trained, or were before they were frozen for growth in depth."""
        if self.stacks is None:
            return [p for p in self.host.parameters() if p.requires_grad]
        frozen, seeds = (
            {id(p) for p in own} for own in (self.stacks.frozen, self.slots.parameters())
        )
        return [
            p
            for p in self.host.parameters()
            if (p.requires_grad or id(p) in frozen) and id(p) not in seeds
        ]

    def ungrown(self) -> AbstractContextManager[None]:
        """Inside, the host is as it was before it grew in depth."""
        return nullcontext() if self.stacks is None else self.stacks.without(range(len(self.sites)))

    def seed_parameters(self, index: int) -> list[nn.Parameter]:
        """Trainable parameters of the seed in a slot, including the valve of its blend."""
        return [p for p in self.slot(index).parameters() if p.requires_grad]

    def counterparts(self, index: int) -> list[nn.Parameter | None]:
        """For each parameter of grown blocks one of the host, whose optimizer settings it gets;
        empty for other seeds."""
        if self.stacks is None or self.slot(index).seed is None:
            return []
        return self.stacks.counterparts(index)

    def germinate(self, index: int, blueprint: int, blend: int, key: int) -> None:
        """Plant a new seed in an empty slot, initialised from `key`.

        Raises InvalidStateMachineError if the slot is occupied, ConfigError if the blueprint does
        not fit or its seed returns another shape.
        """
        slot = self.slot(index)
        if slot.seed is not None:
            raise InvalidStateMachineError(f"slot {slot.site.slot_id} already holds a seed")
        if self.stacks is not None:
            blocks = self.stacks.grow(index, key)
            slot.plant(blocks, None, blueprint, blend, self.catalogue[blueprint].kind)
            return
        seed, valve = self.new_seed(index, blueprint, blend, key)
        self.check_shape(index, blueprint, seed)
        slot.plant(seed, valve, blueprint, blend, self.catalogue[blueprint].kind)
        slot.train(self.host.training)
        self._handles[index] = [
            self.host.register_forward_pre_hook(slot.follow_mode),
            self._hook_reading(slot),
            self.host.register_state_dict_pre_hook(_warn_of_partial_state),
        ]
        if slot.kind != "residual":
            self._handles[index].append(self.host.register_forward_pre_hook(slot.on_host_input))
            self._hook_later()
        self._mark_hooked()

    def new_seed(
        self, index: int, blueprint: int, blend: int, key: int
    ) -> tuple[nn.Module, BlendValve | None]:
        """A seed for a slot, initialised from `key`, and the valve of a gated blend, on the slot's
        device and of the host's type; nothing is planted. Raises ConfigError if it does not fit."""
        site, spec = self.sites[index], self.catalogue[blueprint]
        like = self._like(index, spec.kind)
        with keyed(key):
            seed = spec.build(site, self.output)
            valve = make_valve(site, spec.kind, self.output) if blend == GATED else None
        for module in (seed, valve):
            if module is not None and not _is_like(module, like):
                module.to(like.device, like.dtype)
        return seed, valve

    def _like(self, index: int, kind: str) -> Tensor:
        """A tensor of the type and device of seeds of that kind: those of the layer that they act
        on, if it has parameters, else of the host."""
        site = self.sites[index]
        widening = site.widening if kind == "bypass" else None
        name = site.module if widening is None else widening.first.module
        layer = self.host.get_submodule(name)
        known = (p for part in (layer, self.host) for p in part.parameters())
        like = next((p for p in known if p.is_floating_point()), torch.empty(0))
        if len(devices_of(self.host)) < 2:
            return like
        return torch.empty(0, device=self._device_at(name), dtype=like.dtype)

    def _device_at(self, name: str) -> torch.device:
        """The device of a module; without parameters that of the last module before it with any."""
        module, before = self.host.get_submodule(name), torch.device("cpu")
        for each in self.host.modules():
            if each is module:
                break
            for param in each.parameters(recurse=False):
                before = param.device
        return next((param.device for param in module.parameters()), before)

    def _module(self, name: str) -> nn.Module:
        """A module for hooks. Graphs skip the hooks of what `torch.compile(module)` returned."""
        return original(self.host.get_submodule(name))

    def _hook_reading(self, slot: SeedSlot) -> RemovableHandle:
        if slot.kind == "bypass":
            assert slot.site.widening is not None
            layer = self._module(slot.site.widening.first.module)
            return layer.register_forward_pre_hook(slot.on_layer_input)
        module = self._module(slot.site.module)
        return module.register_forward_hook(slot.on_slot_output)

    def _hook_later(self) -> None:
        """Branches and bypasses are added in the order of slots, not of germination, because a sum
        of floats depends on the order. Bypasses come before all other hooks of the layer."""
        for handle in self._later:
            handle.remove()
        slots = [slot for _, slot in self.each_slot()]
        self._later = [
            self.host.register_forward_hook(slot.on_later_output)
            for slot in slots
            if slot.kind == "branch"
        ]
        for slot in reversed(slots):
            if slot.kind == "bypass":
                assert slot.site.widening is not None
                layer = self._module(slot.site.widening.second.module)
                self._later.append(layer.register_forward_hook(slot.on_later_output, prepend=True))

    def _mark_hooked(self) -> None:
        """Let compiled graphs notice which modules have hooks of Esper now."""
        names = {""}
        for site in self.sites:
            names.add(site.module)
            if site.widening is not None:
                names |= {site.widening.first.module, site.widening.second.module}
        for name in names:
            module = self._module(name)
            (mark if hooks_of_esper(module) else unmark)(module)

    def check_shape(self, index: int, blueprint: int, seed: nn.Module) -> None:
        """Raises ConfigError if `seed`, of that blueprint, returns a shape that does not fit."""
        site, spec = self.sites[index], self.catalogue[blueprint]
        like = self._like(index, spec.kind)
        features = torch.zeros(spec.reads(site, 2), device=like.device, dtype=like.dtype)
        expected = features.shape
        if spec.kind == "bypass":
            assert site.widening is not None
            expected = torch.Size(site.widening.adds)
        if spec.kind == "branch":
            assert self.output is not None
            expected = torch.Size((2, self.output.outputs))
            if self.output.per_position:
                expected = torch.Size((2, site.shape[0], self.output.outputs))
        with evaluating(seed):
            found = seed(features)
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if shape != tuple(expected):
            raise ConfigError(
                f"blueprint {spec.name!r} must return shape {tuple(expected)} in slot "
                f"{site.slot_id}, but returned {shape}"
            )

    def remove(self, index: int) -> None:
        """Remove the seed of a slot and its hooks."""
        for handle in self._handles.pop(index, []):
            handle.remove()
        self.slot(index).clear()
        if self.stacks is not None:
            self.stacks.shrink(index)
        self._hook_later()
        self._mark_hooked()

    def set_blend(self, index: int, stage: SeedStage, alpha: float) -> None:
        self.slot(index).set_blend(stage, alpha)
        if self.stacks is not None:
            self._blend_blocks(index)

    def _blend_blocks(self, index: int) -> None:
        """Hooks on the blocks of a slot, only as long as they act in part."""
        assert self.stacks is not None
        slot = self.slot(index)
        partly = slot.seed is not None and slot.alpha < 1.0
        if partly == bool(self._handles.get(index)):
            return
        for handle in self._handles.pop(index, []):
            handle.remove()
        for block, adding in self.stacks.blocks_of(index):
            if partly:
                hook = block.register_forward_hook(
                    partial(slot.on_block_output, adding), with_kwargs=True
                )
                self._handles.setdefault(index, []).append(hook)
            (mark if partly else unmark)(block)

    @contextmanager
    def coalition(self, present: Sequence[bool]) -> Iterator[None]:
        """Inside, seeds whose entry (one per slot) is False do not act.

        With every seed present, slots measure the alpha they apply.
        """
        complete = all(present)
        if self.stacks is not None:
            absent = np.flatnonzero(~np.asarray(present)).tolist()
            with without_graphs() if absent else nullcontext(), self.stacks.without(absent):
                yield
            return
        for (_, slot), stays in zip(self.each_slot(), present, strict=True):
            slot.muted, slot.measuring = not stays, complete
        try:
            yield
        finally:
            for _, slot in self.each_slot():
                slot.muted = slot.measuring = False

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """If what is inside fails, the host gets back the blocks that it was given with."""
        try:
            yield
        except BaseException:
            if self.stacks is not None:
                self.release()
            raise

    def release(self) -> nn.Module:
        """Remove every seed and return the host."""
        for index, _ in self.each_slot():
            self.remove(index)
        if self.stacks is not None:
            self.stacks.release()
        return self.host


def _wrap_stacks(host: nn.Module, plain: nn.Module, depth: Depth, example: Any) -> GrownModule:
    """A host that grows in depth."""
    plan, sites = plan_depth(plain, depth, example)
    network = GrownModule(host, sites, None, BLOCKS, 0, plan)
    with network.given_back():
        found = _inspect_shallow(plain, example)
        with explaining(f"{type(plain).__name__} fails when more blocks come"):
            check_growth(network, on_device(example, input_device(plain)))
    network.output, network.host_macs = found.output, found.macs
    return network


def _inspect_shallow(model: nn.Module, example: Any) -> ModelInspection:
    try:
        return inspect_model(model, example)
    except ConfigError as error:
        raise ConfigError(f"with fewer blocks {error}") from error
