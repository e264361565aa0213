"""The record of an evaluation in its folder, from which a stopped evaluation goes on.

    settings.json   the settings of the evaluation
    runs.jsonl      a line for every trained network, tuning included, and for every choice
    networks/       the networks that are to be tested, in sealed folders
    decisions.jsonl histories of learned policies on the keys that are to be tested

Lines are only appended, when a network is complete. Networks that were in training when the process
was killed are trained anew; all others are read.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from esper.growth.snapshot import (
    HostSnapshot,
    read_tree,
    restore_snapshot,
    snapshot_from_tree,
    snapshot_tree,
    write_tree,
)
from esper.leyline import ConfigError, EpisodeOutcome, History, SeedStateReport
from esper.leyline.events import GovernorSnapshot
from esper.leyline.files import MAX_JSON, parse_json, read_bytes
from esper.proof.arms import Plan, Run, WorkResults
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.recipe import export_network, new_network

SETTINGS, RUNS, NETWORKS = "settings.json", "runs.jsonl", "networks"
DECISIONS = "decisions.jsonl"
FORMAT_VERSION = 1

OnRun = Callable[[str, Run], None]


class Record:
    """The runs of an evaluation by label and key. A label stands for one way of training.

    Without a folder nothing is written. A record that is already in the folder is continued; raises
    ConfigError if it is damaged or has other `settings`. `on_run` is called with the label and the
    run of every network that is added.
    """

    def __init__(
        self,
        folder: Path | None,
        settings: Mapping[str, Any],
        on_run: OnRun = lambda label, run: None,
    ) -> None:
        self.folder, self.on_run = folder, on_run
        self.keeps_events = folder is not None
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
            unfinished = folder / f"{SETTINGS}.unfinished"
            try:
                _write(unfinished, _line(settings))
            except ConfigError:
                unfinished.unlink(missing_ok=True)
                raise
            os.replace(unfinished, folder / SETTINGS)

    def choose_once(self, name: str, choose: Callable[[], Any]) -> Any:
        """A choice, as a plain value, that stays the same when the evaluation is resumed."""
        if name not in self.choices:
            self.choices[name] = choose()
            self._append([{"choice": name, "value": self.choices[name]}])
        return self.choices[name]

    def read(
        self, label: str, data: DataSplits, plans: Mapping[int, Plan]
    ) -> dict[int, Run] | None:
        """The runs under a label by key; None if that of any key is missing: rounding may depend on
        which networks are trained together."""
        if any((label, key) not in self.rows for key in plans):
            return None
        return {key: self._read(label, plan, data, key) for key, plan in plans.items()}

    def _read(self, label: str, plan: Plan, data: DataSplits, key: int) -> Run:
        row = self.rows[label, key]
        model = None
        if row["networks"] is not None:
            assert self.folder is not None
            parent = self.folder / NETWORKS
            tree = read_tree(parent / row["networks"], FORMAT_VERSION, within=parent)
            recipe = plan.task.recipe(data)
            network = new_network(recipe, key, torch.device("cpu"))
            restore_snapshot(network, None, snapshot_from_tree(tree[str(key)]))
            model = export_network(recipe, network)
        topology = tuple((slot, blueprint) for slot, blueprint in row["topology"])
        return Run(_outcome(row["outcome"]), topology, row["cpu_seconds"], model)

    def add(self, label: str, keys: Sequence[int], results: WorkResults) -> None:
        """Append the runs of `keys`, with their networks and histories, if any."""
        if self.folder is not None and not (self.folder / SETTINGS).is_file():
            raise ConfigError(f"{self.folder} was deleted during the evaluation; start it again")
        lines = [
            _line({"label": label, "key": key, kind: row})
            for key in keys
            for kind, row in _history_rows(results[key].history)
        ]
        if self.folder is not None and lines:
            _write(self.folder / DECISIONS, b"".join(lines))
        snapshots = {key: results[key].snapshot for key in keys}
        name = self._add_networks({key: each for key, each in snapshots.items() if each})
        rows = [
            {
                "label": label,
                "outcome": asdict(run.outcome),
                "topology": run.topology,
                "cpu_seconds": run.cpu_seconds,
                "networks": name,
            }
            for run in (results[key].run for key in keys)
        ]
        self._append(rows)
        self.rows |= {(label, key): row for key, row in zip(keys, rows, strict=True)}
        for key in keys:
            self.on_run(label, results[key].run)

    def _add_networks(self, snapshots: Mapping[int, HostSnapshot]) -> str | None:
        """The name of the folder with the networks, None if there is none. It is the next one that
        no line names: what a killed process wrote without a line is replaced."""
        if self.folder is None or not snapshots:
            return None
        name = f"{len({row['networks'] for row in self.rows.values()} - {None}):06d}"
        tree = {str(key): snapshot_tree(each) for key, each in snapshots.items()}
        write_tree(self.folder / NETWORKS / name, tree, FORMAT_VERSION)
        return name

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.folder is not None:
            _write(self.folder / RUNS, b"".join(map(_line, rows)))


def _history_rows(history: History | None) -> Iterator[tuple[str, dict[str, Any]]]:
    if history is None:
        return
    yield from (("metrics", row) for row in history.rows)
    yield from (
        ("event", event.row())
        for event in history.events
        if not isinstance(event, GovernorSnapshot)
    )
    yield from (("outcome", asdict(outcome)) for outcome in history.outcomes)


def _outcome(row: Mapping[str, Any]) -> EpisodeOutcome:
    seeds = tuple(SeedStateReport(**seed) for seed in row["seeds"])
    return EpisodeOutcome(**{**row, "seeds": seeds})


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    """Append, and wait until the disk has it."""
    try:
        with path.open("ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"{path} could not be written: {error.strerror}; free some space and continue with "
            "--resume"
        ) from error


def _refuse_other_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    asked = json.loads(_line(settings))
    try:
        kept = parse_json(read_bytes(folder / SETTINGS, MAX_JSON))
        differing = [name for name in {**kept, **asked} if kept.get(name) != asked.get(name)]
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{folder / SETTINGS} is damaged: {error}") from error
    if differing:
        name = differing[0]
        raise ConfigError(
            f"the evaluation in {folder} has {name} {kept.get(name)!r}, not {asked.get(name)!r}; "
            "resume it with the same settings, or choose another folder"
        )


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that was cut off is removed from the file."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    try:
        rows = [parse_json(line) for line in content[:whole].splitlines()]
        if all({"choice", "value"} <= row.keys() or "outcome" in row for row in rows):
            return rows
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {error}; start again with --overwrite") from error
    raise ConfigError(f"{path} is damaged: it holds other rows; start again with --overwrite")
