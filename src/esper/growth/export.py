"""From a grown network back to a plain nn.Module that runs where Esper is not installed.

The host's own modules stay as they are. Each seed becomes a torch.fx GraphModule, which carries its
code with it, and acts as a forward hook on the module of its slot. A branch leaves its result on
that module, and a hook on the whole network adds it to the output.
"""

import copy
import logging
import operator
from typing import Any

import torch
from torch import fx, nn

from esper.growth.grown_module import GrownModule
from esper.growth.seed_slot import SeedSlot
from esper.growth.sites import call_model, evaluating, tensors_in
from esper.leyline import IS_BLENDED, ExportError

log = logging.getLogger("esper")

TOLERANCE = 1e-5
_BRANCH_RESULT = "grown_branch_result"


def export(network: GrownModule, example: Any) -> nn.Module:
    """A plain copy of `network` with the seeds that act on its output, at their present alpha.

    Raises ExportError if a seed cannot be turned into plain torch code, or if the copy's output on
    `example` differs from the live network's by more than TOLERANCE.
    """
    acting = [copy.deepcopy(slot) for _, slot in network.each_slot() if IS_BLENDED[slot.stage]]
    plain = _graft(copy.deepcopy(network).release(), acting, example, network)
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


def _graft(host: nn.Module, slots: list[SeedSlot], example: Any, live: GrownModule) -> nn.Module:
    if not slots:
        return host
    hooks = nn.ModuleDict()
    for slot in slots:
        name = live.catalogue[slot.blueprint].name
        module = host.get_submodule(slot.site.module)
        hook = _slot_hook(slot, name, in_tuple=_returns_tuple(host, module, example))
        hooks[slot.site.slot_id] = hook
        module.register_forward_hook(hook)
        if slot.is_branch:
            setattr(module, _BRANCH_RESULT, [])
    branches = [slot.site.module for slot in slots if slot.is_branch]
    if branches:
        hooks["output"] = _output_hook(branches)
        host.register_forward_hook(hooks["output"])
    return _hold(host, hooks)


def _returns_tuple(host: nn.Module, module: nn.Module, example: Any) -> bool:
    seen: list[bool] = []
    handle = module.register_forward_hook(lambda *args: seen.append(isinstance(args[2], tuple)))
    try:
        with evaluating(host):
            call_model(host, example)
    finally:
        handle.remove()
    return seen[0]


def _trace(module: nn.Module, name: str) -> fx.GraphModule:
    try:
        return fx.symbolic_trace(module)
    except Exception as error:  # torch.fx lets whatever the module raised through
        raise ExportError(
            f"a seed of blueprint {name!r} cannot be exported: torch.fx could not trace it "
            f"({error}); write its forward without branches on values"
        ) from error


def _hook_inputs(graph: fx.Graph) -> tuple[fx.Node, fx.Node]:
    """The arguments of a forward hook; gives (module, output)."""
    module, _, output = (graph.placeholder(name) for name in ("module", "args", "output"))
    return module, output


def _slot_hook(slot: SeedSlot, blueprint: str, *, in_tuple: bool) -> fx.GraphModule:
    assert slot.seed is not None
    parts: dict[str, Any] = {"seed": _trace(slot.seed, blueprint)}
    graph = fx.Graph()
    module, output = _hook_inputs(graph)
    h = graph.call_function(operator.getitem, (output, 0)) if in_tuple else output
    delta = graph.call_module("seed", (h,))
    if slot.valve is not None:
        parts["valve"] = _trace(slot.valve, blueprint)
        delta = graph.call_function(operator.mul, (graph.call_module("valve", (h,)), delta))
    elif slot.alpha != 1.0:
        delta = graph.call_function(operator.mul, (slot.alpha, delta))
    if slot.is_branch:
        # A list on the slot's module: reached through an argument, so that the code stays visible
        # to torch.fx when the module is saved and loaded.
        result = graph.call_function(getattr, (module, _BRANCH_RESULT))
        graph.call_method("clear", (result,))
        graph.call_method("append", (result, delta))
        graph.output(output)
    else:
        blended = graph.call_function(operator.add, (h, delta))
        if in_tuple:
            rest = graph.call_function(operator.getitem, (output, slice(1, None)))
            blended = graph.call_function(operator.add, ((blended,), rest))
        graph.output(blended)
    return fx.GraphModule(parts, graph, class_name=f"Grown_{blueprint}")


def _output_hook(branch_modules: list[str]) -> fx.GraphModule:
    graph = fx.Graph()
    module, total = _hook_inputs(graph)
    for name in branch_modules:
        slot_module = graph.call_method("get_submodule", (module, name))
        result = graph.call_function(getattr, (slot_module, _BRANCH_RESULT))
        delta = graph.call_method("pop", (result,))
        total = graph.call_function(operator.add, (total, delta))
    graph.output(total)
    return fx.GraphModule({}, graph, class_name="GrownOutput")


def _hold(host: nn.Module, hooks: nn.ModuleDict) -> nn.Module:
    """Make the hooks part of the model, so that their parameters are its own."""
    if not isinstance(host, nn.Sequential):
        name = "grown" if not hasattr(host, "grown") else "grown_seeds"
        host.add_module(name, hooks)
        return host
    # A Sequential would run whatever is added to it: put one call around it instead.
    graph = fx.Graph()
    graph.output(graph.call_module("host", (graph.placeholder("input"),)))
    outer = fx.GraphModule({"host": host}, graph, class_name="GrownSequential")
    outer.add_module("grown", hooks)
    return outer
