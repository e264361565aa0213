"""From a grown network back to a plain nn.Module that runs where Esper is not installed.

The host's own modules stay as they are. Each seed becomes a torch.fx GraphModule, which carries its
code with it, and acts as a forward hook on the module of its slot. A branch keeps its result for
the end of the pass, where a hook on the whole network adds it to the output; a bypass from before
one layer to behind another. What is kept belongs to the thread, not to the module: the module is a
function of its input, in any number of threads.
"""

import copy
import dataclasses
import logging
import operator
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from esper.growth.grown_module import GrownModule
from esper.growth.hooks import copy_without_esper
from esper.growth.outputs import Place, host_place, slot_place
from esper.growth.seed_slot import SeedSlot
from esper.growth.sites import call_model, evaluating, tensors_in
from esper.leyline import IS_BLENDED, ExportError

log = logging.getLogger("esper")

TOLERANCE = 1e-5


def export(network: GrownModule, example: Any) -> nn.Module:
    """A plain copy of `network` with the seeds that act on its output, at their present alpha.

    Nothing of Esper is in it; hooks that the user put on the model stay. Raises ExportError if a
    seed cannot be turned into plain torch code, or if the copy's output on `example` differs from
    the live network's by more than TOLERANCE.
    """
    acting = [copy.deepcopy(slot) for _, slot in network.each_slot() if IS_BLENDED[slot.stage]]
    plain = copy_without_esper(network.host)
    if acting:
        _Graft(plain, network, example).add(acting)
    difference = largest_difference(network, plain, example)
    if not difference <= TOLERANCE:
        raise ExportError(
            f"the exported module differs from the live one by {difference:.2g} on the example; "
            "does the model draw random numbers in evaluation mode?"
        )
    log.info("the exported module equals the live one (largest difference %.2g)", difference)
    return plain


def largest_difference(one: nn.Module, other: nn.Module, example: Any) -> float:
    """Largest absolute difference of all outputs, both in evaluation mode; NaN if one has NaN."""
    with evaluating(one), evaluating(other):
        pairs = zip(
            tensors_in(call_model(one, example)),
            tensors_in(call_model(other, example)),
            strict=True,
        )
        gaps = [(a.double() - b.double()).abs().max() for a, b in pairs]
    return float(torch.stack(gaps).max())


# --- seeds as plain torch code ---------------------------------------------------------------


class _Graft:
    """Puts seeds on `host`, a copy of the host of `live`.

    When a GraphModule is loaded, torch.fx runs its code once with stand-ins for the arguments, and
    keeps as code only what was done to those. So everything that must happen at each call is
    reached through the module that a hook is given: `tools` are attributes of that module.
    """

    def __init__(self, host: nn.Module, live: GrownModule, example: Any) -> None:
        self.host, self.live, self.example = host, live, example
        taken = {name for module in host.modules() for name in [*vars(module), *module._modules]}
        names = ("grown", *(f"grown{i}" for i in range(2, len(taken) + 3)))
        self.name = next(n for n in names if n not in taken and f"{n}_tools" not in taken)
        self.tools = SimpleNamespace(
            thread=threading.current_thread,
            id=id,
            name="grown_{}{}".format,
            get=getattr,
            set=setattr,
            delete=delattr,
            copy=copy.copy,
            replace=dataclasses.replace,
        )

    def add(self, slots: list[SeedSlot]) -> None:
        # The holder passes on what it gets, for hosts that call whatever modules they have.
        holder = nn.Identity()
        for slot in slots:
            if slot.kind == "bypass":
                continue
            module = self.host.get_submodule(slot.site.module)
            place = self._place(module, slot_place)
            hook = self._slot_hook(slot, place)
            holder.add_module(slot.site.slot_id, hook)
            module.register_forward_hook(hook)
            if slot.kind == "branch" or place.form in ("mapping", "dataclass"):
                setattr(module, f"{self.name}_tools", self.tools)
        branches = [slot.site.slot_id for slot in slots if slot.kind == "branch"]
        bypasses = [slot for slot in slots if slot.kind == "bypass"]
        if branches or bypasses:
            setattr(self.host, f"{self.name}_tools", self.tools)
            begin = self._begin_hook([slot.site.slot_id for slot in bypasses], bool(branches))
            self.host.register_forward_pre_hook(begin)
        if branches:
            place = self._place(self.host, host_place)
            self.host.register_forward_hook(self._end_hook(branches, place))
        # Before all other hooks of the layer, the last one first: they end in the order of slots.
        for slot in reversed(bypasses):
            self._add_bypass(slot, holder)
        self._hold(holder)

    def _add_bypass(self, slot: SeedSlot, holder: nn.Module) -> None:
        assert slot.site.widening is not None
        first, second = (
            self.host.get_submodule(layer.module)
            for layer in (slot.site.widening.first, slot.site.widening.second)
        )
        for layer in (first, second):
            setattr(layer, f"{self.name}_tools", self.tools)
        reading = self._reading_hook(slot)
        holder.add_module(slot.site.slot_id, reading)
        first.register_forward_pre_hook(reading)
        second.register_forward_hook(self._adding_hook(slot.site.slot_id), prepend=True)

    def _place(self, module: nn.Module, place_of: Callable[[Any], Place | None]) -> Place:
        """Where a module's output has its tensor, with the seeds that are there already."""
        seen: list[Place | None] = []
        handle = module.register_forward_hook(lambda *args: seen.append(place_of(args[2])))
        try:
            with evaluating(self.host):
                call_model(self.host, self.example)
        finally:
            handle.remove()
        if not seen or seen[0] is None:
            raise ExportError(
                "the example does not come by every slot any more; export with one that does"
            )
        return seen[0]

    def _hold(self, holder: nn.Module) -> None:
        """Make the hooks part of the model, so that their parameters are its own."""
        self.host.add_module(self.name, holder)
        if isinstance(self.host, fx.GraphModule):
            # A copy of a GraphModule has only the modules that its code mentions.
            graph = self.host.graph
            first = next(node for node in graph.nodes if node.op == "placeholder")
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                held = graph.call_module(self.name, (first,))
            first.replace_all_uses_with(held, delete_user_cb=lambda user: user is not held)
            self.host.recompile()

    def _tool(self, graph: fx.Graph, module: fx.Node) -> fx.Node:
        return graph.call_function(getattr, (module, f"{self.name}_tools"))

    def _slot_hook(self, slot: SeedSlot, place: Place) -> fx.GraphModule:
        graph = fx.Graph()
        module, _, output = (graph.placeholder(name) for name in ("module", "args", "output"))
        h = target = self._take(graph, module, output, place)
        if slot.site.reading:
            h = graph.call_method("permute", (h, *slot.site.reading))
        # A copy for a branch, because the host may change its features in place further on; and
        # for maps, because GroupNorm kills the process (see seed_slot) when an export with a frozen
        # host is trained channels last.
        if slot.kind == "branch" or slot.site.topology.startswith("cnn"):
            h = graph.call_method("clone", (h,), {"memory_format": torch.contiguous_format})
        parts, delta = self._change(graph, slot, h)
        if slot.kind == "branch":
            self._keep(graph, module, slot.site.slot_id, delta)
            graph.output(output)
        else:
            if slot.site.writing:
                delta = graph.call_method("permute", (delta, *slot.site.writing))
            blended = graph.call_function(operator.add, (target, delta))
            graph.output(self._put(graph, module, output, place, blended))
        return fx.GraphModule(parts, graph, class_name=self._class_name(slot))

    def _class_name(self, slot: SeedSlot) -> str:
        return f"Grown_{self.live.catalogue[slot.blueprint].name}"

    def _change(
        self, graph: fx.Graph, slot: SeedSlot, h: fx.Node
    ) -> tuple[dict[str, Any], fx.Node]:
        """The modules that what a seed adds is made of, and what it is."""
        assert slot.seed is not None
        blueprint = self.live.catalogue[slot.blueprint].name
        parts: dict[str, Any] = {"seed": _trace(slot.seed, blueprint)}
        delta = graph.call_module("seed", (h,))
        if slot.valve is not None:
            parts["valve"] = _trace(slot.valve, blueprint)
            delta = graph.call_function(operator.mul, (graph.call_module("valve", (h,)), delta))
        elif slot.alpha != 1.0:
            delta = graph.call_function(operator.mul, (slot.alpha, delta))
        return parts, delta

    # A bypass, in Python; outside a pass too, where checkpoints come by again, backwards:
    #   begin   forget thread.name_r0c0        a pass that never comes by adds nothing
    #   before the first layer     thread.name_r0c0 = delta
    #   behind the second layer    output + getattr(thread, "name_r0c0", 0.0); forget it

    def _reading_hook(self, slot: SeedSlot) -> fx.GraphModule:
        graph = fx.Graph()
        module, args = (graph.placeholder(name) for name in ("module", "args"))
        h = graph.call_function(operator.getitem, (args, 0))
        # A copy, because the host may change what it read in place further on.
        h = graph.call_method("clone", (h,), {"memory_format": torch.contiguous_format})
        parts, delta = self._change(graph, slot, h)
        graph.call_method("set", (*self._kept(graph, module, slot.site.slot_id), delta))
        graph.output(None)
        return fx.GraphModule(parts, graph, class_name=self._class_name(slot))

    def _adding_hook(self, slot_id: str) -> fx.GraphModule:
        graph = fx.Graph()
        module, _, output = (graph.placeholder(name) for name in ("module", "args", "output"))
        kept = self._kept(graph, module, slot_id)
        delta = graph.call_method("get", (*kept, 0.0))
        self._forget(graph, kept)
        graph.output(graph.call_function(operator.add, (output, delta)))
        return fx.GraphModule({}, graph, class_name="GrownLayer")

    def _forget(self, graph: fx.Graph, kept: tuple[fx.Node, fx.Node, fx.Node]) -> None:
        # Set first: there may be nothing to delete.
        graph.call_method("set", (*kept, 0.0))
        graph.call_method("delete", kept)

    # What follows in Python, for a branch:
    #   name    "grown_" + id(tools)
    #   begin   thread.name = {}
    #   slot    thread.name["r0c0"] = delta        outside a pass there is none: nothing is kept
    #   end     output + thread.name.get("r0c0", 0.0)    a pass that never came by adds nothing

    def _begin_hook(self, bypasses: list[str], branches: bool) -> fx.GraphModule:
        graph = fx.Graph()
        module, _ = (graph.placeholder(name) for name in ("module", "args"))
        for slot_id in bypasses:
            self._forget(graph, self._kept(graph, module, slot_id))
        if branches:
            graph.call_method("set", (*self._kept(graph, module), {}))
        graph.output(None)
        return fx.GraphModule({}, graph, class_name="GrownInput")

    def _keep(self, graph: fx.Graph, module: fx.Node, slot_id: str, delta: fx.Node) -> None:
        mine = graph.call_method("get", (*self._kept(graph, module), {}))
        graph.call_method("__setitem__", (mine, slot_id, delta))

    def _end_hook(self, branches: list[str], place: Place) -> fx.GraphModule:
        graph = fx.Graph()
        module, _, output = (graph.placeholder(name) for name in ("module", "args", "output"))
        kept = self._kept(graph, module)
        mine = graph.call_method("get", kept)
        graph.call_method("delete", kept)
        total = self._take(graph, module, output, place)
        for slot_id in branches:
            delta = graph.call_method("get", (mine, slot_id, 0.0))
            total = graph.call_function(operator.add, (total, delta))
        graph.output(self._put(graph, module, output, place, total))
        return fx.GraphModule({}, graph, class_name="GrownOutput")

    def _kept(
        self, graph: fx.Graph, module: fx.Node, slot_id: str = ""
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Tools, this thread, and the name of its attribute with what branches (or the bypass of
        that slot) keep."""
        tools = self._tool(graph, module)
        thread = graph.call_method("thread", (tools,))
        own = graph.call_method("id", (tools, tools))
        return tools, thread, graph.call_method("name", (tools, own, slot_id))

    # `take` and `put` of esper.growth.outputs, as code.

    def _take(self, graph: fx.Graph, module: fx.Node, output: fx.Node, place: Place) -> fx.Node:
        match place.form:
            case "tensor":
                return output
            case "dataclass":
                return graph.call_method("get", (self._tool(graph, module), output, place.key))
            case "namedtuple":
                return graph.call_function(getattr, (output, place.key))
        return graph.call_function(operator.getitem, (output, place.key))

    def _put(
        self, graph: fx.Graph, module: fx.Node, output: fx.Node, place: Place, tensor: fx.Node
    ) -> fx.Node:
        match place.form:
            case "tensor":
                return tensor
            case "namedtuple":
                return graph.call_method("_replace", (output,), {place.key: tensor})
            case "dataclass":
                tools = self._tool(graph, module)
                return graph.call_method("replace", (tools, output), {place.key: tensor})
            case "mapping":
                changed = graph.call_method("copy", (self._tool(graph, module), output))
                graph.call_method("__setitem__", (changed, place.key, tensor))
                return changed
        before, after = (
            graph.call_function(operator.getitem, (output, part))
            for part in (slice(None, place.key), slice(place.key + 1, None))
        )
        middle = (tensor,) if place.form == "tuple" else [tensor]
        joined = graph.call_function(operator.add, (before, middle))
        return graph.call_function(operator.add, (joined, after))


def _trace(module: nn.Module, name: str) -> fx.GraphModule:
    try:
        return fx.symbolic_trace(module)
    except Exception as error:  # torch.fx lets whatever the module raised through
        raise ExportError(
            f"a seed of blueprint {name!r} cannot be exported: torch.fx could not trace it "
            f"({error}); write its forward without branches on values"
        ) from error
