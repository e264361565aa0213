"""Results of a controller on the hosts of a member of a family, on test data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from esper.leyline import History
from esper.leyline.events import SeedGerminated
from esper.proof.arms import play_member
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.recipe import new_network
from esper.tolaria.families.base import Member


@dataclass(frozen=True)
class FamilyResult:
    """One episode.

    key     of its host
    host    test score of the host before the episode, None if it was untrained
    test, val, params   of the final network: test and validation score, and size
    macs    the whole cost, seeds on trial and evaluations included
    seeds   that were kept, as blueprint@module
    first   module in which the first seed was planted, None if none was
    """

    key: int
    host: float | None
    test: float
    val: float | None
    params: int
    macs: int
    seeds: tuple[str, ...]
    first: str | None


def play_family(
    member: Member,
    controller: Controller,
    data: DataSplits,
    root: Path,
    *,
    keys: Sequence[int] | None = None,
) -> list[FamilyResult]:
    """Play episodes on all hosts of a member, or those of `keys`, which may repeat. Test data are
    read after all episodes. `root` is the data folder, in which trained hosts are stored.

    Ctrl-C raises KeyboardInterrupt: half an episode is no result.
    """
    keys = member.keys if keys is None else keys
    task, history = member.task, History()
    recipe, trained = play_member(member, controller, data, root, keys, recorder=history)
    first: dict[int, str] = {}
    for event in history.events:
        if isinstance(event, SeedGerminated):
            first.setdefault(event.env, event.module)
    host_scores: dict[int, float] = {}
    for key in set(keys) if recipe.weights is not None else ():
        host = new_network(recipe, key, torch.device("cpu")).host
        host_scores[key] = task.score_on(host, data.test_x, data.test_y)
    return [
        FamilyResult(
            key=each.outcome.key,
            host=host_scores.get(each.outcome.key),
            test=task.score_on(each.model, data.test_x, data.test_y),
            val=each.outcome.val_score,
            params=each.outcome.params,
            macs=each.outcome.train_macs,
            seeds=tuple(f"{seed.blueprint}@{seed.module}" for seed in each.outcome.seeds),
            first=first.get(env),
        )
        for env, each in enumerate(trained)
    ]
