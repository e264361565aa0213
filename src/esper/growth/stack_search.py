"""Find the stacks of a model: lists of blocks, each of which reads what the one before it
returned."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.blueprints.catalogue import count_params, flop_counter
from esper.growth.devices import input_device, on_device
from esper.growth.hooks import without_graphs
from esper.growth.outputs import locate_in_slot, main_argument
from esper.growth.sites import MISFITS, batch_size, call_model, evaluating, not_running
from esper.leyline import ConfigError


@dataclass
class BlockCall:
    """One call of a block: its arguments as they were before it, the tensor that it read among
    them, and what it returned."""

    given: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    @property
    def result(self) -> Tensor | None:
        location = locate_in_slot(self.output)
        return None if location is None else location.get(self.output)

    @property
    def source(self) -> Tensor | None:
        """The tensor that the block changes, as it was: the first argument like its result."""
        result = self.result
        values = (*self.args, *self.kwargs.values())
        return None if result is None else main_argument(values, result)

    @property
    def keeps_shape(self) -> bool:
        return self.source is not None


@dataclass
class Stack:
    """A list of blocks as one pass on an example showed it. `reason` says why it cannot grow, ""
    if it can."""

    path: str
    blocks: list[nn.Module]
    calls: list[BlockCall]
    macs: list[int]
    reason: str
    adding: bool = False

    def __repr__(self) -> str:
        kind = type(self.blocks[-1]).__name__
        cost = f"{count_params(self.blocks[-1]):,} parameters and {self.macs[-1]:,} multiply-adds"
        return f"stack: {self.path}: {len(self.blocks)} {kind}, {cost} each"


@dataclass
class _Recorder:
    """Hooks that record the calls of blocks."""

    calls: dict[nn.Module, list[BlockCall]] = field(default_factory=dict)

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        # Copies, because caches among the arguments and inputs may be changed in place.
        own = copy.deepcopy((args, kwargs))
        call = BlockCall((*args, *kwargs.values()), *own)
        self.calls.setdefault(module, []).append(call)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls[module][-1].output = output


def _containers(model: nn.Module) -> dict[str, nn.Module]:
    """Lists of modules that consist of modules themselves, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(module) > 0
        and all(any(True for _ in block.children()) for block in module.children())
    }


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Inside, torch's encoders pass no nested tensors to their layers, which cannot be copied."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def find_stacks(model: nn.Module, example: Any, paths: Sequence[str] = ()) -> list[Stack]:
    """The stacks of a model, or the lists of these names, after one pass on `example`. Raises
    ConfigError for a name that is no list of modules."""
    lists = _containers(model)
    for path in paths:
        named = dict(model.named_modules()).get(path)
        if not isinstance(named, (nn.ModuleList, nn.Sequential)) or not len(named):
            known = ", ".join(each for each in lists if each) or "none"
            raise ConfigError(
                f"depth: {path!r} is not a list of blocks (nn.ModuleList or nn.Sequential) of "
                f"{type(model).__name__}; it has {known}"
            )
    chosen = {p: model.get_submodule(p) for p in paths} if paths else lists
    recorder, handles = _Recorder(), []
    for container in chosen.values():
        for block in container.children():
            handles += [
                block.register_forward_pre_hook(recorder.begin, with_kwargs=True),
                block.register_forward_hook(recorder.end),
            ]
    counter = flop_counter()
    try:
        with evaluating(model), without_graphs(), _plain_tensors(), counter:
            call_model(model, on_device(example, input_device(model)))
    except MISFITS as error:
        raise not_running(model, error) from error
    finally:
        for handle in handles:
            handle.remove()
    flops, batch = counter.get_flop_counts(), batch_size(example)
    names = {module: name for name, module in model.named_modules()}

    def macs(block: nn.Module) -> int:
        return sum(flops.get(f"{type(model).__name__}.{names[block]}", {}).values()) // 2 // batch

    stacks = [_stack(path, container, recorder.calls, macs) for path, container in chosen.items()]
    if paths:
        return stacks
    alike = [stack for stack in stacks if not stack.reason and _alike(stack.blocks[1:])]
    outer = tuple(f"{stack.path}." for stack in alike)
    return [stack for stack in alike if not stack.path.startswith(outer)]


def _alike(blocks: Sequence[nn.Module]) -> bool:
    return len({type(block) for block in blocks}) == 1


def _stack(
    path: str,
    container: nn.Module,
    calls: Mapping[nn.Module, list[BlockCall]],
    macs: Callable[[nn.Module], int],
) -> Stack:
    blocks = list(container.children())
    found = [calls.get(block, []) for block in blocks]
    stack = Stack(path, blocks, [], [macs(block) for block in blocks], "")
    stack.reason = _repeated(path, container, found)
    if stack.reason:
        return stack
    stack.calls = [each[0] for each in found]
    pairs = list(pairwise(stack.calls))
    if not any(call.keeps_shape for call in stack.calls[bool(pairs) :]):
        stack.reason = (
            "no block returns a tensor of the shape of its input, so none fits between others; "
            "name another list"
        )
    elif all(_chained(one, other) for one, other in pairs):
        pass
    elif all(_added(one, other) for one, other in pairs):
        stack.adding = True
    else:
        stack.reason = (
            "the model does something of its own between its blocks; move that into the blocks, or "
            "name another list"
        )
    return stack


def _repeated(path: str, container: nn.Module, calls: Sequence[Sequence[BlockCall]]) -> str:
    """Why calls of blocks, each block's own, show no stack; "" if there is one call of each."""
    names = list(container._modules)
    if len(names) > len(calls):
        return "it holds a block several times, as shared layers do; give each place its own block"
    for name, own in zip(names, calls, strict=True):
        if len(own) != 1:
            return (
                f"a pass on the example calls the block '{path}.{name}' {len(own)} times, and each "
                "must be called once; let the model call it in a plain loop over the list"
            )
    return ""


def _chained(one: BlockCall, other: BlockCall) -> bool:
    return one.result is not None and any(one.result is each for each in other.given)


def _added(one: BlockCall, other: BlockCall) -> bool:
    read, result = one.source, one.result
    if read is None or result is None:
        return False
    both = read + result
    return any(
        isinstance(each, Tensor) and each.shape == both.shape and torch.equal(each, both)
        for each in other.given
    )
