"""Where a model of the user's own may grow, and what Esper must know of it to do so."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from esper.growth.blueprints.catalogue import BlueprintCatalogue
from esper.growth.sites import Layouts, SlotChoice
from esper.leyline import ConfigError


@dataclass(frozen=True)
class Slots:
    """The modules after which seeds may be planted, for `grow` and `attach`. A plain list of names
    does for most models; the other fields are for models that need them.

    modules     names, a regular expression or a predicate `(name, module)`; `esper.list_slots`
                shows what there is
    example     one input of the model; default: the first of the training loader
    layout      dimensions of outputs by module ({"encoder": "BTC"}), where `list_slots` shows "?"
    causal      True: seeds must not look ahead along positions. None: as the model says, by an
                attribute `causal` or calls with `is_causal`; otherwise they may
    forward     a function of (model, input) that calls the model; a batch may then be anything
    blueprints  what can be planted; default: all that are installed

    Raises ConfigError for values of another kind.
    """

    modules: SlotChoice
    example: Any = None
    layout: Layouts | None = None
    causal: bool | None = None
    forward: Callable[[nn.Module, Any], Any] | None = None
    blueprints: BlueprintCatalogue | None = None

    def __post_init__(self) -> None:
        for name, wanted, fits in (
            ("layout", "a dict of layouts by module name", isinstance(self.layout, Mapping)),
            ("causal", "True or False", isinstance(self.causal, bool)),
            ("forward", "a callable of (model, input)", callable(self.forward)),
            (
                "blueprints",
                "a BlueprintCatalogue",
                isinstance(self.blueprints, BlueprintCatalogue),
            ),
        ):
            value = getattr(self, name)
            if value is not None and not fits:
                raise ConfigError(f"{name} must be {wanted}, got {type(value).__name__}")


def as_slots(slots: "SlotChoice | Slots") -> Slots:
    return slots if isinstance(slots, Slots) else Slots(slots)
