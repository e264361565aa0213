"""Runs and evaluations as named numbers by step, for experiment trackers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.observatory.reading import JsonLines, Row, number
from esper.observatory.run_directory import ARMS, EVENTS, METRICS, OUTCOMES
from esper.observatory.runs import (
    ARM_NUMBERS,
    RunContents,
    is_run,
    read_evaluation,
    read_run,
    summarize_run,
)

Scalars = dict[str, float]
# Columns that locate a row.
_INDEX = ("step", "env", "round", "key")


@dataclass(frozen=True)
class RunLog:
    """One network, policy or evaluation. `scalars` can be read once: numbers by name, with their
    epoch, round or key."""

    name: str
    config: dict[str, Any]
    scalars: Iterator[tuple[Scalars, int]]
    events: list[Row]


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


def read_logs(folder: Path) -> list[RunLog]:
    """The logs of a run and its other arms, or of an evaluation.

    Raises ConfigError if the folder is neither, or cannot be read.
    """
    if not is_run(folder):
        raise ConfigError(f"{folder} is neither a run nor an evaluation")
    summary = summarize_run(folder)
    if summary.state == "broken":
        raise ConfigError(f"{folder} cannot be exported: {summary.why}")
    if summary.kind == "evaluation":
        report = read_evaluation(folder)
        config = {name: report.get(name) for name in ("task", "scenario", "steps", "keys_wanted")}
        return [RunLog("evaluation", config, _trials(report), [])]
    run = read_run(folder)
    if summary.kind == "training":
        return [RunLog("policy", run.config, _rounds(folder), [])]
    if summary.kind == "offline":
        raise ConfigError(f"{folder} cannot be exported: recorded episodes have no curves")
    arms = sorted(arm for arm in (folder / ARMS).glob("*") if is_run(arm))
    return [_growth(arm, run) for arm in (folder, *arms)]


def _growth(folder: Path, main: RunContents) -> RunLog:
    """One arm of the run `main`."""
    config = read_run(folder).config
    arm = str(config.get("arm", "grown"))
    test = next((row for row in main.summary if row.get("arm") == arm), {})
    with JsonLines(folder / EVENTS) as lines:
        events = list(lines.rows())
    return RunLog(arm.replace(" ", "-"), config, _epochs(folder, test), events)


def _epochs(folder: Path, summary: Row) -> Iterator[tuple[Scalars, int]]:
    step = 0
    with JsonLines(folder / METRICS) as lines:
        for row in lines.rows():
            step = int(number(row, "step") or 0)
            yield row_scalars(row), step
    with JsonLines(folder / OUTCOMES) as lines:
        if (outcome := lines.last()) is not None:
            yield outcome_scalars(outcome), step
    if (test_score := number(summary, "test_score")) is not None:
        yield outcome_scalars({"test_score": test_score}), step


def _rounds(folder: Path) -> Iterator[tuple[Scalars, int]]:
    with JsonLines(folder / METRICS) as lines:
        for row in lines.rows():
            if row.get("kind") == "round":
                yield row_scalars(row), int(number(row, "round") or 0)


def _trials(report: Row) -> Iterator[tuple[Scalars, int]]:
    """The trials of each key; at the last key also the means and differences over all keys."""
    keys = [int(key) for key in report["keys"]]
    for key in keys:
        scalars: Scalars = {}
        for trial in report["trials"]:
            if trial.get("key") == key:
                scalars |= row_scalars(trial, f"{trial['arm']}/")
        yield scalars, key
    total: dict[str, Any] = {}
    for arm in report["arms"]:
        total |= {f"{arm['arm']}.{name}": arm[name] for name in ARM_NUMBERS}
    for row in report["comparisons"]:
        names = ("mean", "low", "high", "p_holm")
        total |= {f"{row['arm']} - {row['versus']}.{name}": row.get(name) for name in names}
    if keys:
        yield outcome_scalars(total), keys[-1]
