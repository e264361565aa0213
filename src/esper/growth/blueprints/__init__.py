"""Blueprints: what can be grown. To add one, write a function and list it in the catalogue."""

from esper.growth.blueprints.catalogue import (
    BUILT_IN,
    ENTRY_POINT_GROUP,
    NOOP,
    BlueprintCatalogue,
    BlueprintSpec,
    OutputSpec,
    count_params,
    default_catalogue,
    example_params,
    seed_costs,
    seed_traits,
)

__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "NOOP",
    "BlueprintCatalogue",
    "BlueprintSpec",
    "OutputSpec",
    "count_params",
    "default_catalogue",
    "example_params",
    "seed_costs",
    "seed_traits",
]
