"""`grow`: train a model of the user's own and grow it where that helps."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from esper.api.controllers import find_controller
from esper.api.epochs import decisions
from esper.growth import (
    BlueprintCatalogue,
    GrownModule,
    SlotChoice,
    call_model,
    default_catalogue,
    evaluating,
    export,
    map_tensors,
)
from esper.leyline import ConfigError, EpisodeOutcome, History
from esper.leyline.events import Event
from esper.observatory import RunDirectory
from esper.tamiyo import Controller
from esper.tolaria import (
    LOSSES,
    SCORES,
    Budget,
    HostRecipe,
    LoaderSource,
    Objective,
    TrialRules,
    find_objective,
    make_env,
    play,
    settle,
)

log = logging.getLogger("esper")

DEFAULT_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Grown:
    """What `grow` gives back.

    model    the live network: your model with the seeds it keeps, at its best validation score
    history  one flat row per epoch
    events   what happened, in order
    outcome  the run in one record
    """

    model: GrownModule
    history: list[dict[str, Any]]
    events: list[Event]
    outcome: EpisodeOutcome
    example: Any

    def export(self) -> nn.Module:
        """A plain module for use without Esper, checked to give the live network's output."""
        return export(self.model, self.example)


def grow(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    *,
    slots: SlotChoice,
    example: Any = None,
    loss: str | Objective = "cross_entropy",
    score: str | Objective = "accuracy",
    controller: str | Controller = "heuristic",
    steps: int = 30,
    budget: Budget | None = None,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    key: int = 0,
    out: str | Path | None = None,
    blueprints: BlueprintCatalogue | None = None,
    incubation: Literal["isolated", "joint"] = "isolated",
    max_seeds: int | None = None,
    max_grad_norm: float | None = None,
) -> Grown:
    """Train `model` in place for `steps` epochs and grow it where that helps.

    Loaders yield (input, target); an input that is a dict or a tuple is given to the model as
    keywords or positions. `slots` are module names, a regular expression or a predicate
    `(name, module)`; `list_slots(model, example)` shows what there is, where `example` is one
    input (by default the first of `train_loader`). `loss` and `score` are names or callables of
    (output, target) that average over the batch; a score is better when higher, on a 0-100 scale.
    `optimizer` is an optimiser of the model's parameters or a function that makes one (default:
    AdamW, 1e-3). `out` is a folder for the record of the run.

    Ctrl-C ends the run early with what it has reached. Raises ConfigError, before anything is
    trained, for arguments that cannot work.
    """
    data = LoaderSource(train_loader, val_loader, example)
    recipe = HostRecipe(
        build=lambda: model,
        slots=slots,
        data=data,
        loss=find_objective("loss", loss, LOSSES),
        score=find_objective("score", score, SCORES),
        optimizer=_optimizer_maker(optimizer),
        catalogue=blueprints or default_catalogue(),
        max_grad_norm=max_grad_norm,
    )
    rules = TrialRules(decisions(steps), incubation, budget=budget, max_seeds=max_seeds)
    _check_objectives(model, recipe, next(iter(val_loader)))
    history = History()
    env = make_env(recipe, [key], rules, history, _device(model))
    network = env.population.template
    chosen = find_controller(controller, len(network.sites), recipe.catalogue)
    # The folder comes last: a run that cannot begin leaves nothing behind.
    history.listeners = listeners = _listeners(out, model, chosen, steps, key)
    try:
        interrupted = not play(env, chosen)
        (outcome,) = settle(
            env,
            np.ones(1, dtype=bool),
            task=type(model).__name__,
            controller=chosen.name,
            interrupted=interrupted,
        )
    finally:
        for listener in listeners:
            listener.close()
    return Grown(network, history.rows, history.events, outcome, data.example())


def _optimizer_maker(
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None,
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    if optimizer is None:
        return lambda params: AdamW(params, lr=DEFAULT_LEARNING_RATE)
    if isinstance(optimizer, Optimizer):
        return lambda params: optimizer
    return optimizer


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _listeners(
    out: str | Path | None, model: nn.Module, controller: Controller, steps: int, key: int
) -> list[RunDirectory]:
    if out is None:
        return []
    config = {
        "model": type(model).__name__,
        "controller": controller.name,
        "steps": steps,
        "key": key,
    }
    return [RunDirectory.create(Path(out), config, script=True)]


def _check_objectives(model: nn.Module, recipe: HostRecipe, batch: Any) -> None:
    """One batch through model, loss and score: what does not fit shows before training."""
    device = _device(model)
    inputs, target = map_tensors(lambda tensor: tensor.to(device), tuple(batch))
    with evaluating(model):
        try:
            output = call_model(model, inputs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{type(model).__name__} does not run on the inputs of val_loader: {error}"
            ) from error
        for name, objective in (("loss", recipe.loss), ("score", recipe.score)):
            try:
                value = objective(output, target)
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise ConfigError(
                    f"the {name} does not fit the model's output and the targets: {error}"
                ) from error
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise ConfigError(
                    f"the {name} must give one number, as a tensor, for a batch; "
                    f"it gave {type(value).__name__}"
                )
