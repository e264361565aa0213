"""Esper: neural networks that grow while they train."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.api import (
        Body,
        Callback,
        Grown,
        attach,
        grow,
        load,
        load_policy,
    )
    from esper.growth import (
        BlueprintCatalogue,
        BlueprintSpec,
        GrownModule,
        default_catalogue,
        list_slots,
    )
    from esper.growth.export import export
    from esper.leyline import EsperError, EsperWarning
    from esper.tolaria import Budget

    __version__: str
    """The version that is installed."""

# Loaded on first use, so that the command answers without waiting for torch.
_HOMES = {
    "BlueprintCatalogue": "esper.growth",
    "BlueprintSpec": "esper.growth",
    "Body": "esper.api",
    "Budget": "esper.tolaria.garden",
    "Callback": "esper.api",
    "EsperError": "esper.leyline",
    "EsperWarning": "esper.leyline",
    "Grown": "esper.api",
    "GrownModule": "esper.growth",
    "attach": "esper.api",
    "default_catalogue": "esper.growth",
    "export": "esper.api",
    "grow": "esper.api",
    "list_slots": "esper.api",
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
    "EsperWarning",
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

# For people who have a stack already; each needs the library that it is for.
_MODULES = ("gym", "lightning", "sklearn", "trackers", "transformers")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("esper-grow")
    if name in _MODULES:
        return import_module(f"esper.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
