"""A family: randomly drawn hosts of one task that differ in shape and training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count, product
from typing import Literal, get_args

import numpy as np
import torch
from torch import nn

from esper.growth.blueprints.catalogue import BlueprintCatalogue, count_params, default_catalogue
from esper.leyline import ConfigError, draw_key
from esper.leyline.growth_settings import GrowthSettings
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.garden import TRAINING_COST
from esper.tolaria.engine.recipe import HostRecipe, Precision
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.tasks import Task, block_slots

Shape = tuple[int, ...]
Range = tuple[int, int]  # least and most
Split = Literal["train", "validation", "test"]
Start = Literal["fresh", "trained"]

# A hash of the shape chooses one of these.
_FIFTHS: tuple[Split, ...] = ("train", "train", "train", "validation", "test")
SIZES: Mapping[Split, int] = {"train": 128, "validation": 24, "test": 24}
# Draws per member before giving up: small ranges may have fewer members than `sizes` says.
MOST_DRAWS = 200


@dataclass(frozen=True, eq=False)
class Family:
    """Hosts of `task`. Each member draws one value of every range and list.

    build       makes a host of given widths and kernel
    widths      range of each block's width
    blocks      range of the number of blocks, which is the number of slots
    params      range of the number of parameters
    kernels     kernel sizes of the convolutions
    rates       factors of the task's learning rate
    shares      shares of the training data
    starts      'fresh' or 'trained', for hosts that are trained before the episode
    extras      for trained hosts: the budget as a share of what their training cost
    narrow      if given, one random block of each host has its width from here instead
    blueprints  names of those that may be planted; None for all that are installed
    held_out    shapes that are in the test split only
    sizes       number of different members of each split
    hosts       hosts of each member: initialisations and orders of the data
    """

    name: str
    description: str
    task: Task
    build: Callable[[Shape, int], nn.Module]
    widths: tuple[Range, ...]
    blocks: Range = (3, 3)
    params: Range = (0, 1_000_000)
    kernels: tuple[int, ...] = (3,)
    rates: tuple[float, ...] = (1.0,)
    shares: tuple[float, ...] = (1.0,)
    starts: tuple[Start, ...] = ("trained",)
    extras: tuple[float, ...] = (0.3,)
    narrow: tuple[Range, ...] | None = None
    blueprints: tuple[str, ...] | None = None
    held_out: tuple[Shape, ...] = ()
    sizes: Mapping[Split, int] = field(default_factory=lambda: SIZES)
    hosts: int = 4

    @property
    def slots(self) -> int:
        """The largest number of slots of a member."""
        return self.blocks[1]

    @property
    def catalogue(self) -> BlueprintCatalogue:
        installed = default_catalogue()
        if self.blueprints is None:
            return installed
        return BlueprintCatalogue(tuple(installed[installed.index(n)] for n in self.blueprints))

    def split_of(self, shape: Shape) -> Split:
        """The only split that may contain a shape."""
        if shape in self.held_out:
            return "test"
        return _FIFTHS[draw_key(0, f"family/{self.task.name}/shape", *shape) % len(_FIFTHS)]

    def episode(self, split: Split, key: int) -> tuple["Member", int]:
        """The member for a key, and the key of one of its hosts."""
        members = self.members(split)
        member = members[draw_key(key, f"family/{self.name}/member") % len(members)]
        return member, member.keys[draw_key(key, f"family/{self.name}/host") % len(member.keys)]

    def members(self, split: Split) -> tuple["Member", ...]:
        """All members of a split; no shape is in two splits."""
        if split not in get_args(Split):
            raise ConfigError(f"no split {split!r}; choose one of {', '.join(get_args(Split))}")
        return _members(self, split)

    def most_steps(self, data: DataSplits) -> int:
        """The longest episode of any member, in decisions."""
        extras = self.extras if "trained" in self.starts else ()
        fresh = (self.task.steps,) if "fresh" in self.starts else ()
        paid = (_steps(self.task, data, *how) for how in product(self.shares, extras))
        return max([*fresh, *paid])


@dataclass(frozen=True)
class Member:
    """One shape and way of training of a family.

    bottleneck  index of the narrow block; for evaluations only
    keys        of its hosts
    """

    family: Family
    split: Split
    number: int
    widths: Shape
    kernel: int
    rate: float
    share: float
    start: Start
    extra: float | None
    bottleneck: int | None
    keys: tuple[int, ...]

    @property
    def task(self) -> Task:
        base = self.family.task
        return replace(
            base,
            build=partial(self.family.build, self.widths, self.kernel),
            slots=block_slots(len(self.widths)),
            shape=self.widths if base.host_of_widths is not None else (),
            learning_rate=self.rate * base.learning_rate,
        )

    def data(self, data: DataSplits) -> DataSplits:
        """`data` with the member's share of the training examples, evenly spaced."""
        if self.share == 1.0:
            return data
        whole = len(data.train_x)
        kept = max(1, round(self.share * whole))
        rows = torch.from_numpy(np.arange(kept) * whole // kept)
        parts = (data.train_x[rows], data.train_y[rows])
        return DataSplits(*parts, data.val_x, data.val_y, data.test_x, data.test_y)

    def recipe(self, data: DataSplits, precision: Precision = "fp32") -> HostRecipe:
        """How to make its hosts, on its share of `data`; without the weights of trained ones."""
        task = replace(self.task, precision=precision)
        return task.recipe(self.data(data), self.family.catalogue)

    def steps(self, data: DataSplits) -> int:
        """The longest episode, in decisions: that of the host alone, because seeds only make an
        epoch more expensive."""
        task = self.family.task
        return task.steps if self.extra is None else _steps(task, data, self.share, self.extra)

    def rules(
        self, data: DataSplits, cost: int | None, population: PopulationKind = "looped"
    ) -> GrowthSettings:
        """Rules of its episodes; `cost` is the multiply-adds of training its host, if trained."""
        if self.start == "fresh":
            return GrowthSettings(
                self.steps(data), schedule=self.family.task.schedule, population=population
            )
        assert cost is not None
        assert self.extra is not None
        return GrowthSettings(
            self.steps(data),
            "trained",
            population=population,
            max_train_macs=int(self.extra * cost),
            extra=self.extra,
        )


def _steps(task: Task, data: DataSplits, share: float, extra: float) -> int:
    """Epochs of the host alone that a budget of `extra` of its training cost pays for."""
    samples = max(1, round(share * len(data.train_x)))
    if task.batches_per_epoch is not None:
        samples = min(samples, task.batches_per_epoch * task.batch)
    evaluation = len(data.val_x)
    epoch = TRAINING_COST * samples + evaluation
    cost = (task.steps + 1) * epoch
    return max(1, int(extra * cost / epoch))


@cache
def _members(family: Family, split: Split) -> tuple[Member, ...]:
    found: list[Member] = []
    seen = set()
    for attempt in count():
        if len(found) == family.sizes[split] or attempt >= MOST_DRAWS * family.sizes[split]:
            break
        drawn = _drawn(family, split, len(found), attempt)
        if drawn is not None and (traits := replace(drawn, number=0, keys=())) not in seen:
            seen.add(traits)
            found.append(drawn)
    if not found:
        raise ConfigError(
            f"family {family.name!r} has no member for the split {split}; widen its ranges"
        )
    return tuple(found)


def _drawn(family: Family, split: Split, number: int, attempt: int) -> Member | None:
    """None if the drawn shape is in another split or has too few or too many parameters."""
    purpose = f"family/{family.name}/{split}"

    def pick(trait: int, choices: int) -> int:
        return draw_key(0, purpose, attempt, trait) % choices

    def within(trait: int, least_most: Range) -> int:
        least, most = least_most
        return least + pick(trait, most - least + 1)

    blocks = within(0, family.blocks)
    narrow = None if family.narrow is None else pick(1, blocks)
    widths = tuple(
        within(10 + block, family.narrow[block] if family.narrow and block == narrow else own)
        for block, own in enumerate(family.widths[:blocks])
    )
    if family.split_of(widths) != split:
        return None
    kernel = family.kernels[pick(2, len(family.kernels))]
    with torch.device("meta"):
        params = count_params(family.build(widths, kernel))
    if not family.params[0] <= params <= family.params[1]:
        return None
    start = family.starts[pick(3, len(family.starts))]
    extra = family.extras[pick(4, len(family.extras))] if start == "trained" else None
    return Member(
        family,
        split,
        number,
        widths,
        kernel,
        family.rates[pick(5, len(family.rates))],
        family.shares[pick(6, len(family.shares))],
        start,
        extra,
        narrow,
        tuple(draw_key(number, f"{purpose}/host", host) for host in range(family.hosts)),
    )
