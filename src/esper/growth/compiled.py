"""torch.compile and a growing model: graphs that notice growth, and calls without graphs.

Seeds run between graphs, not in them: their hooks break the graph at the module that they are on.
So nothing is compiled anew when a stage, an alpha or a coalition changes. Dynamo does not notice
that a hook was added or removed (`skip_nnmodule_hook_guards`), so such a module is marked: it gets
an attribute `forward` of its own, whose absence every graph checks before it is used.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

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
