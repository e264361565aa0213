"""Runs in experiment trackers: TensorBoard, Weights & Biases, MLflow.

esper.grow(model, train, val, slots=["layer1"], callbacks=[esper.trackers.TensorBoard("logs")])

Numbers have the names of the columns of metrics.jsonl, those of a slot as `layer1/alpha`; the final
results are below `outcome/`. Steps are epochs of a growth run and rounds of a training run. Nothing
is opened before there is something to write.
"""

import os
import re
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from esper.api import Callback
from esper.leyline import ConfigError, EpisodeOutcome, PackageMissingError
from esper.leyline.events import Event
from esper.observatory.formatting import in_words, is_listed
from esper.observatory.reading import number

Scalars = dict[str, float]
# Columns that locate a row.
_INDEX = ("step", "env", "round", "key")


def row_scalars(row: Mapping[str, Any], prefix: str = "") -> Scalars:
    """The numbers of a row by name, booleans as 0 or 1; `layer1.alpha` becomes `layer1/alpha`."""
    found = {}
    for name, value in row.items():
        known = float(value) if isinstance(value, bool) else number(row, name)
        if known is not None and name not in _INDEX:
            found[prefix + "/".join(filter(None, name.rpartition(".")[::2]))] = float(known)
    return found


def outcome_scalars(outcome: Mapping[str, Any]) -> Scalars:
    """The numbers of a row of outcomes or of a summary."""
    return row_scalars(outcome, "outcome/")


class Tracker(Callback):
    """A callback that writes one run to a tracker.

    Subclasses implement `scalars`, `note` and `close`. `config` holds the settings of the run, if
    they are set before the first row.
    """

    def __init__(self, folder: str | Path, name: str | None = None) -> None:
        if not isinstance(folder, str | Path):
            raise ConfigError(f"folder must be the path of a folder, got {type(folder).__name__}")
        self.folder, self.name = folder, name
        self.config: dict[str, Any] = {}

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def note(self, text: str, step: int) -> None:
        """Write the text of an event."""
        raise NotImplementedError

    def close(self) -> None:
        """End the run; may be called more than once."""
        raise NotImplementedError

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        self.scalars(row_scalars(row), row["step"])

    def on_event(self, event: Event) -> None:
        row = event.row()
        if is_listed(row):
            self.note(in_words(row), int(row["step"]))

    def on_end(self, outcome: EpisodeOutcome) -> None:
        self.scalars(outcome_scalars(vars(outcome)), outcome.steps)
        self.close()


class TensorBoard(Tracker):
    """Event files in `folder`, or in `folder/name`. A run that is resumed in the same folder
    replaces what was written from its first step on."""

    def __init__(self, folder: str | Path, name: str | None = None) -> None:
        super().__init__(folder, name)
        self._library = _load("torch.utils.tensorboard", "TensorBoard logs", "tensorboard")
        self._writer: Any = None

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        writer = self._open(step)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def note(self, text: str, step: int) -> None:
        self._open(step).add_text("events", text, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        if self._writer is None:
            folder = Path(self.folder, self.name or "")
            self._writer = self._library.SummaryWriter(str(folder), purge_step=step)
            if self.config:
                lines = [f"| {name} | {value} |" for name, value in self.config.items()]
                self._writer.add_text("settings", "\n".join(["| | |", "|-|-|", *lines]), step)
        return self._writer


class WandB(Tracker):
    """A Weights & Biases run in `folder/wandb`.

    It is offline unless `mode` or the variable WANDB_MODE is "online"; `wandb sync` uploads it
    later. `more` is passed to `wandb.init`.
    """

    def __init__(
        self,
        folder: str | Path = ".",
        name: str | None = None,
        *,
        project: str = "esper",
        mode: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(folder, name)
        self._library = _load("wandb", "runs of Weights & Biases", "wandb")
        mode = mode or os.environ.get("WANDB_MODE", "offline")
        # `console` keeps it from capturing the terminal; `create_new` allows parallel runs.
        own = {"settings": {"console": "off"}, "reinit": "create_new"}
        self._init = {**own, "project": project, "mode": mode, **more}
        self._run: Any = None
        self._notes: list[tuple[int, str]] = []

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._open().log(dict(values), step=step)

    def note(self, text: str, step: int) -> None:
        self._notes.append((step, text))

    def close(self) -> None:
        if self._run is None:
            return
        if self._notes:
            table = self._library.Table(
                columns=["step", "event"], data=list(map(list, self._notes))
            )
            self._run.log({"events": table})
        self._run.finish()
        self._run = None

    def _open(self) -> Any:
        if self._run is None:
            Path(self.folder).mkdir(parents=True, exist_ok=True)  # else wandb writes elsewhere
            self._run = self._library.init(
                dir=str(self.folder), name=self.name, config=self.config, **self._init
            )
        return self._run


class MLflow(Tracker):
    """An MLflow run in the database `folder/mlflow.db`, or on a server if `folder` is its URL.
    `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db` shows it."""

    def __init__(
        self, folder: str | Path, name: str | None = None, *, experiment: str = "esper"
    ) -> None:
        super().__init__(folder, name)
        self._library = _load("mlflow", "runs of MLflow", "mlflow")
        self.experiment = experiment
        self._client: Any = None
        self._run: str | None = None
        self._notes: list[str] = []

    @property
    def uri(self) -> str:
        if "://" in str(self.folder):
            return str(self.folder)
        return f"sqlite:///{Path(self.folder).absolute() / 'mlflow.db'}"

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        Metric = self._library.entities.Metric
        now = time.time_ns() // 1_000_000  # milliseconds
        metrics = [Metric(_mlflow_name(n), v, now, step) for n, v in values.items()]
        run = self._open()
        self._client.log_batch(run, metrics=metrics)

    def note(self, text: str, step: int) -> None:
        self._notes.append(f"{step}\t{text}")

    def close(self) -> None:
        if self._run is None:
            return
        if self._notes:
            self._client.log_text(self._run, "\n".join(self._notes) + "\n", "events.txt")
        self._client.set_terminated(self._run)
        self._run = None

    def _open(self) -> str:
        if self._run is None:
            here = "://" not in str(self.folder)
            if here:
                Path(self.folder).mkdir(parents=True, exist_ok=True)
            self._client = self._library.MlflowClient(self.uri)
            found = self._client.get_experiment_by_name(self.experiment)
            artifacts = Path(self.folder).absolute().as_uri() + "/artifacts" if here else None
            id_ = (
                self._client.create_experiment(self.experiment, artifact_location=artifacts)
                if found is None
                else found.experiment_id
            )
            self._run = str(self._client.create_run(id_, run_name=self.name).info.run_id)
            for key, value in self.config.items():
                self._client.log_param(self._run, _mlflow_name(key), value)
        return self._run


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def find_tracker(kind: str, folder: Path, name: str, config: Mapping[str, Any]) -> Tracker:
    """The tracker of this kind for a run with these settings.

    Raises ConfigError if there is no such kind, and PackageMissingError.
    """
    if kind not in TRACKERS:
        *most, last = TRACKERS
        raise ConfigError(f"no tracker {kind!r}; there are {', '.join(most)} and {last}")
    tracker = TRACKERS[kind](folder, name)
    tracker.config = {k: v for k, v in config.items() if v is not None}
    return tracker


def _load(module: str, what: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise PackageMissingError(f"{what} need {extra}", extra) from None


def _mlflow_name(name: str) -> str:
    """MLflow accepts letters, digits and a few other characters."""
    return re.sub(r"[^\w\-. :/]", "_", name)
