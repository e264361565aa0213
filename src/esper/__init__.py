"""Esper: neural networks that grow while they train."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.api import (
        Body,
        Callback,
        Grown,
        Slots,
        attach,
        grow,
        load,
        load_policy,
    )
    from esper.growth.blueprints.catalogue import (
        BlueprintCatalogue,
        BlueprintSpec,
        default_catalogue,
    )
    from esper.growth.export import export
    from esper.growth.grown_module import GrownModule
    from esper.growth.slot_choice import list_slots
    from esper.leyline import EsperError, EsperWarning
    from esper.leyline.depth import Depth
    from esper.leyline.growth_settings import Budget, GrowthSettings, RateSchedule

    __version__: str
    """The version that is installed."""

# Loaded on first use, so that the command answers without waiting for torch.
_HOMES = {
    "BlueprintCatalogue": "esper.growth.blueprints.catalogue",
    "BlueprintSpec": "esper.growth.blueprints.catalogue",
    "Body": "esper.api",
    "Budget": "esper.leyline.growth_settings",
    "Callback": "esper.api",
    "Depth": "esper.leyline.depth",
    "EsperError": "esper.leyline",
    "EsperWarning": "esper.leyline",
    "Grown": "esper.api",
    "GrowthSettings": "esper.leyline.growth_settings",
    "GrownModule": "esper.growth.grown_module",
    "RateSchedule": "esper.leyline.growth_settings",
    "Slots": "esper.api",
    "attach": "esper.api",
    "default_catalogue": "esper.growth.blueprints.catalogue",
    "export": "esper.api",
    "grow": "esper.api",
    "list_slots": "esper.api",
    "load": "esper.api",
    "load_policy": "esper.api",
}

__all__ = ["__version__", *_HOMES]

# For people who have a stack already; each needs the library that it is for.
_MODULES = ("gym", "lightning", "sklearn", "trackers", "transformers")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("esper-grow")
    if name in _MODULES:
        return import_module(f"esper.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
