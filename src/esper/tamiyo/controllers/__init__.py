"""Controllers: static, random, scripted, heuristic. To add one, write a class with `act`."""

from esper.leyline import ConfigError
from esper.tamiyo.controllers.base import Controller, wait
from esper.tamiyo.controllers.heuristic import HeuristicConfig, HeuristicController
from esper.tamiyo.controllers.random import RandomController
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.controllers.static import StaticController

CONTROLLER_NAMES = ("heuristic", "random", "static", "scripted:FILE")


def make_controller(name: str) -> Controller:
    """A controller by its name on the command line; raises ConfigError listing the names."""
    if name == "static":
        return StaticController()
    if name == "random":
        return RandomController()
    if name == "heuristic":
        return HeuristicController()
    if name.startswith("scripted:"):
        return ScriptedController.load(name.removeprefix("scripted:"))
    raise ConfigError(f"no controller {name!r}; there are {', '.join(CONTROLLER_NAMES)}")


__all__ = [
    "CONTROLLER_NAMES",
    "Controller",
    "HeuristicConfig",
    "HeuristicController",
    "RandomController",
    "ScriptedController",
    "StaticController",
    "make_controller",
    "wait",
]
