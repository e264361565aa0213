"""What trackers were log, read back with their own libraries: points by name, and texts."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("tensorboard", "wandb", "mlflow")
Points = dict[str, dict[int, float]]


@dataclass
class Log:
    points: Points = field(default_factory=lambda: defaultdict(dict))
    events: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)


def read_back(kind: str, folder: Path, name: str) -> Log:
    readers = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}
    return readers[kind](folder, name)


def read_tensorboard(folder: Path, name: str) -> Log:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / name), {"scalars": 0, "tensors": 0}).Reload()
    log = Log()
    for tag in events.Tags()["scalars"]:
        points = events.Scalars(tag)
        assert len({point.step for point in points}) == len(points), "every step once"
        log.points[tag] = {point.step: point.value for point in points}
    texts = {
        tag: [e.tensor_proto.string_val[0].decode() for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    log.events = texts.get("events/text_summary", [])
    for line in texts.get("settings/text_summary", [""])[0].splitlines()[2:]:
        _, key, value, _ = (word.strip() for word in line.split("|"))
        log.config[key] = value
    return log


def read_wandb(folder: Path, name: str) -> Log:
    """Its service may still be writing when a run is finished, so a run is waited for."""
    for _ in range(100):
        found = finished_in_wandb(folder, name)
        if found:
            break
        time.sleep(0.1)
    (log,) = found
    return log


def finished_in_wandb(folder: Path, name: str) -> list[Log]:
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        log, named, ended = Log(), None, False
        for record in wandb_records(file):
            kind = record.WhichOneof("record_type")
            ended |= kind == "exit"
            if kind == "run":
                named = record.run.display_name
                log.config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
            if kind == "history":
                items = {
                    "/".join(i.nested_key) or i.key: json.loads(i.value_json)
                    for i in record.history.item
                }
                if "events/path" in items:
                    table = json.loads((file.parent / "files" / items["events/path"]).read_text())
                    log.events = [text for _, text in table["data"]]
                for key, value in items.items():
                    if not key.startswith(("_", "events/")):
                        log.points[key][items["_step"]] = value
        if named == name and ended:
            found.append(log)
    return found


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: a log of LevelDB behind seven bytes, of protobufs."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            yield record
            part = b""


def read_mlflow(folder: Path, name: str) -> Log:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.absolute() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("esper")
    runs = client.search_runs([experiment.experiment_id])
    (run,) = [run for run in runs if run.info.run_name == name]
    assert run.info.status == "FINISHED"
    log = Log(config=dict(run.data.params))
    for key in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, key)
        log.points[key] = {metric.step: metric.value for metric in history}
        assert len(log.points[key]) == len(history), "every step once"
    artefacts = folder / "artifacts" / run.info.run_id / "artifacts" / "events.txt"
    if artefacts.exists():
        log.events = [line.split("\t")[1] for line in artefacts.read_text().splitlines()]
    return log
