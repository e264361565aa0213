"""Episodes on members of a family: what a controller makes of hosts that it has never seen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from esper.leyline import EsperError, History, NullRecorder, Recorder
from esper.leyline.events import SeedGerminated
from esper.tamiyo.controllers.static import StaticController
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.recipe import HostRecipe, new_network
from esper.tolaria.engine.run import Trained, train
from esper.tolaria.families.base import Family, Member
from esper.tolaria.families.hosts import hosts_of
from esper.tolaria.fused.choice import PopulationKind


@dataclass(frozen=True)
class FamilyTrial:
    """One episode.

    key          of its host
    host         test score of the host as it came, None if it came untrained
    test, val, params   of what was kept: test and validation score, and size
    macs         all that was spent, trials and evaluations included
    seeds        kept ones, as blueprint@module
    first        module in which the first seed was planted, None if none was
    """

    key: int
    host: float | None
    test: float
    val: float | None
    params: int
    macs: int
    seeds: tuple[str, ...]
    first: str | None


def family_trials(
    member: Member,
    controller: Controller,
    data: DataSplits,
    root: Path,
    *,
    keys: Sequence[int] | None = None,
    population: PopulationKind = "fused",
) -> list[FamilyTrial]:
    """Play a member's hosts, all of them or those of `keys`, which may repeat. Test data are looked
    at when all is over. `root` is the folder of the data, in which trained hosts are kept.

    Ctrl-C raises KeyboardInterrupt: half an episode is no result.
    """
    keys = member.keys if keys is None else keys
    task, told = member.task, History()
    recipe, found = _play(member, controller, data, root, keys, population, told)
    first: dict[int, str] = {}
    for event in told.events:
        if isinstance(event, SeedGerminated):
            first.setdefault(event.env, event.module)
    came: dict[int, float] = {}
    for key in set(keys) if recipe.weights is not None else ():
        host = new_network(recipe, key, torch.device("cpu")).host
        came[key] = task.score_on(host, data.test_x, data.test_y)
    return [
        FamilyTrial(
            key=each.outcome.key,
            host=came.get(each.outcome.key),
            test=task.score_on(each.model, data.test_x, data.test_y),
            val=each.outcome.val_score,
            params=each.outcome.params,
            macs=each.outcome.train_macs,
            seeds=tuple(f"{seed.blueprint}@{seed.module}" for seed in each.outcome.seeds),
            first=first.get(env),
        )
        for env, each in enumerate(found)
    ]


def unseen_score(
    family: Family,
    controller: Controller,
    data: DataSplits,
    root: Path,
    *,
    population: PopulationKind = "fused",
) -> float:
    """Mean validation score of what a controller makes of all validation hosts of a family; test
    data are not looked at. A host that was never measured does not count."""
    scores: list[float] = []
    for member in family.members("validation"):
        told = NullRecorder()
        _, found = _play(member, controller, data, root, member.keys, population, told)
        known = (each.outcome.val_score for each in found)
        scores += [score for score in known if score is not None]
    if not scores:
        raise EsperError(f"no validation host of {family.name} could be trained")
    return float(np.mean(scores))


def _play(
    member: Member,
    controller: Controller,
    data: DataSplits,
    root: Path,
    keys: Sequence[int],
    population: PopulationKind,
    told: Recorder,
) -> tuple[HostRecipe, list[Trained]]:
    hosts = hosts_of(member, data, root)
    recipe = replace(member.recipe(data), weights=hosts.weights)
    rules = member.rules(data, hosts.cost, population)
    if isinstance(controller, StaticController):
        rules = replace(rules, counterfactuals=False)
    name = member.task.name
    found = train(recipe, keys, rules, controller, task=name, recorder=told, attribute=False)
    if any(each.outcome.ended == "interrupted" for each in found):
        raise KeyboardInterrupt
    return recipe, found
