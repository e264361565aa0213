"""Hooks that Esper has put on a model: to know a model that grows, and to copy it without them."""

import copy
import functools
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

# Models that somebody grows, also while they have no seed and so no hook. Copies are not in it.
GROWING: WeakSet[nn.Module] = WeakSet()
# Those whose seeds somebody saves beside them, so that a state without them is no loss.
SAVED_BESIDE: WeakSet[nn.Module] = WeakSet()


def is_of_esper(hook: Any) -> bool:
    """Whether the code that a hook runs is Esper's."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    code = hook if hasattr(hook, "__qualname__") else type(hook)
    owners = (code, type(getattr(hook, "__self__", None)))
    return any(str(owner.__module__).split(".")[0] == "esper" for owner in owners)


def hooks_of_esper(module: nn.Module) -> dict[int, Any]:
    """The hooks of Esper on one module, by their keys in its dictionaries of hooks."""
    return {
        key: hook
        for hooks in _hook_dicts(module)
        for key, hook in hooks.items()
        if is_of_esper(hook)
    }


def _hook_dicts(module: nn.Module) -> list[dict[int, Any]]:
    return [d for name, d in vars(module).items() if "_hooks" in name and isinstance(d, dict)]


def copy_without_esper(host: nn.Module) -> nn.Module:
    """A deep copy of a model on which nothing of Esper is hooked; the user's hooks are copied."""
    found = [hook for module in host.modules() for hook in hooks_of_esper(module).values()]
    # A hook would be copied with all that it holds on to, the whole training perhaps.
    memo: dict[int, Any] = {id(hook): _nothing for hook in found}
    # What a module keeps of its last pass (a normalised weight, say) torch does not copy itself.
    kept = [value for module in host.modules() for value in vars(module).values()]
    memo |= {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and not t.is_leaf}
    plain = copy.deepcopy(host, memo)
    for module in plain.modules():
        for key in hooks_of_esper(module):
            for hooks in _hook_dicts(module):
                hooks.pop(key, None)
    return plain


def _nothing() -> None:
    """Stands for a hook of Esper in a copy that is being made."""
