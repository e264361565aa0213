"""Runs and evaluations told once more, as numbers with names and steps, for those who keep them
elsewhere."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.observatory.reading import Lines, Row, number
from esper.observatory.run_directory import ARMS, EVENTS, METRICS, OUTCOMES
from esper.observatory.runs import (
    ARM_NUMBERS,
    Glance,
    glance,
    is_run,
    look_at,
    read_evaluation,
)

Scalars = dict[str, float]
# Where a row stands, not what was measured.
_PLACES = ("step", "env", "round", "key")


@dataclass(frozen=True)
class Story:
    """One network, policy or evaluation: `name` tells it from others of the same run. `scalars`
    can be read once: numbers by name, with the epoch, round or key that they are of."""

    name: str
    config: dict[str, Any]
    scalars: Iterator[tuple[Scalars, int]]
    events: list[Row]


def scalars_of(row: Mapping[str, Any], prefix: str = "") -> Scalars:
    """The numbers of a row by name, a truth as 0 or 1; `layer1.alpha` is named `layer1/alpha`."""
    found = {}
    for name, value in row.items():
        known = float(value) if isinstance(value, bool) else number(row, name)
        if known is not None and name not in _PLACES:
            found[prefix + "/".join(filter(None, name.rpartition(".")[::2]))] = float(known)
    return found


def outcome_scalars(outcome: Mapping[str, Any]) -> Scalars:
    """What a network came to, from a row of outcomes or of a summary."""
    return scalars_of(outcome, "outcome/")


def retell(folder: Path) -> list[Story]:
    """The stories of a run, those that it is compared with included, or of an evaluation.

    Raises ConfigError if it is neither, or cannot be read.
    """
    if not is_run(folder):
        raise ConfigError(f"{folder} is neither a run nor an evaluation")
    line = look_at(folder)
    if line.state == "broken":
        raise ConfigError(f"{folder} cannot be exported: {line.why}")
    if line.kind == "evaluation":
        return [_of_evaluation(read_evaluation(folder))]
    seen = glance(folder)
    if line.kind == "training":
        return [Story("policy", seen.config, _rounds(folder), [])]
    if line.kind == "lessons":
        raise ConfigError(f"{folder} holds recorded episodes or lessons, which have no curves")
    beside = sorted(each for each in (folder / ARMS).glob("*") if is_run(each))
    return [_of_growth(each, seen) for each in (folder, *beside)]


def _of_growth(folder: Path, whole: Glance) -> Story:
    """`whole` is the run that this one belongs to, or is."""
    seen = glance(folder)
    arm = str(seen.config.get("arm", "grown"))
    test = next((row for row in whole.summary if row.get("arm") == arm), {})
    return Story(arm.replace(" ", "-"), seen.config, _epochs(folder, test), _events(folder))


def _epochs(folder: Path, summary: Row) -> Iterator[tuple[Scalars, int]]:
    step = 0
    with Lines(folder / METRICS) as lines:
        for row in lines.rows():
            step = int(number(row, "step") or 0)
            yield scalars_of(row), step
    with Lines(folder / OUTCOMES) as lines:
        if (outcome := lines.last()) is not None:
            yield outcome_scalars(outcome), step
    if (test_score := number(summary, "test_score")) is not None:
        yield outcome_scalars({"test_score": test_score}), step


def _events(folder: Path) -> list[Row]:
    with Lines(folder / EVENTS) as lines:
        return list(lines.rows())


def _rounds(folder: Path) -> Iterator[tuple[Scalars, int]]:
    with Lines(folder / METRICS) as lines:
        for row in lines.rows():
            if row.get("kind") == "round":
                yield scalars_of(row), int(number(row, "round") or 0)


def _of_evaluation(report: Row) -> Story:
    config = {name: report.get(name) for name in ("task", "scenario", "steps", "keys_wanted")}
    return Story("evaluation", config, _trials(report), [])


def _trials(report: Row) -> Iterator[tuple[Scalars, int]]:
    """The trials of each key together; with the last, what all keys came to."""
    keys = [int(key) for key in report["keys"]]
    for key in keys:
        of_key: Scalars = {}
        for trial in report["trials"]:
            if trial.get("key") == key:
                of_key |= scalars_of(trial, f"{trial['arm']}/")
        yield of_key, key
    whole: Scalars = {}
    for arm in report["arms"]:
        whole |= outcome_scalars({f"{arm['arm']}.{name}": arm[name] for name in ARM_NUMBERS})
    for each in report["comparisons"]:
        names = ("mean", "low", "high", "p_holm")
        versus = f"{each['arm']} - {each['versus']}"
        whole |= outcome_scalars({f"{versus}.{name}": each.get(name) for name in names})
    if keys:
        yield whole, keys[-1]
