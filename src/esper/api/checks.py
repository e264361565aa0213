"""The arguments of the front door: what each must be, by name, in one table.

An argument of the same name means the same everywhere. To check a new one, add a line to RULES; a
function whose arguments are to be checked is decorated with `checked`.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from esper.api.slots import Slots
from esper.growth.grown_module import GrownModule
from esper.growth.sites import call_model, evaluating, map_tensors
from esper.leyline import ConfigError, shortened
from esper.leyline.constants import MOST_COUNT, MOST_ENVS, MOST_KEY
from esper.leyline.growth_settings import Budget, GrowthSettings
from esper.simic.training.config import TrainingConfig
from esper.simic.training.loop import Hooks
from esper.tolaria.engine.objectives import WholeSetScore, check_fit
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.families.base import Family
from esper.tolaria.tasks.base import Task

P = ParamSpec("P")
R = TypeVar("R")


class Rule(NamedTuple):
    """`wanted` ends the sentence "NAME must be ..."."""

    wanted: str
    fits: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Also a scalar of NumPy; what is not finite is one."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole(least: int, most: int) -> Rule:
    """A whole number in a range, `most` included."""
    wanted = f"a whole number from {least} to {most}"
    return Rule(
        wanted,
        lambda value: (
            isinstance(value, Integral)
            and not isinstance(value, bool)
            and least <= int(value) <= most
        ),
    )


def positive() -> Rule:
    return Rule(
        "a number above 0",
        lambda value: is_number(value) and 0 < value <= sys.float_info.max,
    )


def not_negative() -> Rule:
    return Rule(
        "0 or a number above it",
        lambda value: is_number(value) and 0 <= value <= sys.float_info.max,
    )


def instance(wanted: str, *kinds: type) -> Rule:
    return Rule(wanted, lambda value: isinstance(value, kinds))


def one_of(*values: str) -> Rule:
    return Rule(
        " or ".join(map(repr, values)), lambda value: isinstance(value, str) and value in values
    )


def _is_list_of(kinds: type | tuple[type, ...]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(entry, kinds) for entry in value)
    )


def _is_controller(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(getattr(value, "name", None), str)
        and callable(getattr(value, "act", None))
        and callable(getattr(value, "reset", None))
    )


def _is_measured(value: Any) -> bool:
    return is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and callable(value[1]) and not isinstance(value[0], tuple)
    return isinstance(value, Optimizer) or callable(value)


def _may_be_slots(value: Any) -> bool:
    if isinstance(value, Slots):
        value = value.modules
    named = isinstance(value, Iterable) and not isinstance(value, Mapping | bytes | Tensor)
    return named or callable(value)


LOADER = Rule(
    "an iterable of batches, such as a DataLoader",
    lambda value: hasattr(value, "__iter__") or hasattr(value, "__getitem__"),
)
OBJECTIVE = Rule(
    "a name or a callable of (output, target)", lambda v: isinstance(v, str) or callable(v)
)
CONTROLLER = Rule("the name of a controller, or one with name, reset and act", _is_controller)
FOLDER = instance("the path of a folder", str, Path)
FLAG = instance("True or False", bool)
CALLABLE = Rule("callable", callable)
MEASURED = Rule("one number", _is_measured)
TASK = instance("a Task", Task)
FAMILY_NAME = instance("the name of a family", str)
NETWORK_KIND = one_of("flat", "set")  # of a policy's network, where that is meant

RULES: dict[str, Rule] = {
    "advantage": one_of("iql", "group"),
    "arm": instance("the name of an arm", str),
    "averaged": instance("an AveragedModel of torch.optim.swa_utils", AveragedModel),
    "beta": not_negative(),
    "budget": instance("an esper.Budget", Budget),
    "callbacks": Rule(
        "a list of callbacks",
        lambda value: isinstance(value, Sequence) and not isinstance(value, str),
    ),
    "cluster": Rule("a cluster, such as esper.ray.Cluster", lambda value: hasattr(value, "cpus")),
    "config": instance("a TrainingConfig", TrainingConfig),
    "controller": CONTROLLER,
    "deterministic": FLAG,
    "devices": Rule("a list of names of devices", _is_list_of(str)),
    "directory": FOLDER,
    "entropy": Rule("a number from 0 to 1", lambda v: is_number(v) and 0.0 <= v <= 1.0),
    "episodes": whole(2, MOST_COUNT),
    "env": whole(0, MOST_COUNT),
    "epochs": whole(1, MOST_COUNT),
    "evaluate": Rule("a callable without arguments that gives the score", callable),
    "example": Rule("one input of the model", lambda value: value is not None),
    "expectile": Rule("a number from 0.5 to 1", lambda v: is_number(v) and 0.5 <= v <= 1.0),
    "family": instance("a Family", Family),
    "group": whole(1, MOST_ENVS),
    "hooks": instance("a Hooks", Hooks),
    "key": whole(0, MOST_KEY),
    "layout": instance("a dict of layouts by module name", Mapping),
    "loss": OBJECTIVE,
    "model": instance("a torch.nn.Module", nn.Module),
    "network": instance("a GrownModule", GrownModule),
    "optimizer": Rule(
        "a torch optimizer, a function that makes one from parameters, or a pair of that and a "
        "function that makes a scheduler",
        _is_optimizer,
    ),
    "out": FOLDER,
    "overwrite": FLAG,
    "path": FOLDER,
    "profile": whole(0, MOST_COUNT),
    "progress": CALLABLE,
    "resume": FLAG,
    "round": whole(0, MOST_COUNT),
    "rounds": whole(1, MOST_COUNT),
    "run": FOLDER,
    "runs": Rule("a list of folders", _is_list_of((str, Path))),
    "schedulers": Rule(
        "learning-rate schedulers",
        lambda value: (
            isinstance(value, tuple) and all(callable(getattr(s, "step", None)) for s in value)
        ),
    ),
    "score": OBJECTIVE,
    "seed_lr": positive(),
    "seed_weight_decay": Rule(
        "a number of 0 or more",
        lambda value: is_number(value) and 0 <= value <= sys.float_info.max,
    ),
    "settings": instance("an esper.GrowthSettings", GrowthSettings),
    "slots": Rule(
        "names of modules, a regular expression, a predicate or esper.Slots", _may_be_slots
    ),
    "start": one_of("fresh", "trained"),
    "step": whole(0, MOST_COUNT),
    "steps": whole(1, MOST_COUNT),
    "task": instance("the name of a task", str),
    "teacher": instance("the name of a controller, or the folder of a policy", str),
    "train_loader": LOADER,
    "val_loader": LOADER,
    "validation_loss": MEASURED,
    "validation_score": MEASURED,
    "workers": Rule(
        "a whole number of 1 or more, or 'auto'",
        lambda value: value == "auto" or whole(1, MOST_COUNT).fits(value),
    ),
}


def checked(**special: Rule) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a function by RULES, or by a rule of its own; None may stand where it
    is the default. Raises ConfigError that names the argument, before the function begins."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = signature(function)
        rules = RULES | special

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in known.bind(*args, **kwargs).arguments.items():
                if name in rules and not (value is None and known.parameters[name].default is None):
                    require(name, value, rules[name])
            return function(*args, **kwargs)

        return call

    return decorate


def require(name: str, value: Any, rule: Rule) -> None:
    """Raises ConfigError, naming the argument, if the value breaks the rule."""
    if not rule.fits(value):
        raise ConfigError(f"{name} must be {rule.wanted}, got {shorten(value)}")


def check_optimizer(optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Raises ConfigError if it does not train any of these parameters."""
    require("optimizer", optimizer, instance("a torch optimiser", Optimizer))
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not known & {id(p) for p in parameters}:
        raise ConfigError(
            "this optimiser trains none of the model's parameters; give it some, which in a frozen "
            "model may be those of its head or of its last norm"
        )


def shorten(value: Any) -> str:
    """A wrong value as a message shows it: never a page of numbers."""
    kind = type(value).__name__
    # Python refuses to spell out a number of more than some thousand digits.
    if not isinstance(value, str | float) and not (isinstance(value, int) and abs(value) < 2**200):
        return kind
    return shortened(repr(value))


# What does not fit raises one of these; anything else is a defect, and passes as it is.
MISFITS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError)


def check_objectives(model: nn.Module, recipe: HostRecipe, device: torch.device) -> None:
    """Raises ConfigError if model, loss and score do not work on validation data."""
    with evaluating(model):
        output, target = next(_outputs(model, recipe.data.val_batches(), device))
        check_fit(recipe.loss, recipe.score, output, target)
        _check_number("loss", _attempt("loss", recipe.loss, output, target))
        if not isinstance(recipe.score, WholeSetScore):
            _check_number("score", _attempt("score", recipe.score, output, target))
            return
        # All of the data: a part may hold too little for a score of the whole.
        tally = recipe.score.tally()
        for output, target in _outputs(model, recipe.data.val_batches(), device):
            _attempt("score", tally.add, output, target)
        _attempt("score", tally.result)


def _outputs(
    model: nn.Module, batches: Iterable[Any], device: torch.device
) -> Iterator[tuple[Any, Any]]:
    for batch in batches:
        inputs, target = map_tensors(lambda tensor: tensor.to(device), tuple(batch))
        try:
            output = call_model(model, inputs)
        except MISFITS as error:
            raise ConfigError(
                f"{type(model).__name__} does not run on the inputs of val_loader: {error}"
            ) from error
        yield output, target


def _attempt(name: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except ConfigError:
        raise
    except MISFITS as error:
        raise ConfigError(
            f"the {name} does not fit the model's output and the targets: {error}"
        ) from error


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigError(
            f"the {name} must give one number, as a tensor, for a batch; "
            f"it gave {type(value).__name__}"
        )
