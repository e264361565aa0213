"""Episodes on members of a family: what a controller makes of hosts that it has never seen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from esper.leyline import History
from esper.leyline.events import SeedGerminated
from esper.tamiyo import Controller, StaticController
from esper.tolaria import DataSplits, Member, PopulationKind, hosts_of, new_network, train


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
    hosts = hosts_of(member, data, root)
    keys = member.keys if keys is None else keys
    task, told = member.task, History()
    recipe = replace(member.recipe(data), weights=hosts.weights)
    rules = member.rules(data, hosts.cost, population)
    if isinstance(controller, StaticController):
        rules = replace(rules, counterfactuals=False)
    found = train(recipe, keys, rules, controller, task=task.name, recorder=told, attribute=False)
    if any(each.outcome.ended == "interrupted" for each in found):
        raise KeyboardInterrupt
    first: dict[int, str] = {}
    for event in told.events:
        if isinstance(event, SeedGerminated):
            first.setdefault(event.env, event.module)
    came: dict[int, float] = {}
    for key in set(keys) if hosts.weights is not None else ():
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
