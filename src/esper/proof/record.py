"""What an evaluation has found out so far, on disk as soon as it is known.

    settings.json   what was asked for
    runs.jsonl      a line for every network that was trained, tuning included, and every choice
    networks/       the networks that are to be tested, in sealed folders
    decisions.jsonl what happened in the episodes of learned policies that are to be tested

Lines are only appended. What was under way when a process was killed is not there, and is done
again when the evaluation goes on; the rest is read.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper.growth import read_tree, restore_snapshot, snapshot_from_tree, snapshot_tree, write_tree
from esper.leyline import ConfigError, EpisodeOutcome, History, SeedStateReport
from esper.leyline.events import GovernorSnapshot
from esper.proof.arms import Plan, train_each
from esper.tolaria import DataSplits, Topology, Trained, export_network, new_network

SETTINGS, RUNS, NETWORKS = "settings.json", "runs.jsonl", "networks"
DECISIONS = "decisions.jsonl"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Run:
    """A network that was trained, now or before the evaluation went on. `model` is None where
    nobody is going to test it."""

    outcome: EpisodeOutcome
    topology: Topology
    cpu_seconds: float
    model: nn.Module | None


Tell = Callable[[str, Run], None]


class Record:
    """The runs of an evaluation by label and key. A label stands for one way of training.

    Without a folder nothing is kept. In a folder that has a record it goes on with that, and
    raises ConfigError if it is damaged or of other `settings`.
    """

    def __init__(
        self,
        folder: Path | None,
        settings: Mapping[str, Any],
        tell: Tell = lambda label, run: None,
    ) -> None:
        self.folder, self.tell = folder, tell
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}
        self.choices: dict[str, Any] = {}
        if folder is None:
            return
        if (folder / SETTINGS).is_file():
            _refuse_other_settings(folder, settings)
            for row in _whole_rows(folder / RUNS):
                if "choice" in row:
                    self.choices[row["choice"]] = row["value"]
                else:
                    self.rows[row["label"], row["outcome"]["key"]] = row
        else:
            _write(folder / f"{SETTINGS}.unfinished", _line(settings))
            os.replace(folder / f"{SETTINGS}.unfinished", folder / SETTINGS)

    def once(self, name: str, choose: Callable[[], Any]) -> Any:
        """A choice that may not be made again, as a plain value."""
        if name not in self.choices:
            self.choices[name] = choose()
            self._append([{"choice": name, "value": self.choices[name]}])
        return self.choices[name]

    def train(
        self,
        label: str,
        plans: Sequence[Plan],
        data: DataSplits,
        keys: Sequence[int],
        *,
        attribute: bool = False,
        keep: bool = False,
    ) -> list[Run]:
        """Each key by its own plan, unless all of them are there: rounding may depend on which are
        trained side by side. With `keep` the networks are kept."""
        if all((label, key) in self.rows for key in keys):
            return [
                self._read(label, plan, data, key) for plan, key in zip(plans, keys, strict=True)
            ]
        heard: dict[int, History] | None = {} if keep and self.folder is not None else None
        trained = train_each(plans, data, keys, attribute=attribute, heard=heard)
        self._tell_decisions(label, heard or {})
        name = self._keep(trained) if keep and self.folder is not None else None
        rows = [_row(label, each, name) for each in trained]
        self._append(rows)
        self.rows |= {(label, row["outcome"]["key"]): row for row in rows}
        runs = [
            Run(each.outcome, each.topology, each.cpu_seconds, each.model if keep else None)
            for each in trained
        ]
        for run in runs:
            self.tell(label, run)
        return runs

    def _tell_decisions(self, label: str, heard: Mapping[int, History]) -> None:
        lines = [
            _line({"label": label, "key": key, kind: row})
            for key, told in heard.items()
            for kind, row in _told(told)
        ]
        if self.folder is not None and lines:
            _write(self.folder / DECISIONS, b"".join(lines))

    def _keep(self, trained: Sequence[Trained]) -> str:
        """The name of the folder with their networks. It is the next one that no line names, so
        that what a process left that was killed before it wrote its lines is replaced."""
        assert self.folder is not None
        name = f"{len({row['networks'] for row in self.rows.values()} - {None}):06d}"
        tree = {str(each.outcome.key): snapshot_tree(each.snapshot) for each in trained}
        write_tree(self.folder / NETWORKS / name, tree, FORMAT_VERSION)
        return name

    def _read(self, label: str, plan: Plan, data: DataSplits, key: int) -> Run:
        row = self.rows[label, key]
        model = None
        if row["networks"] is not None:
            assert self.folder is not None
            home = self.folder / NETWORKS
            tree = read_tree(home / row["networks"], FORMAT_VERSION, within=home)
            recipe = plan.task.recipe(data)
            network = new_network(recipe, key, torch.device("cpu"))
            restore_snapshot(network, None, snapshot_from_tree(tree[str(key)]))
            model = export_network(recipe, network)
        topology = tuple((slot, blueprint) for slot, blueprint in row["topology"])
        return Run(_outcome(row["outcome"]), topology, row["cpu_seconds"], model)

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.folder is not None:
            _write(self.folder / RUNS, b"".join(map(_line, rows)))


def _told(told: History) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from (("metrics", row) for row in told.rows)
    yield from (
        ("event", event.row()) for event in told.events if not isinstance(event, GovernorSnapshot)
    )
    yield from (("outcome", asdict(outcome)) for outcome in told.outcomes)


def _row(label: str, trained: Trained, networks: str | None) -> dict[str, Any]:
    return {
        "label": label,
        "outcome": asdict(trained.outcome),
        "topology": trained.topology,
        "cpu_seconds": trained.cpu_seconds,
        "networks": networks,
    }


def _outcome(row: Mapping[str, Any]) -> EpisodeOutcome:
    seeds = tuple(SeedStateReport(**seed) for seed in row["seeds"])
    return EpisodeOutcome(**{**row, "seeds": seeds})


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    """Append, and wait until the disk has it."""
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _refuse_other_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    asked = json.loads(_line(settings))
    try:
        kept = json.loads((folder / SETTINGS).read_bytes())
        differing = [name for name in {**kept, **asked} if kept.get(name) != asked.get(name)]
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{folder / SETTINGS} is damaged: {error}") from error
    if differing:
        name = differing[0]
        raise ConfigError(
            f"the evaluation in {folder} has {name} {kept.get(name)!r}, not {asked.get(name)!r}; "
            "go on with the same settings, or choose another folder"
        )


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; what was cut off when it was written is removed from it."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    try:
        rows = [json.loads(line) for line in content[:whole].splitlines()]
        if all({"choice", "value"} <= row.keys() or "outcome" in row for row in rows):
            return rows
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {error}; begin again with --overwrite") from error
    raise ConfigError(f"{path} is damaged: it holds other rows; begin again with --overwrite")
