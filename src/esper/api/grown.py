"""The result of `grow`, and how a grown network is saved and loaded."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from esper.api.checks import check_values, checked
from esper.growth.blueprints.catalogue import BlueprintCatalogue, OutputSpec, default_catalogue
from esper.growth.depth import BLOCKS
from esper.growth.export import export
from esper.growth.grown_module import GrownModule, check_not_growing
from esper.growth.snapshot import (
    check_fits,
    read_tree,
    restore_snapshot,
    snapshot_from_tree,
    snapshot_tree,
    take_snapshot,
    write_tree,
)
from esper.leyline import ConfigError, EpisodeOutcome, InjectionSpec
from esper.leyline.depth import DepthPlan
from esper.leyline.events import Event
from esper.leyline.files import MANIFEST, DamagedCheckpointError
from esper.observatory.picture import growth_figure

FORMAT_VERSION = 1


@dataclass(frozen=True, repr=False)
class Grown:
    """The result of `grow`.

    model    the live network: the model with the seeds that are kept, at its best validation score
    history  one row (a flat dict) per epoch
    events   what happened, in order
    outcome  a summary of the run
    twin_cost  what training the model without growth costs, as a share of this run's compute; None
             if it is not known
    """

    model: GrownModule
    history: list[dict[str, Any]]
    events: list[Event]
    outcome: EpisodeOutcome
    example: Any
    twin_cost: float | None = None

    @property
    def topology(self) -> dict[str, str]:
        """The blueprint of each seed that is kept, by module."""
        return {seed.module: seed.blueprint for seed in self.outcome.seeds}

    def export(self) -> nn.Module:
        """A plain module that needs no Esper; its output is checked against the live network's."""
        return export(self.model, self.example)

    @checked()
    def save(self, folder: str | Path) -> Path:
        """Save the live network with its seeds, stages and alphas, for `esper.load`.

        Raises ConfigError if the folder has other files, or cannot be written.
        """
        return save_network(self.model, Path(folder))

    @checked()
    def plot(self, path: str | Path | None = None) -> Any:
        """A matplotlib figure of the growth, also written to `path` if given. Raises ConfigError if
        matplotlib is not installed."""
        o = self.outcome
        figure = growth_figure(self.history, f"{o.task}, {o.controller}, key {o.key}")
        if path is not None:
            try:
                figure.savefig(path)
            except (OSError, ValueError) as error:
                raise ConfigError(f"the picture cannot be written to {path}: {error}") from error
        return figure

    def __repr__(self) -> str:
        o = self.outcome
        score = "not measured" if o.val_score is None else f"{o.val_score:.2f}"
        lines = [
            f"Grown {o.task}: validation score {score}, epoch {o.best_step + 1} of "
            f"{len(self.history)} ({o.ended})",
            f"  {o.params:,} parameters, {o.params / max(o.host_params, 1):.2f} times the host's",
            f"  seeds: {o.germinated} planted, {o.culled} removed, {len(o.seeds)} kept; "
            f"{o.rollbacks} rollbacks",
            *(f"    {seed.blueprint} in {seed.module}{_worth(seed)}" for seed in o.seeds),
        ]
        lines.append(f"  {self._gain()}")
        return "\n".join(lines)

    def _gain(self) -> str:
        twin = self.outcome.twin
        if twin is None:
            cost = self.twin_cost
            share = "" if cost is None else f", for {cost:.0%} of this run's compute"
            return f"no baseline was trained; GrowthSettings(insured=True) trains one{share}"
        score = "no score" if twin.val_score is None else f"{twin.val_score:.2f}"
        gain = "" if twin.gain is None else f"; growth gained {twin.gain:+.2f}"
        return f"insured: the twin without growth has {score}{gain}; kept: {twin.kept}"


def _worth(seed: Any) -> str:
    worth = seed.counterfactual_contribution
    return "" if worth is None else f", {worth:+.2f} points"


def save_network(network: GrownModule, folder: Path) -> Path:
    taken = folder.is_file() or (folder.is_dir() and any(folder.iterdir()))
    if taken and not (folder / MANIFEST).is_file():
        raise ConfigError(f"{folder} has other files in it; choose another folder")
    tree = {
        "sites": [asdict(site) for site in network.sites],
        "output": None if network.output is None else asdict(network.output),
        "host_macs": network.host_macs,
        "blueprints": list(network.catalogue.names),
        "depth": None if network.stacks is None else asdict(network.stacks.plan),
        "network": snapshot_tree(take_snapshot(network, None)),
    }
    try:
        write_tree(folder, tree, FORMAT_VERSION)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from error
    return folder


@checked()
def load(
    folder: str | Path, model: nn.Module, blueprints: BlueprintCatalogue | None = None
) -> GrownModule:
    """Load the network that `grown.save` saved into `model`, built as it was before it grew.

    `blueprints` are those of the run, if it was given any. Raises ConfigError, and changes nothing,
    if the folder is damaged or of another model.
    """
    check_values(model)
    check_not_growing(model)
    tree = read_tree(Path(folder), FORMAT_VERSION)
    depth = tree.get("depth")
    if depth is not None:
        catalogue = BLOCKS
    else:
        catalogue = default_catalogue() if blueprints is None else blueprints
    if list(catalogue.names) != tree.get("blueprints"):
        raise ConfigError(
            f"the network in {folder} was grown with other blueprints; give them as blueprints="
        )
    try:
        sites = [InjectionSpec.from_tree(site) for site in tree["sites"]]
        output = None if tree["output"] is None else OutputSpec(**tree["output"])
        plan = None if depth is None else DepthPlan.from_tree(depth)
        network = GrownModule(model, sites, output, catalogue, tree["host_macs"], plan)
        snapshot = snapshot_from_tree(tree["network"])
    except (KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{folder} holds no grown network: {error}") from error
    check_fits(network, snapshot)
    restore_snapshot(network, None, snapshot)
    return network
