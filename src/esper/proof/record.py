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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from esper.growth.snapshot import HostSnapshot, restore_snapshot, snapshot_from_tree, snapshot_tree
from esper.growth.storage import read_tree, write_tree
from esper.leyline import ConfigError, EpisodeOutcome, History, SeedStateReport
from esper.leyline.events import GovernorSnapshot
from esper.proof.arms import Plan
from esper.proof.work import Job, Made, Run
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.recipe import export_network, new_network

SETTINGS, RUNS, NETWORKS = "settings.json", "runs.jsonl", "networks"
DECISIONS = "decisions.jsonl"
FORMAT_VERSION = 1


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
        self.listens = folder is not None
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

    def read(self, job: Job, plans: Sequence[Plan]) -> list[Run] | None:
        """The runs of a job, unless one is missing: rounding may depend on which are trained side
        by side."""
        if any((job.label, key) not in self.rows for key in job.keys):
            return None
        return [
            self._read(job.label, plan, job.data, key)
            for plan, key in zip(plans, job.keys, strict=True)
        ]

    def add(self, job: Job, made: Sequence[Made]) -> None:
        """What came of a job; its networks are kept if it says so."""
        runs = {key: run for each in made for key, run in each.runs.items()}
        self._tell_decisions(job.label, {k: v for each in made for k, v in each.heard.items()})
        snapshots = {k: v for each in made for k, v in each.snapshots.items()}
        name = self._keep({key: snapshots[key] for key in job.keys}) if job.keep else None
        rows = [_row(job.label, runs[key], name) for key in job.keys]
        self._append(rows)
        self.rows |= {(job.label, row["outcome"]["key"]): row for row in rows}
        for key in job.keys:
            self.tell(job.label, runs[key])

    def _tell_decisions(self, label: str, heard: Mapping[int, History]) -> None:
        lines = [
            _line({"label": label, "key": key, kind: row})
            for key, told in heard.items()
            for kind, row in _told(told)
        ]
        if self.folder is not None and lines:
            _write(self.folder / DECISIONS, b"".join(lines))

    def _keep(self, snapshots: Mapping[int, HostSnapshot]) -> str | None:
        """The name of the folder with the networks, None if there is none. It is the next one that
        no line names, so that what a process left that was killed before it wrote its lines is
        replaced."""
        if self.folder is None:
            return None
        name = f"{len({row['networks'] for row in self.rows.values()} - {None}):06d}"
        tree = {str(key): snapshot_tree(each) for key, each in snapshots.items()}
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


def _row(label: str, run: Run, networks: str | None) -> dict[str, Any]:
    return {
        "label": label,
        "outcome": asdict(run.outcome),
        "topology": run.topology,
        "cpu_seconds": run.cpu_seconds,
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
