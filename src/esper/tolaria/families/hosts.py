"""The trained hosts of a family's members: trained once, then kept in the data folder."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from esper.growth.snapshot import read_tree, write_tree
from esper.leyline import ConfigError
from esper.leyline.files import wait_for_lock
from esper.tamiyo.controllers.simple import StaticController
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.recipe import Precision, new_network
from esper.tolaria.engine.run import host_settings, play_run
from esper.tolaria.families.base import Member
from esper.tolaria.fused.choice import PopulationKind, why_not_fused

log = logging.getLogger("esper")

VERSION = 2
FOLDER = "families"  # in the data folder


@dataclass(frozen=True)
class MemberHosts:
    """The hosts of one member, by key.

    weights  of trained ones; None if they start fresh
    cost     multiply-adds of training one of them; None if they start fresh
    """

    weights: Mapping[int, Mapping[str, Tensor]] | None
    cost: int | None


def hosts_of(
    member: Member, data: DataSplits, root: Path, precision: Precision = "fp32"
) -> MemberHosts:
    """Read the trained hosts from `root`, or train and store them. Raises ConfigError if the folder
    cannot be written."""
    if member.start == "fresh":
        return MemberHosts(None, None)
    folder = root / FOLDER / member.family.task.name / _digest(member, data, precision)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # One of several processes that need the same hosts trains them; the others wait.
        with (folder.parent / f"lock-{folder.name[0]}").open("ab") as file:
            wait_for_lock(file)
            found = _read(folder)
            if found is None:
                found = _train(member, data, precision)
                write_tree(folder, {"weights": found.weights, "cost": found.cost}, VERSION)
            return found
    except OSError as error:
        raise ConfigError(
            f"cannot write trained hosts to {folder.parent}: {error.strerror}; set ESPER_DATA to a "
            "folder that can be written"
        ) from error


def _train(member: Member, data: DataSplits, precision: Precision) -> MemberHosts:
    recipe, keys, task = member.recipe(data, precision), member.keys, member.task
    template = new_network(recipe, keys[0], torch.device("cpu"))
    # Independent of the run's choice, because all runs share what is stored.
    population: PopulationKind = "fused" if why_not_fused(recipe, template) is None else "looped"
    rules = host_settings(task.steps, task.schedule, population)
    trained = play_run(recipe, keys, rules, StaticController(), task=task.name)
    if any(each.outcome.ended == "interrupted" for each in trained):
        raise KeyboardInterrupt
    weights = {each.outcome.key: each.model.state_dict() for each in trained}
    return MemberHosts(weights, trained[0].outcome.train_macs)


# Fields of a member that do not affect its hosts.
_IRRELEVANT = ("family", "split", "bottleneck", "extra")


def _digest(member: Member, data: DataSplits, precision: Precision) -> str:
    """A hash of everything that the hosts depend on."""
    task, traits = member.task, replace(member, number=0)
    contents = [
        VERSION,
        torch.__version__,
        precision,
        [getattr(traits, each.name) for each in fields(traits) if each.name not in _IRRELEVANT],
        str(task.build()),
        (task.name, task.steps, task.batch, task.batches_per_epoch, task.learning_rate),
        (task.weight_decay, task.max_grad_norm, task.schedule),
        _fingerprint(data),
    ]
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:24]


@lru_cache(maxsize=4)
def _fingerprint(data: DataSplits) -> str:
    digest = hashlib.sha256()
    for name in ("train_x", "train_y", "val_x", "val_y"):
        digest.update(getattr(data, name).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _read(folder: Path) -> MemberHosts | None:
    """None if there is nothing, or if it is damaged."""
    if not folder.exists():
        return None
    try:
        tree = read_tree(folder, VERSION)
        return MemberHosts(tree["weights"], tree["cost"])
    except (ConfigError, KeyError) as error:
        log.warning("stored hosts are damaged, training them again: %s", error)
        return None
