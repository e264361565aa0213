"""Episodes of a controller on the hosts of a family."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from esper.leyline import EsperError, Recorder
from esper.proof.arms import complete
from esper.tamiyo.controllers.static import StaticController
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.engine.run import Trained, train
from esper.tolaria.families.base import Family, Member
from esper.tolaria.families.hosts import hosts_of
from esper.tolaria.fused.choice import PopulationKind


def validation_score(
    family: Family,
    controller: Controller,
    data: DataSplits,
    root: Path,
    *,
    population: PopulationKind = "fused",
) -> float:
    """Mean validation score of a controller on all validation hosts of a family. Hosts that were
    never measured do not count. Test data are not read."""
    scores: list[float] = []
    for member in family.members("validation"):
        _, trained = play_member(member, controller, data, root, member.keys, population)
        known = (each.outcome.val_score for each in trained)
        scores += [score for score in known if score is not None]
    if not scores:
        raise EsperError(f"no validation host of {family.name} could be trained")
    return float(np.mean(scores))


def play_member(
    member: Member,
    controller: Controller,
    data: DataSplits,
    root: Path,
    keys: Sequence[int],
    population: PopulationKind = "fused",
    recorder: Recorder | None = None,
) -> tuple[HostRecipe, list[Trained]]:
    """The recipe of a member's hosts, and an episode on the host of each of `keys`.

    Ctrl-C raises KeyboardInterrupt: half an episode is no result.
    """
    hosts = hosts_of(member, data, root)
    recipe = replace(member.recipe(data), weights=hosts.weights)
    rules = member.rules(data, hosts.cost, population)
    if isinstance(controller, StaticController):
        rules = replace(rules, counterfactuals=False)
    name = member.task.name
    return recipe, complete(
        train(recipe, keys, rules, controller, task=name, recorder=recorder, attribute=False)
    )
