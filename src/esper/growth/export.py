"""From a grown network back to a plain nn.Module that runs where Esper is not installed.

A bypass makes the layers around it wider, if it can (`folding`). The host's other modules stay as
they are. Each other seed becomes a torch.fx GraphModule, which contains its own code, and acts as a
forward hook on the module of its slot. A branch stores its result until the end of the pass, where
a hook on the whole network adds it to the output; a bypass until the second of its layers. Results
are stored per thread: the module is a function of its input in any number of threads.
"""

import copy
import logging
import operator
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from esper.growth.devices import devices_of, input_device, keyed, on_device
from esper.growth.folding import Folding
from esper.growth.grown_module import GrownModule
from esper.growth.hooks import copy_without_esper, original, without_graphs
from esper.growth.outputs import (
    TOOLS,
    TensorLocation,
    compare_tensors,
    locate_in_output,
    locate_in_slot,
    tensors_in,
)
from esper.growth.seed_slot import SeedSlot
from esper.growth.sites import MISFITS, call_model, evaluating, explaining
from esper.leyline import IS_BLENDED, ConfigError, ExportError

log = logging.getLogger("esper")

# Where `tools.store` has a threading.local, the only storage per thread that Dynamo can trace. It
# can be neither copied nor saved, and this is an attribute that torch drops when it does either.
_STORAGE = "_compiled_call_impl"
_BRANCHES = "grown_branches"


def export(network: GrownModule, example: Any, *, fold: bool = True) -> nn.Module:
    """A plain copy of `network` with the seeds that act on its output, at their present alpha.

    A bypass makes the layers around it wider, where that is exact. With `fold=False` it stays
    beside them, for models that use these layers in other ways than on the example.

    Nothing of Esper is in it; hooks that the user put on the model stay. Raises ExportError if a
    seed cannot be turned into plain torch code, or if the copy's output on `example` differs from
    the live network's by more than rounding. The example may be on the CPU.
    """
    example = on_device(example, input_device(network.host))
    acting = [copy.deepcopy(slot) for slot in _acting(network)]
    plain, folded = _folded(network, acting if fold else [], example)
    others = [slot for slot in acting if slot.site.slot_id not in folded]
    if others:
        with explaining("the model fails on the example"):
            _Exporter(plain, network, example).add(others)
    difference, equal = compare_tensors(_outputs(network, example), _outputs(plain, example))
    if not equal:
        raise ExportError(
            f"the exported module differs from the live one by {difference:.2g} on the example; "
            "does its output depend on earlier calls, or on random numbers that are not torch's?"
        )
    log.info("the exported module equals the live one (largest difference %.2g)", difference)
    return plain


def _acting(network: GrownModule) -> list[SeedSlot]:
    """Seeds that act on the output beside the host's own modules; grown blocks are among those."""
    acting = [slot for _, slot in network.each_slot() if IS_BLENDED[slot.stage]]
    for slot in acting:
        if slot.kind == "block" and slot.alpha < 1.0:
            raise ExportError(
                f"{slot.site.name} is still being blended in; export after "
                "the end of its blend, or after finish()"
            )
    return [slot for slot in acting if slot.kind != "block"]


def _plain_copy(network: GrownModule) -> nn.Module:
    host = network.host
    frozen = {id(param) for param in network.stacks.frozen} if network.stacks is not None else set()
    try:
        plain = copy_without_esper(host)
        for own, copied in zip(host.parameters(), plain.parameters(), strict=True):
            copied.requires_grad_(own.requires_grad or id(own) in frozen)
        return plain
    except MISFITS as error:
        raise ExportError(
            f"{type(host).__name__} cannot be copied ({error}); remove what cannot be "
            "copied from its attributes"
        ) from error


def _folded(
    network: GrownModule, acting: list[SeedSlot], example: Any
) -> tuple[nn.Module, list[str]]:
    """A copy of the host whose layers contain bypasses, and the slots of those.

    None is folded if the copy then differs from the live network with these seeds alone.
    """
    plain = _plain_copy(network)
    folding = Folding(plain)
    slots, reasons = folding.choose(acting)
    for slot_id, reason in reasons.items():
        log.info("the bypass in slot %s stays a second path: %s", slot_id, reason)
    if not slots:
        return plain, []
    folded = [slot.site.slot_id for slot in slots]
    for slot in slots:
        folding.fold(slot)
    with network.coalition([site.slot_id in folded for site in network.sites]):
        expected = _outputs(network, example)
    try:
        difference, equal = compare_tensors(expected, _outputs(plain, example))
        failure = "" if equal else f"the output differs by {difference:.2g}"
    except ConfigError as error:
        failure = str(error)
    if failure:
        log.warning("all bypasses stay second paths; with wider layers %s", failure)
        return _plain_copy(network), []
    log.info("wider layers contain the bypasses in %s", ", ".join(folded))
    return plain, folded


def largest_difference(one: nn.Module, other: nn.Module, example: Any) -> float:
    """Largest absolute difference of all outputs, both in evaluation mode; NaN if one has NaN."""
    return compare_tensors(_outputs(one, example), _outputs(other, example))[0]


def _outputs(network: nn.Module, example: Any) -> list[Tensor]:
    """All outputs in evaluation mode, on the CPU, because MPS has no float64."""
    # Some models draw random numbers in evaluation, too.
    with (
        explaining("the model fails on the example"),
        without_graphs(),
        evaluating(network),
        keyed(0, devices_of(network)),
    ):
        return [output.cpu().double() for output in tensors_in(call_model(network, example))]


# --- seeds as plain torch code ---------------------------------------------------------------


class _Hook(nn.Module):
    """The code of a hook. `_graph_module` traces it into a module that does not need Esper.

    When a GraphModule is loaded, torch.fx runs its code once with proxies for the arguments, and
    keeps only operations on those. So functions that must run at every call are reached through
    the module that a hook gets: the tools are its attribute `tools_name`.
    """

    def __init__(self, tools_name: str) -> None:
        super().__init__()
        self.tools_name = tools_name

    def tools(self, module: Any) -> Any:
        return getattr(module, self.tools_name)

    def stored(self, module: Any) -> Any:
        """This thread's results of branches and bypasses that are not added yet, by name."""
        tools = self.tools(module)
        storage = tools.get(tools.store, "__dict__").get(_STORAGE)
        return tools.get(storage, "__dict__", {})


class _SeedHook(_Hook):
    def __init__(self, tools_name: str, slot: SeedSlot) -> None:
        super().__init__(tools_name)
        assert slot.seed is not None
        self.site, self.kind, self.alpha = slot.site, slot.kind, slot.alpha
        self.seed, self.valve = slot.seed, slot.valve

    def change(self, h: Any) -> Any:
        change = self.seed(h)
        if self.valve is not None:
            return self.valve(h) * change
        return change if self.alpha == 1.0 else self.alpha * change


class _SlotHook(_SeedHook):
    """After the module of a slot: adds a residual seed to its output, or stores a branch."""

    location: TensorLocation
    copied: bool

    def forward(self, module: Any, args: Any, output: Any) -> Any:
        tools, site = self.tools(module), self.site
        h = target = self.location.get(output, tools)
        if site.reading:
            h = h.permute(*site.reading)
        if self.copied:
            h = h.clone(memory_format=torch.contiguous_format)
        change = self.change(h)
        if self.kind == "branch":
            # Outside a pass of the network, as in a recomputed checkpoint, the result is dropped.
            self.stored(module).get(_BRANCHES, {}).update({site.slot_id: change})
            return output
        if site.writing:
            change = change.permute(*site.writing)
        return self.location.replace(output, target + change, tools)


class _BypassReadHook(_SeedHook):
    """Before the first layer of a bypass: stores what it adds behind the second."""

    def forward(self, module: Any, args: Any) -> None:
        # A copy, because the host may change its features in place.
        h = args[0].clone(memory_format=torch.contiguous_format)
        self.stored(module).update({f"grown_{self.site.slot_id}": self.change(h)})


class _BypassAddHook(_Hook):
    slot_id: str
    spread: bool

    def forward(self, module: Any, args: Any, output: Any) -> Any:
        changes = self.stored(module)
        if self.spread:
            change = changes.pop(f"grown_{self.slot_id}", output.new_zeros(()))
            return output + change.to(output.device)
        return output + changes.pop(f"grown_{self.slot_id}", 0.0)


class _BeginHook(_Hook):
    """Before the network: nothing is left of an earlier pass."""

    bypasses: list[str]
    has_branches: bool

    def forward(self, module: Any, args: Any) -> None:
        tools = self.tools(module)
        known = tools.get(tools.store, "__dict__")
        new = tools.storage[tools.contains(known, _STORAGE)].new()
        stored = tools.get(known.setdefault(_STORAGE, new), "__dict__")
        for slot_id in self.bypasses:
            stored.pop(f"grown_{slot_id}", 0.0)
        if self.has_branches:
            stored.update({_BRANCHES: {}})


class _EndHook(_Hook):
    """After the network: adds the branches whose slots this pass has used."""

    branches: list[str]
    location: TensorLocation
    spread: bool  # over several devices

    def forward(self, module: Any, args: Any, output: Any) -> Any:
        tools, changes = self.tools(module), self.stored(module).pop(_BRANCHES, {})
        total = self.location.get(output, tools)
        for slot_id in self.branches:
            if self.spread:
                total = total + changes.get(slot_id, total.new_zeros(())).to(total.device)
            else:
                total = total + changes.get(slot_id, 0.0)
        return self.location.replace(output, total, tools)


class _Tracer(fx.Tracer):
    """A sequence of torch's modules stays one: it is faster than a call for each of them."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        if type(module) is nn.Sequential:
            return all(self.is_leaf_module(part, name) for part in module)
        return super().is_leaf_module(module, name)


def _graph_module(hook: _Hook, class_name: str, **attributes: Any) -> fx.GraphModule:
    vars(hook).update(attributes)
    graph = _Tracer().trace(hook)
    graph._tracer_cls = None  # else the module would hold a class of Esper
    return fx.GraphModule(hook, graph, class_name)


class _Exporter:
    """Puts seeds on `host`, a copy of the host of `live`."""

    def __init__(self, host: nn.Module, live: GrownModule, example: Any) -> None:
        self.host, self.live, self.example = host, live, example
        self.spread = len(devices_of(host)) > 1
        taken = {name for module in host.modules() for name in [*vars(module), *module._modules]}
        names = ("grown", *(f"grown{i}" for i in range(2, len(taken) + 3)))
        self.name = next(n for n in names if n not in taken and f"{n}_tools" not in taken)
        self.tools_name = f"{self.name}_tools"
        self.tools = SimpleNamespace(
            **vars(TOOLS),
            store=nn.Module(),
            contains=operator.contains,
            # The storage is made once, because Dynamo cannot; afterwards `new` does nothing.
            storage=(SimpleNamespace(new=threading.local), SimpleNamespace(new=dict)),
        )
        # The holder returns its input, for hosts that call all their modules.
        self.holder = nn.Identity()

    def add(self, slots: list[SeedSlot]) -> None:
        for slot in slots:
            if slot.kind != "bypass":
                self._add_at_slot(slot)
        branches = [slot.site.slot_id for slot in slots if slot.kind == "branch"]
        bypasses = [slot for slot in slots if slot.kind == "bypass"]
        if branches or bypasses:
            setattr(self.host, self.tools_name, self.tools)
            begin = _graph_module(
                _BeginHook(self.tools_name),
                "GrownInput",
                bypasses=[slot.site.slot_id for slot in bypasses],
                has_branches=bool(branches),
            )
            self.host.register_forward_pre_hook(begin.forward)
        if branches:
            location, _ = self._locate(self.host, locate_in_output)
            end = _graph_module(
                _EndHook(self.tools_name),
                "GrownOutput",
                branches=branches,
                location=location,
                spread=self.spread,
            )
            self.host.register_forward_hook(end.forward)
        # Before all other hooks of the layer, the last one first: they end in the order of slots.
        for slot in reversed(bypasses):
            self._add_bypass(slot)
        self._register_holder()

    def _add_at_slot(self, slot: SeedSlot) -> None:
        module = original(self.host.get_submodule(slot.site.module))
        location, changed = self._locate(module, locate_in_slot)
        # A branch keeps what it read for its gradient. For feature maps, see `_safe_to_read` in
        # seed_slot: an export with a frozen host may be trained channels last.
        copied = (slot.kind == "branch" and changed) or slot.site.topology.startswith("cnn")
        hook = self._seed_hook(_SlotHook, slot, location=location, copied=copied)
        module.register_forward_hook(hook.forward)
        if slot.kind == "branch" or location.form in ("mapping", "dataclass"):
            setattr(module, self.tools_name, self.tools)

    def _add_bypass(self, slot: SeedSlot) -> None:
        assert slot.site.widening is not None
        first, second = (
            original(self.host.get_submodule(layer.module))
            for layer in (slot.site.widening.first, slot.site.widening.second)
        )
        for layer in (first, second):
            setattr(layer, self.tools_name, self.tools)
        first.register_forward_pre_hook(self._seed_hook(_BypassReadHook, slot).forward)
        adding = _graph_module(
            _BypassAddHook(self.tools_name),
            "GrownLayer",
            slot_id=slot.site.slot_id,
            spread=self.spread,
        )
        second.register_forward_hook(adding.forward, prepend=True)

    def _seed_hook(
        self, kind: type[_SeedHook], slot: SeedSlot, **attributes: Any
    ) -> fx.GraphModule:
        blueprint = self.live.catalogue[slot.blueprint].name
        hook = kind(self.tools_name, slot)
        try:
            graph_module = _graph_module(hook, f"Grown_{blueprint}", **attributes)
        except Exception as error:  # torch.fx lets whatever the module raised through
            raise ExportError(
                f"a seed of blueprint {blueprint!r} cannot be exported: torch.fx could not trace "
                f"it ({error}); write its forward without branches on values"
            ) from error
        self.holder.add_module(slot.site.slot_id, graph_module)
        return graph_module

    def _locate(
        self, module: nn.Module, locate: Callable[[Any], TensorLocation | None]
    ) -> tuple[TensorLocation, bool]:
        """Where a module's output has its tensor, with the seeds that were added so far, and
        whether the host may change that tensor in place."""
        found: list[tuple[TensorLocation, Tensor, int]] = []

        def look(module: nn.Module, args: Any, output: Any) -> None:
            location = locate(output)
            if location is not None:
                tensor = location.get(output)
                found.append((location, tensor, -1 if tensor.is_inference() else tensor._version))

        handle = module.register_forward_hook(look)
        try:
            with evaluating(self.host), without_graphs():
                call_model(self.host, self.example)
        finally:
            handle.remove()
        if not found:
            raise ExportError(
                "the model does not run every slot on the example; export with another example"
            )
        location, tensor, version = found[0]
        changed = version < 0 or tensor._version != version
        # Dropout does nothing in evaluation.
        return location, changed or any(
            isinstance(m, nn.modules.dropout._DropoutNd) and m.inplace for m in self.host.modules()
        )

    def _register_holder(self) -> None:
        """Make the hooks submodules of the model, so that their parameters are its own."""
        self.host.add_module(self.name, self.holder)
        if isinstance(self.host, fx.GraphModule):
            # A copy of a GraphModule has only the modules that its code uses.
            graph = self.host.graph
            first = next(node for node in graph.nodes if node.op == "placeholder")
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                held = graph.call_module(self.name, (first,))
            first.replace_all_uses_with(held, delete_user_cb=lambda user: user is not held)
            self.host.recompile()
