"""What the hosts of a member are made of, found out once and kept beside the data sets: the weights
of trained ones, what training them cost, and how they fare if nothing grows."""

import fcntl
import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.growth import read_tree, write_tree
from esper.leyline import ConfigError
from esper.tamiyo import StaticController
from esper.tolaria.choice import PopulationKind
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.families.base import Member
from esper.tolaria.fused import why_not_fused
from esper.tolaria.recipe import HostRecipe, Precision, new_network
from esper.tolaria.trial import TrialRules, host_rules, make_env, play, train

log = logging.getLogger("esper")

VERSION = 1
FOLDER = "families"  # in the data folder


@dataclass(frozen=True)
class MemberHosts:
    """The hosts of one member, by key.

    weights  of trained ones; None if they start fresh
    cost     multiply-adds of training one of them; None if they start fresh
    twins    validation score after each step of an episode in which nothing grows, from step 0 on
    """

    weights: Mapping[int, Mapping[str, Tensor]] | None
    cost: int | None
    twins: Mapping[int, np.ndarray]


def hosts_of(
    member: Member, data: DataSplits, root: Path, precision: Precision = "fp32"
) -> MemberHosts:
    """From `root`, or trained now, all of the member side by side, and put there.

    Raises ConfigError if the folder cannot be written.
    """
    folder = root / FOLDER / member.family.task.name / _digest(member, data, precision)
    try:
        with _alone(folder):
            found = _read(folder)
            if found is None:
                found = _make(member, data, precision)
                write_tree(folder, _tree(found), VERSION)
            return found
    except OSError as error:
        raise ConfigError(
            f"cannot keep trained hosts in {folder.parent}: {error.strerror}; set ESPER_DATA to a "
            "folder that can be written"
        ) from error


# --- making them ---------------------------------------------------------------------------------


def _make(member: Member, data: DataSplits, precision: Precision) -> MemberHosts:
    recipe, keys = member.recipe(data, precision), member.keys
    template = new_network(recipe, keys[0], torch.device("cpu"))
    # Not the run's choice: what is kept must not depend on who asked for it.
    population: PopulationKind = "fused" if why_not_fused(recipe, template) is None else "looped"
    weights, cost = None, None
    if member.start == "trained":
        task = member.task
        rules = host_rules(task.steps, task.schedule, population)
        trained = train(recipe, keys, rules, StaticController(), task=task.name, attribute=False)
        if any(each.outcome.ended == "interrupted" for each in trained):
            raise KeyboardInterrupt
        weights = {each.outcome.key: each.model.state_dict() for each in trained}
        cost = trained[0].outcome.train_macs
    rules = replace(member.rules(data, cost, population), counterfactuals=False)
    return MemberHosts(weights, cost, _twins(replace(recipe, weights=weights), keys, rules))


def _twins(recipe: HostRecipe, keys: tuple[int, ...], rules: TrialRules) -> dict[int, np.ndarray]:
    env = make_env(recipe, keys, rules)
    scores = []

    def note() -> bool:
        assert env.situation is not None
        scores.append(env.situation.signals.val_score.copy())
        return True

    if not play(env, StaticController(), after_epoch=note):
        raise KeyboardInterrupt
    return dict(zip(keys, np.stack(scores, axis=1), strict=True))


# --- keeping them --------------------------------------------------------------------------------


_NAMES = ("family", "split", "bottleneck")  # what is known of a member and changes nothing


def _digest(member: Member, data: DataSplits, precision: Precision) -> str:
    """A name for everything that the hosts depend on."""
    task, traits = member.task, replace(member, number=0)
    told = [
        VERSION,
        torch.__version__,
        precision,
        [getattr(traits, each.name) for each in fields(traits) if each.name not in _NAMES],
        str(task.build()),
        (task.name, task.steps, task.batch, task.batches_per_epoch, task.learning_rate),
        (task.weight_decay, task.max_grad_norm, task.schedule, member.rules(data, 1)),
        _fingerprint(data),
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:24]


@lru_cache(maxsize=4)
def _fingerprint(data: DataSplits) -> str:
    digest = hashlib.sha256()
    for name in ("train_x", "train_y", "val_x", "val_y"):
        digest.update(getattr(data, name).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _tree(hosts: MemberHosts) -> dict[str, Any]:
    weights = None
    if hosts.weights is not None:
        weights = {key: dict(state) for key, state in hosts.weights.items()}
    twins = {key: torch.from_numpy(scores) for key, scores in hosts.twins.items()}
    return {"weights": weights, "cost": hosts.cost, "twins": twins}


def _read(folder: Path) -> MemberHosts | None:
    """None if nothing is there, or nothing that can be used."""
    if not folder.exists():
        return None
    try:
        tree = read_tree(folder, VERSION)
        twins = {key: scores.numpy() for key, scores in tree["twins"].items()}
        return MemberHosts(tree["weights"], tree["cost"], twins)
    except (ConfigError, KeyError, AttributeError) as error:
        log.warning("hosts are trained again: %s", error)
        return None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of several processes that need the same hosts, one makes them and the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"lock-{folder.name[0]}").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
