"""What the environments of a round are: hosts of one task, or of members of a family."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import ConfigError, draw_key
from esper.leyline.growth_settings import Budget, GrowthSettings, Incubation
from esper.simic.agent.network import Kind
from esper.simic.training.config import TrainingConfig
from esper.simic.training.space import Space
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.families.base import Family, Member
from esper.tolaria.families.hosts import hosts_of
from esper.tolaria.fused.choice import choose_population
from esper.tolaria.tasks.base import Task


@dataclass(frozen=True)
class ShardSpec:
    """Everything a shard is made from; `envs` are the numbers of its environments in the run, and
    `device` is where their hosts are trained. With a `family` hosts are of its members, not of
    `task`. With `data` that is shared, it can be sent to another process. `controller` is who acts,
    as outcomes name it."""

    config: TrainingConfig
    task: Task
    data: DataSplits
    envs: tuple[int, ...]
    device: str = "cpu"
    family: Family | None = None
    controller: str = "ppo"


@dataclass(frozen=True)
class EnvSpec:
    """Environments that one `GrowthEnv` plays; `rows` are their places in the shard."""

    rows: slice
    recipe: HostRecipe
    keys: tuple[int, ...]
    rules: GrowthSettings


def space_of(task: Task, family: Family | None = None, *, kind: Kind = "flat") -> Space:
    """Slots and blueprints of a run's environments, as a network of that kind sees them. Raises
    ConfigError for hosts that it cannot all see."""
    if family is None:
        return Space.of(len(task.slots), default_catalogue().names, kind)
    least, most = family.blocks
    if kind == "flat" and least != most:
        raise ConfigError(
            f"the hosts of family {family.name!r} have {least} to {most} slots, which only a "
            'network over sets takes: give network.kind = "set"'
        )
    return Space.of(most, family.catalogue.names, kind)


def recipe_of(
    config: TrainingConfig, task: Task, data: DataSplits, family: Family | None = None
) -> HostRecipe:
    """How the hosts of a run are made and trained; of a family, those of its first member."""
    if family is not None:
        return family.members("train")[0].recipe(data, config.precision)
    return replace(task, precision=config.precision).recipe(data)


def most_steps(
    config: TrainingConfig, task: Task, data: DataSplits, family: Family | None = None
) -> int:
    """The most decisions of an episode."""
    if family is not None:
        return family.most_steps(data)
    return config.steps or task.steps


def side_by_side(config: TrainingConfig, family: Family | None = None) -> int:
    """How many hosts of one architecture there are in a round."""
    return config.envs if family is None else config.group


def episode_key(run_key: int, round_: int, group: int) -> int:
    """The key of the episodes of one group; `esper grow` with it makes the same host, of a run
    without a family."""
    return draw_key(run_key, "episode", round_, group)


def groups_of(spec: ShardSpec) -> np.ndarray:
    """The groups int[E] of a shard's environments, numbered in the run."""
    return np.array(spec.envs) // spec.config.group


class RoundSpecs:
    """The scenes of every round of a shard; `groups` int[E] are those of its environments."""

    def __init__(self, spec: ShardSpec) -> None:
        self.spec, self.groups = spec, groups_of(spec)
        config = spec.config
        self.recipe = recipe_of(config, spec.task, spec.data, spec.family)
        self.population = choose_population(
            self.recipe, side_by_side(config, spec.family), config.population, spec.device
        )

    def of_round(self, round_: int) -> Iterator[EnvSpec]:
        spec = self.spec
        keys = [episode_key(spec.config.key, round_, group) for group in self.groups.tolist()]
        if spec.family is None:
            rules = self._rules(GrowthSettings(spec.config.steps or spec.task.steps))
            rules = replace(rules, schedule=spec.task.schedule, population=self.population)
            yield EnvSpec(slice(0, len(keys)), self.recipe, tuple(keys), rules)
            return
        firsts = np.flatnonzero(np.diff(self.groups, prepend=-1)).tolist()
        for first, end in zip(firsts, [*firsts[1:], len(keys)], strict=True):
            member, key = spec.family.episode("train", keys[first])
            yield self._of_member(member, key, slice(first, end))

    def _of_member(self, member: Member, key: int, rows: slice) -> EnvSpec:
        spec, count = self.spec, rows.stop - rows.start
        hosts = hosts_of(member, spec.data, data_root(), spec.config.precision)
        recipe = replace(member.recipe(spec.data, spec.config.precision), weights=hosts.weights)
        rules = self._rules(member.rules(spec.data, hosts.cost, self.population))
        return EnvSpec(rows, recipe, (key,) * count, rules)

    def _rules(self, rules: GrowthSettings) -> GrowthSettings:
        """With the caps of the run; of hosts that start fresh, also with its incubation."""
        config = self.spec.config
        rules = replace(
            rules,
            budget=Budget(params=config.max_params, macs=config.max_macs),
            max_seeds=config.max_seeds,
        )
        if rules.start == "trained":
            return rules
        incubation = cast(Incubation, config.incubation)
        return replace(rules, incubation=incubation, on_panic="terminate", keep_best=False)
