"""Hooks and flags that Esper puts on a model, and how compiled models notice them."""

import copy
import functools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline import ConfigError

REASON = (
    "seeds that grow in a model run between its compiled graphs; compile the model without "
    "fullgraph=True while it grows, and the exported model with it"
)


class _Mark(functools.partial[Any]):
    """The `forward` of a module with hooks of Esper; it calls the one that was there."""


def mark(module: nn.Module) -> None:
    """Graphs that were compiled without the hooks of `module` are not used for it any more."""
    if not isinstance(vars(module).get("forward"), _Mark):
        vars(module)["forward"] = _Mark(module.forward)


def unmark(module: nn.Module) -> None:
    """The hooks are removed: graphs from before them are right again."""
    found = vars(module).get("forward")
    if isinstance(found, _Mark):
        del vars(module)["forward"]
        # A `forward` of the module alone, as other libraries set it.
        if module.forward != found.func:
            vars(module)["forward"] = found.func


@contextmanager
def without_graphs() -> Iterator[None]:
    """Inside, compiled models run eagerly, so that hooks and modes see every module."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def is_wrapper(model: nn.Module) -> bool:
    """Whether `torch.compile(module)` returned it."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def original(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, else `model` itself."""
    return model.get_submodule("_orig_mod") if is_wrapper(model) else model


def check_breakable(model: nn.Module) -> None:
    """Raises ConfigError if a graph must not break in `model` or in a module of it."""
    for name, module in model.named_modules():
        if getattr(_context(module), "fullgraph", False):
            where = f"module {name!r}" if name else type(original(module)).__name__
            raise ConfigError(f"{where} is compiled with fullgraph=True, but {REASON}")


def _context(module: nn.Module) -> Any:
    """The settings that `module` is compiled with, or None. For `module.compile()` only the closure
    of the function that it makes has them."""
    if is_wrapper(module):
        return module.dynamo_ctx
    call = module._compiled_call_impl
    if call is None:
        return None
    cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
    return cells["self"].cell_contents if "self" in cells else None


# A Body grows the model, perhaps without a seed and so without a hook so far.
GROWING = "_esper_growing"
# A trainer's callback saves the seeds, so a state dict of the model alone loses nothing.
SEEDS_SAVED = "_esper_seeds_saved"


class _Flag:
    """An attribute of a model that is None in copies of the model."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def set_flag(model: nn.Module, flag: str) -> None:
    vars(model)[flag] = _Flag()


def clear_flag(model: nn.Module, flag: str) -> None:
    vars(model).pop(flag, None)


def has_flag(model: nn.Module, flag: str) -> bool:
    return vars(model).get(flag) is not None


def hooks_of_esper(module: nn.Module) -> dict[int, Any]:
    """The hooks of Esper on one module, by their keys in its dictionaries of hooks."""
    return {
        key: hook
        for hooks in _hook_dicts(module)
        for key, hook in hooks.items()
        if _is_of_esper(hook)
    }


def has_own_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that are not Esper's, or a `forward` of its own."""
    forward = vars(module).get("forward")
    return (forward is not None and not isinstance(forward, _Mark)) or any(
        not _is_of_esper(hook) for hooks in _hook_dicts(module) for hook in hooks.values()
    )


def hook_with_state(module: nn.Module) -> str | None:
    """The type of an object that a hook on `module` belongs to, which a copy of the module would
    get a copy of; None if there is none. Those of torch, such as weight norm, are made for that."""
    for hooks in _hook_dicts(module):
        for hook in hooks.values():
            owner = getattr(hook, "__self__", hook)
            plain = isinstance(owner, types.FunctionType | types.BuiltinFunctionType)
            kind = type(owner)
            torch_own = kind.__module__.split(".")[0] in ("torch", "functools")
            if not plain and not torch_own and owner is not module:
                return kind.__name__
    return None


def _is_of_esper(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    code = hook if hasattr(hook, "__qualname__") else type(hook)
    owners = (code, type(getattr(hook, "__self__", None)))
    return any(str(owner.__module__).split(".")[0] == "esper" for owner in owners)


def _hook_dicts(module: nn.Module) -> list[dict[int, Any]]:
    return [d for name, d in vars(module).items() if "_hooks" in name and isinstance(d, dict)]


def copy_without_esper(host: nn.Module) -> nn.Module:
    """A deep copy of a model without hooks and flags of Esper; the user's hooks are copied."""
    found = [hook for module in host.modules() for hook in hooks_of_esper(module).values()]
    # Copying a hook would copy everything it refers to, perhaps the whole training.
    memo: dict[int, Any] = {id(hook): _no_hook for hook in found}
    # torch does not copy results that a module keeps from its last pass, e.g. a normalised weight.
    kept = [value for module in host.modules() for value in vars(module).values()]
    memo |= {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and not t.is_leaf}
    plain = copy.deepcopy(host, memo)
    for module in plain.modules():
        unmark(module)
        for key in hooks_of_esper(module):
            for hooks in _hook_dicts(module):
                hooks.pop(key, None)
        for flag in (GROWING, SEEDS_SAVED):
            clear_flag(module, flag)
    return plain


def _no_hook() -> None:
    """Stands for a hook of Esper while a copy is made."""
