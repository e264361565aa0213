"""What the environments of each round are: hosts of one task, or of the members of a family, and
the space of observations and actions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import BLEND_NAMES, NUM_OPS, ActionMasks, ConfigError, draw_key
from esper.leyline.growth_settings import GrowthSettings
from esper.simic.agent.network import Kind
from esper.simic.control.normalization import RunningMeanStd, Unscaled
from esper.simic.rewards.modes import MODES
from esper.simic.training.config import TrainingConfig
from esper.tamiyo.policy.features import (
    FeatureExtractionContext,
    feature_names,
    feature_size,
    signals_to_features,
)
from esper.tamiyo.policy.set_features import (
    SET_COLUMNS,
    SetLayout,
    pad_masks,
    set_feature_names,
    set_features,
)
from esper.tamiyo.situation import Situation
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.families.base import Family
from esper.tolaria.families.hosts import hosts_of
from esper.tolaria.fused.choice import choose_population
from esper.tolaria.tasks import Task


@dataclass(frozen=True)
class Space:
    """The width of observations, the number of slots in them, and the names of the blueprints.

    A flat network knows slots and blueprints by their order. A network over sets takes any number
    of them: observations of hosts with fewer slots are padded with absent ones.
    """

    observation_dim: int
    num_slots: int
    blueprints: tuple[str, ...]
    kind: Kind = "flat"

    @staticmethod
    def of(num_slots: int, blueprints: Sequence[str], kind: Kind = "flat") -> "Space":
        count = len(blueprints)
        flat = kind == "flat"
        size = feature_size(num_slots, count) if flat else SetLayout(num_slots, count).size
        return Space(size, num_slots, tuple(blueprints), kind)

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "Space":
        """The inverse of `tree`; raises ConfigError, KeyError, TypeError or ValueError."""
        kind = tree.get("kind", "flat")
        if kind not in ("flat", "set"):
            raise ConfigError(f"the kind of network must be flat or set, got {kind!r}")
        if kind == "set" and tree.get("columns") != SET_COLUMNS:
            raise ConfigError("the observations have other columns than this version of Esper uses")
        names = tuple(str(name) for name in tree["blueprints"])
        size, slots = int(tree["observation_dim"]), int(tree["num_slots"])
        return Space(size, slots, names, kind)

    def tree(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "observation_dim": self.observation_dim,
            "num_slots": self.num_slots,
            "blueprints": list(self.blueprints),
            "kind": self.kind,
            **({"columns": SET_COLUMNS} if self.kind == "set" else {}),
        }

    @property
    def choices(self) -> tuple[int, int, int, int]:
        """How many choices each head has, in the order of HEAD_NAMES."""
        return self.num_slots, len(self.blueprints), len(BLEND_NAMES), NUM_OPS

    def observe(self, situation: Situation) -> tuple[np.ndarray, ActionMasks]:
        """Raw observations float32 [E, observation_dim], and the masks that go with them."""
        if self.kind == "flat":
            return signals_to_features(FeatureExtractionContext(situation)), situation.masks
        observations = set_features(situation, self.num_slots)
        return observations, pad_masks(situation.masks, self.num_slots)

    def names(self, slots: Sequence[str]) -> list[tuple[str, str]]:
        """(block, entry) of each column of the observation of a host with these slots."""
        names = feature_names if self.kind == "flat" else set_feature_names
        return names(slots, self.blueprints)

    def new_normalizer(self) -> RunningMeanStd:
        """A new normaliser of observations; those over sets need no scaling."""
        return RunningMeanStd((self.observation_dim,)) if self.kind == "flat" else Unscaled()


@dataclass(frozen=True)
class ShardSpec:
    """Everything a shard is made from; with shared `data` it can be sent to another process.

    envs        the numbers of its environments in the run
    device      where their hosts are trained
    family      hosts are of its members, not of `task`
    controller  the name of the controller in outcomes
    """

    config: TrainingConfig
    task: Task
    data: DataSplits
    envs: tuple[int, ...]
    device: str = "cpu"
    family: Family | None = None
    controller: str = "ppo"


@dataclass(frozen=True)
class EnvSpec:
    """The environments of one `GrowthEnv`; `rows` are their positions in the shard."""

    rows: slice
    recipe: HostRecipe
    keys: tuple[int, ...]
    rules: GrowthSettings


def space_of(task: Task, family: Family | None = None, *, kind: Kind = "flat") -> Space:
    """Slots and blueprints of a run's environments, for a network of that kind. Raises ConfigError
    if the hosts of the family differ in slots and the network is flat."""
    if family is None:
        return Space.of(len(task.slots), default_catalogue().names, kind)
    least, most = family.blocks
    if kind == "flat" and least != most:
        raise ConfigError(
            f"the hosts of family {family.name!r} have {least} to {most} slots, and a flat network "
            'takes one number of slots; give network.kind = "set"'
        )
    return Space.of(most, family.catalogue.names, kind)


def recipe_of(
    config: TrainingConfig, task: Task, data: DataSplits, family: Family | None = None
) -> HostRecipe:
    """How the hosts of a run are made and trained; with a family, the hosts of its first member."""
    precision = config.growth.precision or "fp32"
    if family is not None:
        return family.members("train")[0].recipe(data, precision)
    return replace(task, precision=precision).recipe(data)


def most_steps(
    config: TrainingConfig, task: Task, data: DataSplits, family: Family | None = None
) -> int:
    """The most decisions of an episode."""
    if family is not None:
        return family.most_steps(data)
    return config.growth.steps or task.steps


def env_batch_size(config: TrainingConfig, family: Family | None = None) -> int:
    """How many hosts of a round have the same architecture and are trained together."""
    return config.envs if family is None else config.group


def episode_key(run_key: int, round_: int, group: int) -> int:
    """The key of the episodes of one group. In a run without a family, `esper grow` with this key
    makes the same host."""
    return draw_key(run_key, "episode", round_, group)


def host_numbers(
    config: TrainingConfig, family: Family | None, round_: int, groups: np.ndarray
) -> np.ndarray:
    """int64 [E]: of the host of each group, the member of the family, or without one its key."""
    found = {}
    for group in set(groups.tolist()):
        key = episode_key(config.key, round_, group)
        found[group] = key if family is None else family.episode("train", key)[0].number
    return np.array([found[group] for group in groups.tolist()], dtype=np.int64)


def groups_of(spec: ShardSpec) -> np.ndarray:
    """The groups int[E] of a shard's environments, numbered in the run."""
    return np.array(spec.envs) // spec.config.group


class RoundSpecs:
    """The `EnvSpec`s of every round of a shard; `groups` int[E] are those of its environments."""

    def __init__(self, shard_spec: ShardSpec) -> None:
        self.shard_spec, self.groups = shard_spec, groups_of(shard_spec)
        config, family = shard_spec.config, shard_spec.family
        self.recipe = recipe_of(config, shard_spec.task, shard_spec.data, family)
        self.population = choose_population(
            self.recipe, env_batch_size(config, family), config.growth.population, shard_spec.device
        )

    def of_round(self, round_: int) -> Iterator[EnvSpec]:
        shard = self.shard_spec
        keys = [episode_key(shard.config.key, round_, group) for group in self.groups.tolist()]
        if shard.family is None:
            steps = shard.config.growth.steps or shard.task.steps
            rules = self._rules(GrowthSettings(steps, schedule=shard.task.schedule))
            yield EnvSpec(slice(0, len(keys)), self.recipe, tuple(keys), rules)
            return
        precision = shard.config.growth.precision or "fp32"
        firsts = np.flatnonzero(np.diff(self.groups, prepend=-1)).tolist()
        for first, end in zip(firsts, [*firsts[1:], len(keys)], strict=True):
            member, key = shard.family.episode("train", keys[first])
            hosts = hosts_of(member, shard.data, data_root(), precision)
            recipe = replace(member.recipe(shard.data, precision), weights=hosts.weights)
            rules = self._rules(member.rules(shard.data, hosts.cost, self.population))
            yield EnvSpec(slice(first, end), recipe, (key,) * (end - first), rules)

    def _rules(self, rules: GrowthSettings) -> GrowthSettings:
        """The settings of the run, with those that `rules`, of the task or a member, decide on. An
        episode of a fresh host ends with a rollback, and with its last epoch, not its best."""
        mode = self.shard_spec.config.reward_mode
        rules = replace(
            self.shard_spec.config.growth,
            steps=rules.steps,
            start=rules.start,
            schedule=rules.schedule,
            max_train_macs=rules.max_train_macs,
            extra=rules.extra,
            population=self.population,
            counterfactuals="all" if MODES[mode].reads_kept else "trial",
        )
        return rules if rules.trained else replace(rules, on_panic="terminate", keep_best=False)
