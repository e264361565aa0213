"""`advise`: what to do with a model that has been trained."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from esper.api.checks import checked
from esper.api.growing import OptimizerMaker, device_of, optimizer_maker, scoring
from esper.api.objective_checks import check_objectives
from esper.api.randomness import randomness, restore_randomness
from esper.growth import BlueprintCatalogue, Layouts, SlotChoice, default_catalogue
from esper.leyline import ConfigError
from esper.tolaria import (
    LOSSES,
    Advice,
    HostRecipe,
    LoaderSource,
    Objective,
    Precision,
    find_objective,
)
from esper.tolaria import advise as advise_on


@checked()
def advise(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    *,
    slots: SlotChoice,
    extra: float = 0.3,
    epochs: int = 30,
    example: Any = None,
    layout: Layouts | None = None,
    causal: bool | None = None,
    loss: str | Objective = "cross_entropy",
    score: str | Callable[[Any, Any], Any] = "accuracy",
    optimizer: Optimizer | OptimizerMaker | None = None,
    key: int = 0,
    batches_per_epoch: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    blueprints: BlueprintCatalogue | None = None,
    max_grad_norm: float | None = None,
    precision: Precision = "fp32",
) -> Advice:
    """What to do with a trained `model`: grow it (what, and where), continue, or retrain wider.

    The model was trained for `epochs` epochs; `extra` is what may be spent further, as a share of
    that. The advice takes about a tenth of it. Nothing of the model changes, nor of an optimiser
    that is given, nor where generators stand: all is tried on a copy.

    Print what it gives back, or read `verdict`, `sentence`, `choice` and `findings`. To follow it,
    call `grow(model, ..., start="trained", steps=round(extra * epochs))`. All other arguments are
    those of `grow`, and should be those that the model was trained with.

    Raises ConfigError for arguments that cannot work.
    """
    loaders = (train_loader, val_loader)
    beginning = randomness(loaders)
    try:
        own, its_optimizer = _copied(model, optimizer)
        recipe = HostRecipe(
            build=lambda: own,
            slots=slots,
            data=LoaderSource(train_loader, val_loader, example, forward, batches_per_epoch),
            loss=find_objective("loss", loss, LOSSES),
            score=scoring(score),
            optimizer=optimizer_maker(its_optimizer),
            catalogue=blueprints or default_catalogue(),
            max_grad_norm=max_grad_norm,
            precision=precision,
            layout=layout,
            causal=causal,
        )
        check_objectives(own, recipe, device_of(own))
        return advise_on(recipe, key, extra=extra, epochs=epochs, device=device_of(own))
    finally:
        restore_randomness(loaders, beginning)


def _copied(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Together: an optimiser that was given is one of the copy's parameters then."""
    try:
        own, its_optimizer = copy.deepcopy((model, optimizer))
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be copied, and advise tries everything on a copy: "
            f"{error}"
        ) from error
    return own, its_optimizer
