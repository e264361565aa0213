"""Insurance: the same network without growth, trained beside, and the better of the two kept."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from esper.api.grown import Grown
from esper.api.loop_state import randomness, restore_randomness
from esper.growth.snapshot import restore_snapshot, take_snapshot
from esper.leyline import TwinReport

log = logging.getLogger("esper")


def insure(
    grow: Callable[[], Grown],
    train_twin: Callable[[nn.Module, Any], Grown],
    model_and_optimizer: tuple[nn.Module, Any],
    loaders: tuple[Any, ...],
) -> Grown:
    """Grow, then train a twin of the model as it was with `train_twin(model, optimizer)`.

    Both see the same batches in the same order, and the same noise. What is better on validation is
    what the model is afterwards; a draw goes to what grew. A run that was interrupted has no twin.
    """
    # Copied together: an optimiser that was given is one of the twin's parameters then.
    twin_model, twin_optimizer = copy.deepcopy(model_and_optimizer)
    beginning = randomness(loaders)
    grown = grow()
    if grown.outcome.ended == "interrupted":
        log.warning("the run was interrupted before its twin was trained: it is not insured")
        return grown
    end = randomness(loaders)
    restore_randomness(loaders, beginning)
    twin = train_twin(twin_model, twin_optimizer)
    restore_randomness(loaders, end)
    ours, theirs = grown.outcome, twin.outcome
    kept = "twin" if _score(theirs.val_score) > _score(ours.val_score) else "grown"
    outcome = replace(ours, twin=TwinReport(theirs.val_score, theirs.train_macs, kept))
    if kept == "twin":
        log.warning("growth did not pay: the model without it is better on validation, and kept")
        restore_snapshot(grown.model, None, take_snapshot(twin.model, None))
        about = ("best_step", "val_score", "val_loss", "params", "macs", "seeds")
        outcome = replace(outcome, **{name: getattr(theirs, name) for name in about})
    return replace(grown, outcome=outcome)


def _score(score: float | None) -> float:
    return float("-inf") if score is None else score
