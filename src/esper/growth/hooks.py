"""Hooks and flags that Esper puts on a model: detect a growing model, copy one without them."""

import copy
import functools
from typing import Any

from torch import Tensor, nn

from esper.growth.compiled import unmark

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
