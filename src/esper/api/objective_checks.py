"""Model, data, loss and score together, before training: what does not fit shows here."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.sites import call_model, evaluating, map_tensors
from esper.leyline import ConfigError
from esper.tolaria.engine.objectives import WholeSetScore, check_fit
from esper.tolaria.engine.recipe import HostRecipe

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
