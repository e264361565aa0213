"""Plan how the stacks of a model grow.

A new block must not change the output at birth. What silences a block is found by trying: its
parameters are set to 0, and all that the block needs not to be the identity are left at 0, the last
ones in the order of computation.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from esper.growth.blueprints.catalogue import BlueprintCatalogue, BlueprintSpec
from esper.growth.devices import keyed
from esper.growth.hooks import copy_without_esper, hook_with_state, without_graphs
from esper.growth.outputs import locate_in_slot, main_argument
from esper.growth.sites import MISFITS, explaining
from esper.growth.stack_search import BlockCall, Stack, find_stacks
from esper.growth.stacks import fits, is_numbered
from esper.leyline import ConfigError, InjectionSpec, format_slot_id
from esper.leyline.depth import (
    AUTO,
    BlockGroup,
    Depth,
    DepthPlan,
    StackPlan,
    depths,
    doubled,
    doublings,
    next_places,
)

STACK = "stack"  # the topology of slots for blocks
BLOCKS = BlueprintCatalogue(
    (BlueprintSpec("blocks", "block", {}, "more blocks of the model's own"),)
)
# Attributes with the index of a block, if one block alone cannot show which they are.
_INDEX_NAMES = ("layer_idx", "layer_id", "layer_index", "block_idx")


# --- silence ---------------------------------------------------------------------------------


@torch.no_grad()
def silent_parameters(block: nn.Module, call: BlockCall, adding: bool) -> tuple[str, ...] | None:
    """The names of parameters that, if they are 0, make the block change nothing, whatever the
    others are; None if there are no such parameters."""
    trial = copy_without_esper(block).eval()
    params = dict(trial.named_parameters())
    with keyed(0):
        values = {name: torch.randn_like(p.float()).to(p.dtype) * 0.1 for name, p in params.items()}
    order = _order(trial, call)
    for param in params.values():
        param.zero_()
    if not _changes_nothing(trial, call, adding):
        return None
    silent = []
    for name in sorted(params, key=lambda name: order[name.rpartition(".")[0]]):
        params[name].copy_(values[name])
        if not _changes_nothing(trial, call, adding):
            params[name].zero_()
            silent.append(name)
    return tuple(silent)


def _order(block: nn.Module, call: BlockCall) -> dict[str, int]:
    """When each submodule is called first; one that is not called counts as the module around."""
    began: dict[str, int] = {}

    def note(name: str, module: nn.Module, args: Any) -> None:
        began.setdefault(name, len(began))

    handles = [
        module.register_forward_pre_hook(partial(note, name))
        for name, module in block.named_modules()
    ]
    try:
        _run(block, call)
    finally:
        for handle in handles:
            handle.remove()
    order: dict[str, int] = {}
    for name, _ in block.named_modules():
        order[name] = began.get(name, order.get(name.rpartition(".")[0], 0))
    return order


def _run(block: nn.Module, call: BlockCall) -> Any:
    args, kwargs = copy.deepcopy((call.args, call.kwargs))
    return block(*args, **kwargs)


def _changes_nothing(block: nn.Module, call: BlockCall, adding: bool) -> bool:
    try:
        output = _run(block, call)
    except MISFITS:
        return False  # it cannot compute with zeros
    location = locate_in_slot(output)
    if location is None:
        return False
    result = location.get(output)
    read = main_argument((*call.args, *call.kwargs.values()), result)
    wanted = torch.zeros_like(result) if adding else read
    return wanted is not None and torch.equal(result, wanted)


# --- plans -----------------------------------------------------------------------------------


def plan_depth(
    model: nn.Module, depth: Depth, example: Any
) -> tuple[DepthPlan, list[InjectionSpec]]:
    """How the model grows, and a slot for each growth event. Raises ConfigError, with the reason,
    if it cannot."""
    stacks = find_stacks(model, example, depth.paths)
    if not depth.paths and len(stacks) != 1:
        found = ", ".join(stack.path for stack in stacks) or "none"
        raise ConfigError(
            f"depth={AUTO!r} needs a model with exactly one stack of blocks, and "
            f"{type(model).__name__} has {len(stacks)} ({found}); name them: esper.Depth(path, ...)"
        )
    for stack in stacks:
        if stack.reason:
            raise ConfigError(f"{stack.path!r} cannot grow in depth: {stack.reason}")
        _check_copies(model, stack, depth)
    bounds = [_bounds(stack, depth) for stack in stacks]
    if depth.shares is None:
        events = max(doublings(*each) for each in bounds)
        steps = [doubled(*each, events) for each in bounds]
    else:
        events = len(depth.shares)
        steps = [depths(*each, events) for each in bounds]
    with explaining("a block of the model fails alone"), without_graphs():
        plans = [_plan(stack, own, depth) for stack, own in zip(stacks, steps, strict=True)]
    loud = any(plan.silent[place] is None for plan in plans for g in plan.groups for place in g)
    if depth.freeze_host and loud:
        raise ConfigError(
            f"no zeros among the parameters make a block of {stacks[0].path!r} change nothing, so "
            "new ones have to be blended in, and are removed if they harm; then nothing would be "
            "left to train in a frozen host: leave out freeze_host"
        )
    sites = [_site(event, events, _group(event, stacks, plans, steps)) for event in range(events)]
    return DepthPlan(tuple(plans), depth.add is not None, depth.birth, depth.freeze_host), sites


def _check_copies(model: nn.Module, stack: Stack, depth: Depth) -> None:
    """Raises ConfigError if new blocks cannot be made from those of a stack."""
    container = model.get_submodule(stack.path)
    if depth.add is not None and not is_numbered(container):
        raise ConfigError(
            f"{stack.path!r} names its blocks ({', '.join(container._modules)}), so new ones have "
            "no names; use an nn.ModuleList, or an nn.Sequential without names"
        )
    for name, module in container.named_modules():
        hook = hook_with_state(module)
        if hook is not None:
            raise ConfigError(
                f"'{stack.path}.{name}' has a hook of {hook}, and new blocks would have copies of "
                "that object; remove the hook, or make it a plain function"
            )


def _bounds(stack: Stack, depth: Depth) -> tuple[int, int]:
    """The numbers of blocks before the first and after the last growth event."""
    have = len(stack.blocks)
    if depth.add is not None:
        return have, have + depth.add
    start, least = depth.start or 1, len(_needed(stack))
    if least == have:
        raise ConfigError(
            f"{stack.path!r} cannot start with fewer blocks: none of its {have} can be left out; "
            "give add=... to deepen the model"
        )
    if not least <= start < have:
        raise ConfigError(
            f"start={start} of Depth does not fit {stack.path!r} with {have} blocks, of which "
            f"{least} cannot be left out: start must be from {least} to {have - 1}"
        )
    return start, have


def _needed(stack: Stack) -> list[int]:
    """Blocks that the smallest network has: the first one, and those that change the shape."""
    return [i for i, call in enumerate(stack.calls) if i == 0 or not call.keeps_shape]


def _plan(stack: Stack, steps: list[int], depth: Depth) -> StackPlan:
    have, size = len(stack.blocks), steps[-1]
    given = {i: i for i in range(have)}  # blocks of the model by place
    if depth.add is not None and depth.places == "spread":
        given = {i * size // have: i for i in range(have)}
    first = tuple(given)
    if depth.add is None:
        needed = _needed(stack)
        more = next_places(needed, size, steps[0] - len(needed), depth.places)
        first = tuple(sorted((*needed, *more)))
    groups, present = list[tuple[int, ...]](), first
    for before, after in pairwise(steps):
        groups.append(next_places(present, size, after - before, depth.places))
        present = (*present, *groups[-1])
    birth = _Birth(stack, given, first, added=depth.add is not None)
    places = [birth.of(place) for place in range(size)]
    sources, likes, silent = map(tuple, zip(*places, strict=True))
    return StackPlan(
        path=stack.path,
        size=size,
        first=first,
        groups=tuple(groups),
        like=likes,
        source=sources,
        silent=silent,
        adding=stack.adding,
        numbers=_numbers(stack.blocks),
    )


@dataclass
class _Birth:
    """Where new blocks come from. `given` has the index of each block of the model by its place,
    `first` are the places of blocks that are there from the start, `found` what silences blocks of
    a kind."""

    stack: Stack
    given: dict[int, int]
    first: tuple[int, ...]
    added: bool
    found: dict[Any, tuple[str, ...] | None] = field(default_factory=dict)

    def of(self, place: int) -> tuple[int, int, tuple[str, ...] | None]:
        """`source`, `like` and `silent` of a plan. Raises ConfigError if no block can come."""
        if place in self.first:
            return place, self.given[place], None
        own = None if self.added else self.given[place]
        before = [each for each in sorted(self.first, reverse=True) if each < place]
        behind = [each for each in sorted(self.first) if each > place]
        serving = (p for p in (*before, *behind) if _serves(self.stack, self.given[p], own))
        source = next(serving, -1)
        if own is None and source < 0:
            raise ConfigError(
                f"no block of {self.stack.path!r} can be copied: all of them change the shape"
            )
        like = self.given[source] if own is None else own
        block, kind = self.stack.blocks[like], _kind(self.stack.blocks[like])
        if kind not in self.found:
            call, adding = self.stack.calls[like], self.stack.adding
            self.found[kind] = silent_parameters(block, call, adding)
        return source, like, self.found[kind]


def _serves(stack: Stack, index: int, own: int | None) -> bool:
    """Whether a copy of the block `index` can be a new block, with the parameters of `own`."""
    if not stack.calls[index].keeps_shape:
        return False
    return own is None or fits(stack.blocks[index].state_dict(), stack.blocks[own].state_dict())


def _kind(block: nn.Module) -> tuple[Any, ...]:
    return type(block), tuple((name, p.shape) for name, p in block.named_parameters())


def _numbers(blocks: Sequence[nn.Module]) -> tuple[tuple[str, str], ...]:
    """Attributes that hold the index of every block."""
    found = []
    for name, module in blocks[0].named_modules():
        for attribute, value in vars(module).items():
            known = len(blocks) > 1 or attribute in _INDEX_NAMES
            if type(value) is int and value == 0 and known:
                values = [_attribute(block, name, attribute) for block in blocks]
                if values == list(range(len(blocks))):
                    found.append((name, attribute))
    return tuple(found)


def _attribute(block: nn.Module, name: str, attribute: str) -> Any:
    module = dict(block.named_modules()).get(name)
    value = vars(module).get(attribute) if module is not None else None
    return value if type(value) is int else None


def _group(
    event: int, stacks: Sequence[Stack], plans: Sequence[StackPlan], steps: Sequence[list[int]]
) -> BlockGroup:
    blocks = [
        (stack.blocks[plan.like[place]], stack.macs[plan.like[place]], plan.silent[place])
        for stack, plan in zip(stacks, plans, strict=True)
        for place in plan.groups[event]
    ]
    changes = (
        (plan.path, own[event], own[event + 1]) for plan, own in zip(plans, steps, strict=True)
    )
    return BlockGroup(
        tuple(each for each in changes if each[1] != each[2]),
        all(silent is not None for _, _, silent in blocks),
        sum(p.numel() for block, _, _ in blocks for p in block.parameters()),
        sum(macs for _, macs, _ in blocks),
    )


def _site(event: int, events: int, group: BlockGroup) -> InjectionSpec:
    return InjectionSpec(
        slot_id=format_slot_id(0, event),
        channels=1,
        position=(event + 1) / events,
        module=group.depths[0][0],
        topology=STACK,
        shape=(),
        blocks=group,
    )
