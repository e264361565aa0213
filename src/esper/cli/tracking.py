"""`--track` and `esper export-run`: write runs to TensorBoard, W&B or MLflow."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from esper.cli.options import option
from esper.cli.printing import Output
from esper.leyline import ConfigError

if TYPE_CHECKING:
    from esper.trackers import Tracker

TRACK = "Also write to a tracker, in the folder of the run: tensorboard, wandb or mlflow."


def open_tracker(kind: str, run: Path, name: str, config: Mapping[str, Any]) -> "Tracker":
    """The tracker of an arm or a policy of a run."""
    from esper.observatory.run_directory import TRACKED
    from esper.trackers import find_tracker

    return find_tracker(kind, run / TRACKED / kind, name.replace(" ", "-"), config)


def check_track(kind: str | None) -> None:
    """Raises ConfigError for a tracker that is not installed or not known."""
    if kind is not None:
        open_tracker(kind, Path(), "", {})


@dataclass(frozen=True)
class ExportRunSettings:
    run: str = field(
        metadata={"option": typer.Argument(help="A run or an evaluation, such as runs/first.")}
    )
    to: str = option(..., "tensorboard, wandb or mlflow.")
    out: str | None = option(None, "Folder to write to. Default: RUN/tracked/TRACKER.")


def export_run(output: Output, settings: ExportRunSettings) -> None:
    """Write a run or an evaluation to a tracker, as --track would have done while it ran.

    Example: esper export-run runs/first --to tensorboard
    """
    from esper.observatory.run_directory import TRACKED
    from esper.trackers import find_tracker, read_logs

    run = Path(settings.run)
    out = Path(settings.out or run / TRACKED / settings.to)
    check_track(settings.to)
    logs = read_logs(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; choose another folder with --out")
    for log in logs:
        find_tracker(settings.to, out, log.name, log.config).write(log)
    output.say(str(out), whole=True)
    output.json({"out": str(out), "runs": [log.name for log in logs]})
