"""Esper: neural networks that grow while they train."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.api import Body, Callback, Grown, attach, grow, load, load_policy
    from esper.growth import (
        BlueprintCatalogue,
        BlueprintSpec,
        GrownModule,
        default_catalogue,
        export,
        list_slots,
    )
    from esper.leyline import EsperError
    from esper.tolaria import Budget

__version__ = version("esper-grow")

# Loaded on first use, so that the command answers without waiting for torch.
_HOMES = {
    "BlueprintCatalogue": "esper.growth",
    "BlueprintSpec": "esper.growth",
    "Body": "esper.api",
    "Budget": "esper.tolaria.garden",
    "Callback": "esper.api",
    "EsperError": "esper.leyline",
    "Grown": "esper.api",
    "GrownModule": "esper.growth",
    "attach": "esper.api",
    "default_catalogue": "esper.growth",
    "export": "esper.growth",
    "grow": "esper.api",
    "list_slots": "esper.growth",
    "load": "esper.api",
    "load_policy": "esper.api",
}

__all__ = [
    "BlueprintCatalogue",
    "BlueprintSpec",
    "Body",
    "Budget",
    "Callback",
    "EsperError",
    "Grown",
    "GrownModule",
    "__version__",
    "attach",
    "default_catalogue",
    "export",
    "grow",
    "list_slots",
    "load",
    "load_policy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
