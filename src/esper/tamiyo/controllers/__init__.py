"""Controllers: static, random, each, scripted, heuristic, and depth for growth in depth.

To add one, write a class with `name`, `reset` and `act` (see `Controller` in `situation.py`), and
add it to BUILT_IN, or to the entry point group `esper.controllers` of your own package.
"""

from collections.abc import Callable
from importlib.metadata import entry_points

from esper.leyline import ConfigError, shortened
from esper.tamiyo.controllers.depth import DepthController
from esper.tamiyo.controllers.heuristic import HeuristicController
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.controllers.simple import EachController, RandomController, StaticController
from esper.tamiyo.situation import Controller

ENTRY_POINT_GROUP = "esper.controllers"
# Factories. `scripted` and `heuristic` get FILE from `scripted:FILE` and `heuristic:FILE.toml`.
BUILT_IN: dict[str, Callable[..., Controller]] = {
    "depth": DepthController.named,
    "each": EachController,
    "heuristic": HeuristicController.named,
    "random": RandomController,
    "static": StaticController,
    "scripted": ScriptedController.load,
}


def _factories() -> dict[str, Callable[..., Controller]]:
    """The built-in controllers, then those of installed packages, by name."""
    found = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)
    return BUILT_IN | {point.name: point.load() for point in found}


def controller_names() -> tuple[str, ...]:
    return tuple(_factories())


def make_controller(name: str) -> Controller:
    """A controller by its name on the command line, such as `random` or `scripted:FILE`.

    Raises ConfigError listing the names.
    """
    kind, colon, argument = (name, "", "") if name in BUILT_IN else name.partition(":")
    # Controllers of other packages may take an argument.
    wrong = kind in BUILT_IN and kind != "depth" and bool(argument) != (kind == "scripted")
    if kind == "heuristic" and colon:
        wrong = not argument.endswith(".toml")
    if wrong or kind not in _factories():
        known = [f"{n}:FILE" if n == "scripted" else n for n in controller_names()]
        known.insert(known.index("heuristic") + 1, "heuristic:FILE.toml")
        # The last two are found by `esper.api`, before a name gets here.
        raise ConfigError(
            f"no controller {shortened(name)!r}; there are {', '.join(known)}, pretrained, and the "
            "folder of a training run or policy"
        )
    return _factories()[kind](*([argument] if colon else []))
