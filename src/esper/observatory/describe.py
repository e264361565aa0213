"""A run or an evaluation as data for the web page, the report and `esper watch`.

Plain lists and dictionaries with safe text, and at most some thousand rows however long the run is.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.leyline.growth_settings import flatten
from esper.observatory.explain import decision_row
from esper.observatory.formatting import (
    HOST,
    POLICY,
    STAGE_COLOURS,
    STAGE_LETTERS,
    STAGE_NAMES,
    few_keys,
    in_words,
    is_listed,
    modules_of,
    safe_text,
    sanitize,
    slot_columns,
    stages_of,
    topic,
)
from esper.observatory.reading import (
    ROUND_ROW,
    JsonLines,
    Row,
    UnreadableError,
    integer,
    number,
    open_rows,
)
from esper.observatory.run_directory import ARMS, CONFIG, EVENTS, METRICS, OUTCOMES, TIMINGS
from esper.observatory.runs import (
    RunContents,
    RunSummary,
    controllers,
    is_run,
    read_evaluation,
    read_run,
    summarize_run,
)

MAX_POINTS = 1200  # of a curve: about as many as there are pixels
MAX_ROUNDS = 400
MAX_EVENTS = 300
MAX_DECISIONS = 200
MAX_ROWS = 20_000  # of one round
MAX_COMMAND = 4000  # characters
REPEATED = "--out runs/repeated"
LATE_ROUNDS = 8  # the rounds that show what a policy does
FRAME = ("val_score", "train_score", "params", "macs", "train_macs")


def describe(
    folder: Path, root: Path | None = None, *, round_: int | None = None, env: int = 0
) -> dict[str, Any]:
    """Everything the page of one run or evaluation shows. Raises ConfigError if it is neither.

    `round_` and `env` select the network; the default is the newest round.
    """
    if not is_run(folder):
        raise ConfigError(f"{folder} is neither a run nor an evaluation")
    run = summarize_run(folder, root)
    data = _evaluation(folder) if run.kind == "evaluation" else _run(folder, round_, env)
    # A command is there to be copied: it is shown complete or not at all.
    command = safe_text(data.get("reproduce") or "", MAX_COMMAND)
    return {
        "run": summary_as_dict(run),
        **sanitize(data),
        "reproduce": None if not command or command.endswith("…") else command,
        "stages": {"colours": STAGE_COLOURS, "letters": STAGE_LETTERS, "names": STAGE_NAMES},
    }


def summary_as_dict(run: RunSummary) -> dict[str, Any]:
    """A summary for a view: `id` is the path as it is, everything else is safe to show."""
    shown = sanitize(asdict(run))
    del shown["folder"]
    return {**shown, "id": run.id, "name": shown["id"]}


def _evaluation(folder: Path) -> dict[str, Any]:
    try:
        report = read_evaluation(folder)
    except (FileNotFoundError, UnreadableError) as error:
        return {"evaluation": None, "faults": [str(error)]}
    note = few_keys(report)
    return {
        "evaluation": report,
        "few_keys": note,
        "reproduce": _evaluation_command(report),
        "faults": [],
    }


def _run(folder: Path, round_: int | None, env: int) -> dict[str, Any]:
    run = read_run(folder)
    training = run.kind == "training"
    with open_rows(folder / METRICS) as lines:
        last_round = integer(lines.last() or {}, "round")
        rounds = round_columns(lines) if training else None
        policy = _policy(lines, last_round) if training and last_round is not None else None
        if round_ is None or last_round is None:
            round_ = last_round
        environments = _environments(folder, lines, round_)
        damaged = [f"{METRICS} has damaged lines, which are left out"] if lines.damaged else []
    with open_rows(folder / TIMINGS) as lines:
        timing = lines.last() if training else None
    settings = sorted(pair for pair in flatten(run.config) if pair[1] != {})
    return {
        "settings": [pair for pair in settings if pair[0] not in ("out", "overwrite")],
        "reproduce": _run_command(folder, run),
        "arms": run.summary,
        "seeds": [] if training else run.seeds,
        "outcome": {name: value for name, value in run.outcome.items() if name != "seeds"},
        "cost": _cost(run, rounds),
        "rounds": rounds,
        "timing": timing,
        "policy": policy,
        "environments": environments,
        "last_round": last_round,
        "compared": _compared(folder),
        "episode": episode(folder, round_, env),
        "quantities": {**HOST, **POLICY} if training else HOST,
        "faults": run.faults + damaged,
    }


def _cost(
    run: RunContents, rounds: Mapping[str, Sequence[Any]] | None
) -> list[tuple[str, float | None]]:
    """(what, multiply-adds) of everything that was computed."""
    if rounds is not None:
        what = "training one network (mean of the latest round)"
        return [(what, spent) for spent in rounds["train_macs"][-1:]]
    if not run.summary:
        spent = number(run.outcome, "train_macs")
        return [] if spent is None else [("training and evaluation", spent)]
    costs = []
    for row in run.summary:
        costs.append((f"{row.get('arm')}: training and evaluation", number(row, "train_macs")))
        if measured := number(row, "attribution_macs"):
            costs.append((f"{row.get('arm')}: measuring the contributions of seeds", measured))
    return costs


# --- training ------------------------------------------------------------------------------------


def round_columns(lines: JsonLines) -> dict[str, list[Any]]:
    """The columns of the rows of rounds, of at most about MAX_ROUNDS rounds."""
    last = integer(lines.last() or {}, "round")
    found: list[Row] = []
    if last is not None:
        step = max(1, -(-(last + 1) // MAX_ROUNDS))
        begin = 0
        for n in sorted({*range(0, last + 1, step), last}):
            end = lines.start_of_round(n + 1, begin)
            row = lines.last_with(ROUND_ROW, begin, end)
            if row is not None and row.get("kind") == "round" and integer(row, "round") == n:
                found.append(row)
            begin = end
    return {
        "round": [integer(row, "round") for row in found],
        **{name: [number(row, name) for row in found] for name in (*POLICY, "train_macs")},
        "anomalies": [row.get("anomalies") for row in found],
    }


def _environments(folder: Path, lines: JsonLines, round_: int | None) -> list[dict[str, Any]]:
    """The newest row of every environment of a round, with its return if it has ended."""
    newest: dict[int, Row] = {}
    for row in _rows_of_round(lines, round_):
        env = integer(row, "env")
        if row.get("kind") == "step" and env is not None:
            newest[env] = row
    with open_rows(folder / OUTCOMES) as outcomes:
        returns = {
            integer(row, "env"): number(row, "total_reward")
            for row in _rows_of_round(outcomes, round_)
        }
    return [
        {
            "env": env,
            "step": integer(row, "step"),
            **{name: number(row, name) for name in ("val_score", "params", "train_macs")},
            "return": returns.get(env),
            "ended": env in returns,
            "stages": stages_of(row),
        }
        for env, row in sorted(newest.items())
    ]


def _rows_of_round(lines: JsonLines, round_: int | None) -> list[Row]:
    """The rows of one round, or of a run without rounds (None); a sample if there are too many."""
    if round_ is None:
        return lines.sample(MAX_POINTS)
    begin, end = lines.start_of_round(round_), lines.start_of_round(round_ + 1)
    return lines.sample(MAX_ROWS, begin, end)


def _policy(lines: JsonLines, last: int) -> dict[str, Any]:
    """What a policy did in the latest rounds: counts of ops by epoch, of blueprints and slots."""
    first = max(0, last - LATE_ROUNDS + 1)
    ops: Counter[tuple[int, str]] = Counter()
    blueprints: Counter[str] = Counter()
    slots: Counter[str] = Counter()
    begin, end = lines.start_of_round(first), lines.start_of_round(last + 1)
    for row in lines.sample(MAX_ROWS, begin, end):
        step, op = integer(row, "step"), row.get("op")
        # At step 0 a host warms up and no action is taken.
        if row.get("kind") != "step" or step is None or step < 1 or not isinstance(op, str):
            continue
        ops[step, op] += 1
        if op == "GERMINATE":
            blueprints[str(row.get("blueprint"))] += 1
            slots[str(row.get("slot"))] += 1
    steps = sorted({step for step, _ in ops})
    return {
        "rounds": [first, last],
        "steps": steps,
        "ops": {op: [ops[step, op] for step in steps] for op in sorted({op for _, op in ops})},
        "blueprints": blueprints.most_common(20),
        "slots": slots.most_common(20),
    }


# --- one network ---------------------------------------------------------------------------------


def episode(folder: Path, round_: int | None, env: int) -> dict[str, Any]:
    """The course of one network: a frame per epoch with every slot, events and decisions.

    `round_` is None for runs without rounds. Raises nothing; without rows there are no frames.
    """
    with open_rows(folder / METRICS) as lines:
        rows = [
            row
            for row in _rows_of_round(lines, round_)
            if row.get("kind") == "step" and integer(row, "env") == env
        ]
    with open_rows(folder / EVENTS) as lines:
        # -1 stands for the policy, which has no environment.
        events = [e for e in _rows_of_round(lines, round_) if integer(e, "env") in (env, -1)]
    modules = modules_of(rows[0]) if rows else []
    return {
        "round": round_,
        "env": env,
        "modules": modules,
        "frames": [_frame(row, modules) for row in rows],
        "events": [
            {"step": integer(event, "step"), "topic": topic(event), "text": in_words(event)}
            for event in list(filter(is_listed, events))[-MAX_EVENTS:]
        ],
        "decisions": [
            decision_row(event)
            for event in [e for e in events if e.get("event") == "Decided"][-MAX_DECISIONS:]
        ],
    }


def _frame(row: Row, modules: Sequence[str]) -> dict[str, Any]:
    return {
        "step": integer(row, "step"),
        **{name: number(row, name) for name in FRAME},
        "slots": [list(slot_columns(row, module)) for module in modules],
    }


def _compared(folder: Path) -> list[dict[str, Any]]:
    """Score curves of the other arms of the run."""
    arms = folder / ARMS
    if arms.is_symlink() or not arms.is_dir():
        return []
    curves = []
    for arm in sorted(arms.iterdir()):
        if not arm.is_symlink() and is_run(arm):
            label = read_run(arm).config.get("arm", arm.name)
            curves.append({"label": str(label), **score_curve(arm)})
    return curves


def score_curve(folder: Path) -> dict[str, list[Any]]:
    """The validation score by epoch of a run with one network."""
    with open_rows(folder / METRICS) as lines:
        rows = [row for row in lines.sample(MAX_POINTS) if row.get("kind") == "step"]
    return {
        "x": [integer(row, "step") for row in rows],
        "y": [number(row, "val_score") for row in rows],
    }


# --- commands to repeat it -----------------------------------------------------------------------


def _run_command(folder: Path, run: RunContents) -> str | None:
    """The command that repeats a run in another folder; None if it is unknown."""
    if run.kind == "training":
        return f"esper train ppo --config {shlex.quote(str(folder / CONFIG))} {REPEATED}"
    skip = ("out", "overwrite", "arm", "command")
    options = {name: value for name, value in run.config.items() if name not in skip}
    if run.kind == "growth" and options:
        return _command("esper grow", options)
    if run.config.get("command") == "record":
        return _command("esper train record", options)
    return None


def _evaluation_command(report: Mapping[str, Any]) -> str:
    options = {
        "task": report.get("task"),
        "scenario": report.get("scenario"),
        "extra": ",".join(f"{share:g}" for share in report.get("extra") or ()) or None,
        "arms": ",".join(controllers(report)),
        "keys": integer(report, "keys_wanted"),
        "steps": integer(report, "steps"),
        "tune": len(report.get("learning_rates") or ()) > 1,
        "controls": any(arm["control_of"] for arm in report["arms"]),
        "control_for": report.get("reference"),
    }
    return _command("esper evaluate", options)


def _command(command: str, options: Mapping[str, Any]) -> str:
    words = [command]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag} {shlex.quote(str(value))}")
    return " ".join([*words, REPEATED])
