"""Checks of the arguments of public functions: one table of rules by name.

Arguments of the same name mean the same everywhere. To check a new one, add a line to RULES;
decorate functions whose arguments are checked with `checked`.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.api.slots import Slots
from esper.growth.devices import on_device
from esper.growth.grown_module import GrownModule
from esper.growth.hooks import without_graphs
from esper.growth.outputs import tensors_in
from esper.growth.sites import call_model, evaluating, explaining
from esper.leyline import ConfigError, shortened
from esper.leyline.constants import MOST_COUNT, MOST_ENVS, MOST_KEY
from esper.leyline.depth import Depth
from esper.leyline.growth_settings import Budget, GrowthSettings
from esper.simic.training.config import TrainingConfig
from esper.simic.training.loop import Hooks
from esper.tolaria.engine.batches import LoaderSource
from esper.tolaria.engine.objectives import (
    BY_CLASS,
    LOSSES,
    WholeSetScore,
    check_fit,
    check_targets,
    class_axes,
    has_tensor,
    named,
    with_axis,
)
from esper.tolaria.engine.recipe import HostRecipe, target_for
from esper.tolaria.families.base import Family
from esper.tolaria.tasks import Task

MAX = sys.float_info.max
MOST_NAME = 255  # bytes in the name of a file
P = ParamSpec("P")
R = TypeVar("R")


class Rule(NamedTuple):
    """`wanted` ends the sentence "NAME must be ..."."""

    wanted: str
    fits: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Also scalars of NumPy, and numbers that are not finite."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole(least: int, most: int) -> Rule:
    """A whole number in a range, `most` included."""

    def fits(value: Any) -> bool:
        return isinstance(value, Integral) and is_number(value) and least <= int(value) <= most

    return Rule(f"a whole number from {least} to {most}", fits)


def instance(wanted: str, *kinds: type) -> Rule:
    return Rule(wanted, lambda value: isinstance(value, kinds))


def one_of(*values: str) -> Rule:
    return Rule(" or ".join(map(repr, values)), lambda v: isinstance(v, str) and v in values)


def _is_list(value: Any, *kinds: type) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and all(isinstance(entry, kinds or object) for entry in value)


def _has_methods(value: Any, *names: str) -> bool:
    return all(callable(getattr(value, name, None)) for name in names)


def _is_controller(value: Any) -> bool:
    named = isinstance(getattr(value, "name", None), str)
    return isinstance(value, str) or (named and _has_methods(value, "act", "reset"))


def _is_measured(value: Any) -> bool:
    return is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and callable(value[1]) and not isinstance(value[0], tuple)
    return isinstance(value, Optimizer) or callable(value)


def _may_be_slots(value: Any) -> bool:
    if isinstance(value, Slots):
        value = value.modules
        if isinstance(value, Depth):
            return True
    named = isinstance(value, Iterable) and not isinstance(value, Mapping | bytes | Tensor)
    return named or callable(value)


def _is_path(value: Any) -> bool:
    if not isinstance(value, str | Path) or str(value) == "" or "\0" in str(value):
        return False
    if any(len(os.fsencode(part)) > MOST_NAME for part in Path(value).parts):
        raise ConfigError(f"{shorten(str(value))} is not the path of a folder: File name too long")
    return True


LOADER = Rule(
    "an iterable of batches, such as a DataLoader",
    lambda value: hasattr(value, "__iter__") or hasattr(value, "__getitem__"),
)
OBJECTIVE = Rule(
    "a name or a callable of (output, target)", lambda v: isinstance(v, str) or callable(v)
)
CONTROLLER = Rule("the name of a controller, or one with name, reset and act", _is_controller)
FOLDER = Rule("the path of a folder", _is_path)
FLAG = instance("True or False", bool)
NOT_NEGATIVE = Rule("0 or a number above it", lambda v: is_number(v) and 0 <= v <= MAX)
MEASURED = Rule("one number", _is_measured)
TASK = instance("a Task", Task)
FAMILY_NAME = instance("the name of a family", str)
NETWORK_KIND = one_of("flat", "set")  # the network of a policy

RULES: dict[str, Rule] = {
    "advantage": one_of("iql", "group"),
    "arm": instance("the name of an arm", str),
    "beta": NOT_NEGATIVE,
    "budget": instance("an esper.Budget", Budget),
    "callbacks": Rule("a list of callbacks", _is_list),
    "cluster": Rule("a cluster, such as esper.ray.Cluster", lambda value: hasattr(value, "cpus")),
    "config": instance("a TrainingConfig", TrainingConfig),
    "controller": CONTROLLER,
    "depth": Rule(
        "an esper.Depth or the name of a list of blocks", lambda v: isinstance(v, Depth | str)
    ),
    "deterministic": FLAG,
    "devices": Rule("a list of names of devices", lambda value: _is_list(value, str)),
    "entropy": Rule("a number from 0 to 1", lambda v: is_number(v) and 0.0 <= v <= 1.0),
    "episodes": whole(2, MOST_COUNT),
    "env": whole(0, MOST_COUNT),
    "epochs": whole(1, MOST_COUNT),
    "evaluate": Rule("a callable without arguments that returns the score", callable),
    "example": Rule("one input of the model", lambda value: value is not None),
    "expectile": Rule("a number from 0.5 to 1", lambda v: is_number(v) and 0.5 <= v <= 1.0),
    "fold": FLAG,
    "folder": FOLDER,
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
    "progress": Rule("callable", callable),
    "resume": FLAG,
    "rounds": whole(1, MOST_COUNT),
    "run": FOLDER,
    "runs": Rule("a list of folders", lambda value: _is_list(value, str, Path)),
    "samples": whole(0, MOST_COUNT),
    "schedulers": Rule(
        "learning-rate schedulers",
        lambda v: isinstance(v, tuple) and all(_has_methods(each, "step") for each in v),
    ),
    "score": OBJECTIVE,
    "seed_lr": Rule("a number above 0", lambda value: is_number(value) and 0 < value <= MAX),
    "seed_weight_decay": NOT_NEGATIVE,
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
    """Check the arguments of a function by RULES and `special`, before the function starts; None is
    allowed where it is the default. Raises ConfigError that names the argument."""

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
    """Raises ConfigError if the optimizer trains none of these parameters."""
    require("optimizer", optimizer, instance("a torch optimizer", Optimizer))
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not known & {id(p) for p in parameters}:
        raise ConfigError(
            "the optimizer trains none of the model's parameters; give it some; in a frozen "
            "model, those of the head or the last norm"
        )


def shorten(value: Any) -> str:
    """A wrong value for a message: the value if it is short, else its type."""
    kind = type(value).__name__
    # Python refuses to print a number of more than some thousand digits.
    if not isinstance(value, str | float) and not (isinstance(value, int) and abs(value) < 2**200):
        return kind
    return shortened(repr(value))


def check_values(model: nn.Module) -> None:
    """Raises ConfigError for a model without values."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ConfigError(
            f"{type(model).__name__} is on the meta device, where tensors have no values; create "
            "it on a real device, or use to_empty and load its weights"
        )


def check_model(model: nn.Module) -> None:
    """Raises ConfigError for a model that cannot be trained, or not here."""
    check_values(model)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"{name or type(module).__name__} has sparse gradients, which Esper cannot "
                "measure; make it with sparse=False"
            )
    for name, parameter in model.named_parameters():
        if parameter.layout != torch.strided:
            raise ConfigError(f"the parameter {name!r} is sparse; hold it as a dense tensor")
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise ConfigError(
            "gradients are switched off, so nothing can be trained; call this outside "
            "torch.no_grad() and torch.inference_mode()"
        )


def check_objectives(model: nn.Module, recipe: HostRecipe, device: torch.device) -> HostRecipe:
    """The recipe, with the dimension of classes fixed. Raises ConfigError if model, loss and score
    do not work on the first batches of both loaders."""
    assert isinstance(recipe.data, LoaderSource)
    for name, batch in recipe.data.first_batches.items():
        check_targets(recipe.loss, recipe.score, batch[1])
        with evaluating(model), without_graphs(), torch.enable_grad():
            ((output, target),) = _outputs(model, [batch], device, name)
            recipe = _with_class_axis(model, recipe, output, target, device)
            check_fit(recipe.loss, recipe.score, output, target)
            loss = _attempt("loss", recipe.loss, output, target)
            _check_number("loss", loss)
            _check_loss(model, loss, output, name, trusted=recipe.loss in LOSSES.values())
    with evaluating(model), without_graphs():
        if isinstance(recipe.score, WholeSetScore):
            # Scores of the whole set may fail on a single batch, so all data is used.
            tally = recipe.score.tally()
            for output, target in _outputs(model, recipe.data.val_batches(), device):
                _attempt("score", tally.add, output, target)
            _attempt("score", tally.result)
        else:
            _check_number("score", _attempt("score", recipe.score, output, target))
    return recipe


def _with_class_axis(
    model: nn.Module, recipe: HostRecipe, output: Any, target: Any, device: torch.device
) -> HostRecipe:
    """Where the shapes of a batch leave two possibilities, another batch may leave one."""
    known = any(named(each) in BY_CLASS for each in (recipe.loss, recipe.score))
    if not known or not isinstance(target, Tensor) or not has_tensor(output):
        return recipe
    axes = class_axes(output, target)
    if len(axes) == 2:
        with torch.no_grad():
            others = _outputs(model, recipe.data.val_batches(), device)
            axes = next((a for each in others if len(a := class_axes(*each)) == 1), [])
    axis = axes[0] if len(axes) == 1 else None
    loss, score = (with_axis(each, axis) for each in (recipe.loss, recipe.score))
    return replace(recipe, loss=loss, score=score)


def _check_loss(model: nn.Module, loss: Tensor, output: Any, name: str, *, trusted: bool) -> None:
    if not torch.isfinite(loss):
        raise ConfigError(
            f"the loss of the first batch of {name} is {float(loss.detach()):g}; correct the data, "
            "the model or the loss"
        )
    trainable = any(p.requires_grad for p in model.parameters())
    if trainable and not loss.requires_grad:
        raise ConfigError(
            "the loss does not depend on the parameters, so nothing can be trained; it must be "
            "computed from the model's output without detach(), item(), argmax() or NumPy"
        )
    read = [t for t in tensors_in(output) if t.requires_grad]
    if trusted or not trainable or not read:
        return  # a loss by name may be 0 for a network that has been trained
    with explaining("the loss has no gradient"):
        found = torch.autograd.grad(loss, read, allow_unused=True, retain_graph=True)
    if all(each is not None and not each.any() for each in found):
        raise ConfigError(
            f"the loss is constant on the first batch of {name}: its gradient by every output is "
            "0, so nothing can be trained; give another loss"
        )


def _outputs(
    model: nn.Module, batches: Iterable[Any], device: torch.device, name: str = "val_loader"
) -> Iterator[tuple[Any, Any]]:
    for batch in batches:
        with explaining(f"{type(model).__name__} does not run on the inputs of {name}"):
            inputs, target = on_device(tuple(batch), device)
            output = call_model(model, inputs)
        yield output, target_for(output, target)


def _attempt(name: str, function: Callable[..., Any], *args: Any) -> Any:
    with explaining(f"the {name} does not fit the model's output and the targets"):
        return function(*args)


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.dim() > 0 or value.is_complex():
        kind = type(value).__name__
        if isinstance(value, Tensor):
            kind = f"one of shape {tuple(value.shape)} and type {value.dtype}"
        raise ConfigError(
            f"the {name} must return one number, as a tensor without dimensions, for a batch; "
            f"it returned {kind}"
        )
