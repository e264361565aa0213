"""The lists of blocks of a live model that grows in depth.

New blocks are put into the user's own lists, so the grown network is an ordinary model of the
user's class. Indices that blocks hold, and numbers of layers in the model and its configs, follow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from esper.growth.devices import keyed
from esper.growth.hooks import copy_without_esper
from esper.leyline import ConfigError
from esper.leyline.depth import DepthPlan, StackPlan

# What models and their configs call the number of blocks.
_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "num_blocks")
_SIDES = ("encoder", "decoder")
_NORMS = nn.modules.batchnorm._BatchNorm


class _LiveStack:
    """One list of blocks: `first` and, as far as they are not in it yet, `spare` ones by place."""

    def __init__(self, plan: StackPlan, host: nn.Module, *, added: bool) -> None:
        self.plan = plan
        self.container: Any = host.get_submodule(plan.path)
        given = list(self.container.children())
        places = plan.first if added else range(plan.size)
        if len(given) != len(places):
            raise ConfigError(
                f"{plan.path!r} has {len(given)} blocks, not {len(places)}; build the model as it "
                "was before it grew"
            )
        blocks = dict(zip(places, given, strict=True))
        self.first = {place: blocks[place] for place in plan.first}
        self.spare = {p: block for p, block in blocks.items() if p not in self.first}
        self.names = list(self.container._modules)
        self.numbered = is_numbered(self.container)
        self.counts = list(_counts(host, plan.path, len(given)))
        self.listed = list(_listed_counts(host, plan.path, len(given)))
        self.lists = list(_layer_lists(host, plan.path, len(given)))

    def arrange(self, blocks: dict[int, nn.Module]) -> None:
        """Put these blocks, by place, into the list."""
        places = sorted(blocks)
        self.container._modules.clear()
        for index, place in enumerate(places):
            name = str(index) if self.numbered else self.names[place]
            self.container._modules[name] = blocks[place]
            for name, attribute in self.plan.numbers:
                setattr(blocks[place].get_submodule(name), attribute, index)
        for owner, name in self.counts:
            setattr(owner, name, len(places))
        for owner, name, index in self.listed:
            known = getattr(owner, name)
            setattr(owner, name, [*known[:index], len(places), *known[index + 1 :]])
        for owner, name, entries in self.lists:
            setattr(owner, name, type(entries)(entries[self.plan.like[p]] for p in places))

    def new_block(
        self, place: int, present: dict[int, nn.Module], plan: DepthPlan, host: nn.Module
    ) -> nn.Module:
        """The block of a place; `present` are the blocks in the list."""
        plain, model = self.plan, self.spare.get(place)
        if model is None:
            model = self.first[plain.source[place]]
        block = copy_without_esper(model)
        wanted = block.state_dict()
        before = (present[p].state_dict() for p in sorted(present, reverse=True) if p < place)
        values = next((each for each in before if fits(each, wanted)), None)
        if plan.birth == "copy" and values is not None:
            block.load_state_dict(values, strict=False)
        elif plan.birth == "fresh" and place not in self.spare:
            _initialize(block, host)
        like = next(self.first[plain.first[0]].parameters())
        block.to(like.device)
        params = dict(block.named_parameters())
        with torch.no_grad():
            for name in plain.silent[place] or ():
                params[name].zero_()
        return block.train(self.container.training)


class Stacks:
    """The stacks of one host. Making it leaves only the first blocks in their lists; `grow` and
    `shrink` add and remove the blocks of a growth event."""

    def __init__(self, plan: DepthPlan, host: nn.Module) -> None:
        self.plan, self.host = plan, host
        self.stacks = [_LiveStack(each, host, added=plan.added) for each in plan.stacks]
        self.grown: dict[int, list[dict[int, nn.Module]]] = {}  # by event, then stack, then place
        self.frozen: list[nn.Parameter] = []
        self._thaw: Callable[[], None] = lambda: None
        self._arrange()
        if plan.freeze_host:
            self._freeze()

    def _freeze(self) -> None:
        self.frozen = [p for p in self.host.parameters() if p.requires_grad]
        for param in self.frozen:
            param.requires_grad_(False)
            param.grad = None  # else an optimizer would still apply it
        self._thaw = self.host.register_forward_pre_hook(self._keep_statistics).remove

    def _keep_statistics(self, module: nn.Module, args: Any) -> None:
        """A frozen host keeps its running statistics."""
        grown = (block for event in self.grown for block, _ in self.blocks_of(event))
        ours = {each for block in grown for each in block.modules()}
        for each in module.modules():
            if isinstance(each, _NORMS) and each not in ours:
                each.eval()

    def _present(self, without: Sequence[int] = ()) -> Iterator[dict[int, nn.Module]]:
        """The blocks of each stack by place, without those of some events."""
        for number, stack in enumerate(self.stacks):
            grown = (own[number] for event, own in self.grown.items() if event not in without)
            yield {**stack.first, **{p: block for own in grown for p, block in own.items()}}

    def _arrange(self, without: Sequence[int] = ()) -> None:
        for stack, present in zip(self.stacks, self._present(without), strict=True):
            stack.arrange(present)

    def blocks_of(self, event: int) -> Iterator[tuple[nn.Module, bool]]:
        """The blocks of an event; True where the host adds the output of the block to its input."""
        for stack, own in zip(self.stacks, self.grown.get(event, ()), strict=False):
            yield from ((block, stack.plan.adding) for block in own.values())

    def grow(self, event: int, key: int) -> nn.ModuleList:
        """Put the blocks of an event into the lists, new weights drawn from `key`."""
        with keyed(key):
            own = [
                {
                    place: stack.new_block(place, present, self.plan, self.host)
                    for place in stack.plan.groups[event]
                }
                for stack, present in zip(self.stacks, self._present(), strict=True)
            ]
        self.grown[event] = own
        if self.frozen:
            learns = {id(param) for param in self.frozen}
            for param, like in zip(self._params(event), self.counterparts(event), strict=True):
                param.requires_grad_(id(like) in learns)
        self._arrange()
        return nn.ModuleList(block for places in own for block in places.values())

    def shrink(self, event: int) -> None:
        self.grown.pop(event, None)
        self._arrange()

    @contextmanager
    def without(self, events: Sequence[int]) -> Iterator[None]:
        """Inside, the blocks of these events are out of the lists."""
        self._arrange(events)
        try:
            yield
        finally:
            self._arrange()

    def release(self) -> None:
        """Give the model back as it was given, with all its blocks."""
        for stack in self.stacks:
            stack.arrange({**stack.first, **stack.spare})
        for param in self.frozen:
            param.requires_grad_(True)
        self.frozen = []
        self._thaw()

    @contextmanager
    def as_given(self) -> Iterator[None]:
        """Inside, the model is as in `give_all`."""
        self.give_all()
        try:
            yield
        finally:
            self.put_back()

    def follow_mode(self) -> None:
        """Blocks are in the mode, train or eval, of their lists."""
        for stack in self.stacks:
            for block in stack.container.children():
                if block.training != stack.container.training:
                    block.train(stack.container.training)

    def put_back(self) -> None:
        """The end of `give_all`."""
        self._arrange()

    def give_all(self) -> None:
        """Until the next change, or `put_back`, the model has the blocks that it was given with;
        those of them that have grown are at their places."""
        for stack, present in zip(self.stacks, self._present(), strict=True):
            given = {**stack.first, **stack.spare}
            stack.arrange({place: present.get(place, block) for place, block in given.items()})

    def spare_parameters(self) -> list[nn.Parameter]:
        """Parameters of given blocks that are not in the lists."""
        return [p for s in self.stacks for block in s.spare.values() for p in block.parameters()]

    def spare_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of given blocks that new ones will begin with, by unique names."""
        found: dict[str, torch.Tensor] = {}
        for stack in self.stacks:
            for place, block in stack.spare.items():
                before = (each for p, each in stack.first.items() if p < place)
                copied = any(fits(each.state_dict(), block.state_dict()) for each in before)
                if self.plan.birth == "fresh" or not copied:
                    tensors = (*block.named_parameters(), *block.named_buffers())
                    found |= {f"{stack.plan.path}.later.{place}.{n}": t for n, t in tensors}
        return found

    def _params(self, event: int) -> Iterator[nn.Parameter]:
        for own in self.grown[event]:
            for block in own.values():
                yield from block.parameters()

    def counterparts(self, event: int) -> list[nn.Parameter | None]:
        """For each parameter of the blocks of an event, one of a first block with the same name."""
        found: list[nn.Parameter | None] = []
        for stack, own in zip(self.stacks, self.grown[event], strict=True):
            for place, block in own.items():
                near = sorted((abs(place - p), p) for p in stack.first)
                named = [dict(stack.first[p].named_parameters()) for _, p in near]
                for name, _ in block.named_parameters():
                    found.append(next((each[name] for each in named if name in each), None))
        return found


def fits(values: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether one state dict has all tensors of another one, in their shapes."""
    return all(
        name in values and getattr(values[name], "shape", None) == getattr(each, "shape", None)
        for name, each in wanted.items()
    )


def is_numbered(container: nn.Module) -> bool:
    """Whether the names in a list of blocks are their numbers, so that new ones can have some."""
    return list(container._modules) == [str(i) for i in range(len(container._modules))]


def _owners(host: nn.Module, path: str) -> Iterator[Any]:
    """The modules around a list of blocks, and their configs, each once."""
    seen: set[int] = set()
    parts = path.split(".")[:-1] if path else []
    for end in range(len(parts) + 1):
        module = host.get_submodule(".".join(parts[:end]))
        for owner in (module, getattr(module, "config", None)):
            if owner is not None and id(owner) not in seen:
                seen.add(id(owner))
                yield owner


def _counts(host: nn.Module, path: str, count: int) -> Iterator[tuple[Any, str]]:
    """(owner, attribute) of what holds the number of blocks of a list."""
    side = next((side for side in _SIDES if side in path), None)
    for owner in _owners(host, path):
        names = [f"{side}_layers", f"num_{side}_layers"] if side else []
        known = [name for name in (*names, *_COUNTS) if _own(owner, name) == count]
        if side and any(name in known for name in names):
            known = [name for name in known if name in names]
        yield from ((owner, name) for name in known)


def _listed_counts(host: nn.Module, path: str, count: int) -> Iterator[tuple[Any, str, int]]:
    """(config, attribute, index) of lists with the number of blocks of each stage."""
    stage = next((int(part) for part in reversed(path.split(".")) if part.isdecimal()), None)
    for owner in _owners(host, path):
        if stage is None or isinstance(owner, nn.Module):
            continue
        for name, value in vars(owner).items():
            stages = isinstance(value, list) and "depth" in name and stage < len(value)
            if stages and value[stage] == count:
                yield owner, name, stage


def _own(owner: Any, name: str) -> Any:
    value = vars(owner).get(name)
    return value if type(value) is int else None


def _layer_lists(host: nn.Module, path: str, count: int) -> Iterator[tuple[Any, str, Any]]:
    """(config, attribute, entries) of lists with an entry for each block."""
    for owner in _owners(host, path):
        if isinstance(owner, nn.Module):
            continue
        for name, value in vars(owner).items():
            if "layer" in name and isinstance(value, (list, tuple)) and len(value) == count:
                yield owner, name, value


def _initialize(block: nn.Module, host: nn.Module) -> None:
    """New weights, by the model's own `_init_weights` or `reset_parameters` of its layers."""
    own = getattr(host, "_init_weights", None)
    for name, module in block.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        reset = getattr(module, "reset_parameters", None)
        if own is not None:
            own(module)
        elif callable(reset):
            reset()
        else:
            raise ConfigError(
                f"birth='fresh': {name or type(block).__name__} ({type(module).__name__}) has no "
                "reset_parameters; give it one, or use birth='copy'"
            )
