"""`shape`: grow under a cap, read off what was found, and train that anew from the start."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from esper.api.checks import checked
from esper.api.growing import grow
from esper.api.grown import Grown
from esper.api.randomness import randomness, restore_randomness
from esper.growth import GrownModule
from esper.leyline import ConfigError, SeedStateReport
from esper.tolaria import Budget


@dataclass(frozen=True, repr=False)
class Shape:
    """What `shape` gives back: the search, and what it found trained anew.

    grown      the run that searched; its network is a result too
    retrained  the found shape, trained from the model as it was given
    """

    grown: Grown
    retrained: Grown

    @property
    def topology(self) -> dict[str, str]:
        """What was found: a blueprint by module, as `grow` takes it."""
        return self.grown.topology

    @property
    def macs(self) -> int:
        """The whole bill in multiply-adds, the search included."""
        return self.grown.outcome.train_macs + self.retrained.outcome.train_macs

    def export(self) -> nn.Module:
        """The retrained network as a plain module."""
        return self.retrained.export()

    def found(self) -> list[str]:
        """A line for every seed: which layer became how wide, or what stands where."""
        network = self.grown.model
        return [_line(network, seed) for seed in self.grown.outcome.seeds] or ["the host as it was"]

    def __repr__(self) -> str:
        rows = [("grown", self.grown.outcome), ("trained anew", self.retrained.outcome)]
        lines = ["Shape:", *(f"  {line}" for line in self.found())]
        for label, outcome in rows:
            score = "not measured" if outcome.val_score is None else f"{outcome.val_score:.2f}"
            lines.append(
                f"  {label}: validation score {score}, {outcome.params:,} parameters, "
                f"{outcome.train_macs:,} multiply-adds"
            )
        lines.append(f"  in all {self.macs:,} multiply-adds")
        return "\n".join(lines)


def _line(network: GrownModule, seed: SeedStateReport) -> str:
    slot = network.slot(network.slot_config.names.index(seed.module))
    size = f"{seed.params:,} parameters"
    if network.catalogue[slot.blueprint].kind != "bypass" or slot.site.widening is None:
        return f"{seed.module}: {seed.blueprint}, {size}"
    layer, newcomers = slot.site.widening.first, next(slot.parameters())
    return (
        f"{layer.module}: {layer.outputs} channels become {layer.outputs + len(newcomers)}, {size}"
    )


@checked()
def shape(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    *,
    budget: Budget,
    optimizer: Any = None,
    out: str | Path | None = None,
    **settings: Any,
) -> Shape:
    """Find a shape for `model` under a hard cap, and train it from the start.

    Grows the model under `budget`, reads off what was kept, and trains a copy of the model as it
    was given with that from birth, for as many epochs. `settings` are further arguments of `grow`;
    with `out` both runs are recorded below that folder. The data are seen in the same order twice.

    Raises ConfigError as `grow` does.
    """
    if settings.get("start", "fresh") != "fresh":
        raise ConfigError("shape trains from the start; for a trained model, call grow")
    if "topology" in settings:
        raise ConfigError("shape looks for the topology itself; leave topology out")
    loaders = (train_loader, val_loader)
    folders = [None if out is None else Path(out) / name for name in ("grown", "retrained")]
    # Copied together: an optimiser that was given is one of the copy's parameters then.
    again, its_optimizer = copy.deepcopy((model, optimizer))
    beginning = randomness(loaders)
    grown = grow(model, *loaders, budget=budget, optimizer=optimizer, out=folders[0], **settings)
    restore_randomness(loaders, beginning)
    settings.pop("controller", None)
    retrained = grow(
        again,
        *loaders,
        controller="static",
        topology=grown.topology,
        optimizer=its_optimizer,
        out=folders[1],
        **settings,
    )
    return Shape(grown, retrained)
