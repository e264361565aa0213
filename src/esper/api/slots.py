"""Where a model may grow, and what Esper must know about the model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from esper.growth.blueprints.catalogue import BlueprintCatalogue
from esper.growth.depth import BLOCKS
from esper.growth.sites import Layouts, SlotChoice
from esper.leyline import ConfigError
from esper.leyline.depth import AUTO, Depth


@dataclass(frozen=True)
class Slots:
    """The modules after which seeds may be planted, for `grow` and `attach`. For most models a
    plain list of names is enough.

    modules     names, a regular expression, a predicate `(name, module)`, or "auto" for a few
                places along the model; `esper.list_slots` lists the possible modules
    example     one input of the model; default: the first of the training loader
    layout      dimensions of outputs by module ({"encoder": "BTC"}), where `list_slots` shows "?"
    causal      True: the output at a position must not depend on later positions. None: detected
                from an attribute `causal` of the model or from calls with `is_causal`
    forward     a function of (model, input) that calls the model, for batches of any type
    blueprints  what can be planted; default: all that are installed

    Raises ConfigError for values of another type.
    """

    modules: SlotChoice | Depth = AUTO
    example: Any = None
    layout: Layouts | None = None
    causal: bool | None = None
    forward: Callable[[nn.Module, Any], Any] | None = None
    blueprints: BlueprintCatalogue | None = None

    def __post_init__(self) -> None:
        for name, wanted, kind in (
            ("layout", "a dict of layouts by module name", Mapping),
            ("causal", "True or False", bool),
            ("forward", "a callable of (model, input)", Callable),
            ("blueprints", "a BlueprintCatalogue", BlueprintCatalogue),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):  # type: ignore[arg-type]
                raise ConfigError(f"{name} must be {wanted}, got {type(value).__name__}")


def as_slots(slots: SlotChoice | Slots, depth: Depth | str | None = None) -> Slots:
    """With `depth` the slots are those of its stacks. Raises ConfigError if others were chosen."""
    own = slots if isinstance(slots, Slots) else Slots(slots)
    if depth is None:
        return replace(own, blueprints=BLOCKS) if isinstance(own.modules, Depth) else own
    if own.modules != AUTO or own.blueprints is not None:
        raise ConfigError("give either slots or depth: a network grows at its layers or in depth")
    depth = depth if isinstance(depth, Depth) else Depth(depth)
    return replace(own, modules=depth, blueprints=BLOCKS)
