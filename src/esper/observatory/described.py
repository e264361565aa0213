"""A run or an evaluation as data: what the web page, the report and the terminal show of it.

Plain lists and dictionaries, all text made harmless, never more than some thousand rows however
long the run is.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.observatory import story
from esper.observatory.again import copied, evaluate_again, run_again
from esper.observatory.decisions import decision_line
from esper.observatory.looks import STAGE_COLOURS, STAGE_LETTERS, presentable
from esper.observatory.quantities import HOST, POLICY
from esper.observatory.reading import ROUND_ROW, Lines, Row, UnreadableError, number, whole
from esper.observatory.run_directory import (
    ARMS,
    EVENTS,
    METRICS,
    OUTCOMES,
    TIMINGS,
)
from esper.observatory.runs import (
    Glance,
    RunLine,
    glance,
    is_run,
    kept_seeds,
    kind_of,
    look_at,
    read_evaluation,
)
from esper.observatory.terminal import modules_of

MOST_POINTS = 1200  # of a curve: about as many as there are pixels
MOST_ROUNDS = 400
MOST_EVENTS = 300
MOST_DECISIONS = 200
MOST_ROWS = 20_000  # of one round that are read one by one
FRAME = ("val_score", "train_score", "params", "macs", "train_macs")
LATE_ROUNDS = 8  # from which it is told what a policy does


def describe(
    folder: Path, root: Path | None = None, *, round_: int | None = None, env: int = 0
) -> dict[str, Any]:
    """All that the page of one run or evaluation shows. Raises ConfigError if it is neither.

    `round_` and `env` choose the network that is shown; the newest round if none is given.
    """
    if not is_run(folder):
        raise ConfigError(f"{folder} is neither a run nor an evaluation")
    line = look_at(folder, root)
    told = _evaluation(folder) if line.kind == "evaluation" else _run(folder, round_, env)
    return {
        "line": shown_line(line),
        **presentable(told),
        "reproduce": copied(told.get("reproduce")),
        "looks": {"colours": STAGE_COLOURS, "letters": STAGE_LETTERS},
    }


def shown_line(line: RunLine) -> dict[str, Any]:
    """A line for a view: `id` is the folder as it is, all else can be shown."""
    shown = presentable(asdict(line))
    del shown["folder"]
    return {**shown, "id": line.id, "name": shown["id"]}


def _evaluation(folder: Path) -> dict[str, Any]:
    try:
        report = read_evaluation(folder)
    except (FileNotFoundError, UnreadableError) as error:
        return {"evaluation": None, "faults": [str(error)]}
    return {"evaluation": report, "reproduce": evaluate_again(report), "faults": []}


def _run(folder: Path, round_: int | None, env: int) -> dict[str, Any]:
    seen = glance(folder)
    kind = kind_of(seen.config)
    training = kind == "training"
    with lines_of(folder / METRICS) as lines:
        rounds = rounds_of(lines) if training else None
        last_round = _number_of_last_round(lines)
        policy = _policy(lines, last_round) if training else None
        if round_ is None or last_round is None:
            round_ = last_round
        environments = _environments(folder, lines, round_)
        damaged = lines.damaged
    faults = list(seen.faults)
    if damaged:
        faults.append(f"{METRICS} has damaged lines, which are left out")
    return {
        "settings": [
            (name, value)
            for name, value in sorted(_flat(seen.config).items())
            if name not in ("out", "overwrite")
        ],
        "reproduce": run_again(folder, kind, seen.config),
        "arms": seen.summary,
        "seeds": [] if training else kept_seeds(seen),
        "outcome": {name: value for name, value in seen.outcome.items() if name != "seeds"},
        "bill": _bill(seen, rounds),
        "rounds": rounds,
        "timing": _last_timing(folder) if training else None,
        "policy": policy,
        "environments": environments,
        "last_round": last_round,
        "compared": _compared(folder),
        "episode": episode(folder, round_, env),
        "quantities": {**HOST, **POLICY} if training else HOST,
        "faults": faults,
    }


def lines_of(path: Path) -> Lines:
    """Without rows if the file is not there or cannot be read; `glance` says why."""
    try:
        return Lines(path)
    except (FileNotFoundError, UnreadableError):
        return Lines(None)


# --- training ------------------------------------------------------------------------------------


def _number_of_last_round(lines: Lines) -> int | None:
    last = lines.last()
    return None if last is None else whole(last, "round")


def rounds_of(lines: Lines) -> dict[str, list[Any]]:
    """Columns over rounds, at most MOST_ROUNDS of them."""
    last = _number_of_last_round(lines)
    found = []
    if last is not None:
        step = max(1, -(-(last + 1) // MOST_ROUNDS))
        numbers = sorted({*range(0, last + 1, step), last})
        begin = 0
        for n in numbers:
            end = lines.start_of_round(n + 1, begin)
            row = lines.last_with(ROUND_ROW, begin, end)
            if row is not None and row.get("kind") == "round" and whole(row, "round") == n:
                found.append(row)
            begin = end
    columns: dict[str, list[Any]] = {"round": [whole(row, "round") for row in found]}
    names = (*POLICY, "train_macs")
    columns |= {name: [number(row, name) for row in found] for name in names}
    return columns | {"anomalies": [row.get("anomalies") for row in found]}


def _environments(folder: Path, lines: Lines, round_: int | None) -> list[dict[str, Any]]:
    """The newest row of every environment of a round, with its return if it has ended."""
    newest: dict[int, Row] = {}
    for row in _of_round(lines, round_):
        env = whole(row, "env")
        if row.get("kind") == "step" and env is not None:
            newest[env] = row
    returns: dict[int, float | None] = {}
    with lines_of(folder / OUTCOMES) as outcomes:
        for row in _of_round(outcomes, round_):
            env = whole(row, "env")
            if env is not None:
                returns[env] = number(row, "total_reward")
    return [
        {
            "env": env,
            "step": whole(row, "step"),
            "val_score": number(row, "val_score"),
            "params": number(row, "params"),
            "train_macs": number(row, "train_macs"),
            "return": returns.get(env),
            "ended": env in returns,
            "stages": [row.get(f"{module}.stage") for module in modules_of(row)],
        }
        for env, row in sorted(newest.items())
    ]


def _of_round(lines: Lines, round_: int | None) -> Sequence[Row]:
    """The rows of one round; a sample of them if they are too many. None: of all there is."""
    if round_ is None:
        return lines.sample(MOST_POINTS)
    begin, end = lines.start_of_round(round_), lines.start_of_round(round_ + 1)
    return lines.sample(MOST_ROWS, begin, end)


def _policy(lines: Lines, last: int | None) -> dict[str, Any] | None:
    """What a policy did in the latest rounds: how often each op in each epoch, what and where."""
    if last is None:
        return None
    first = max(0, last - LATE_ROUNDS + 1)
    ops: Counter[tuple[int, str]] = Counter()
    chosen: Counter[tuple[str, str]] = Counter()
    begin, end = lines.start_of_round(first), lines.start_of_round(last + 1)
    for row in lines.sample(MOST_ROWS, begin, end):
        step, op = whole(row, "step"), row.get("op")
        # At step 0 a host warms up; nobody decides.
        if row.get("kind") != "step" or step is None or step < 1 or not isinstance(op, str):
            continue
        ops[step, op] += 1
        if op == "GERMINATE":
            chosen["blueprint", str(row.get("blueprint"))] += 1
            chosen["slot", str(row.get("slot"))] += 1
    steps = sorted({step for step, _ in ops})
    names = sorted({op for _, op in ops})
    return {
        "rounds": [first, last],
        "steps": steps,
        "ops": {op: [ops[step, op] for step in steps] for op in names},
        "blueprints": _ranked(chosen, "blueprint"),
        "slots": _ranked(chosen, "slot"),
    }


def _ranked(chosen: Counter[tuple[str, str]], head: str) -> list[tuple[str, int]]:
    return [(name, n) for (of, name), n in chosen.most_common() if of == head][:20]


def _last_timing(folder: Path) -> Row | None:
    with lines_of(folder / TIMINGS) as lines:
        return lines.last()


# --- one network ---------------------------------------------------------------------------------


def episode(folder: Path, round_: int | None, env: int) -> dict[str, Any]:
    """The life of one network: a frame per epoch, with every slot in the order of the modules.

    `round_` None is for runs without rounds. Raises nothing; without rows there are no frames.
    """
    with lines_of(folder / METRICS) as lines:
        rows = [
            row
            for row in _of_round(lines, round_)
            if row.get("kind") == "step" and whole(row, "env") == env
        ]
    modules = modules_of(rows[0]) if rows else []
    frames = [_frame(row, modules) for row in rows[-MOST_ROWS:]]
    return {
        "round": round_,
        "env": env,
        "modules": modules,
        "frames": frames,
        "events": _events(folder, round_, env),
        "decisions": _decisions(folder, round_, env),
    }


def _frame(row: Row, modules: Sequence[str]) -> dict[str, Any]:
    return {
        "step": whole(row, "step"),
        **{name: number(row, name) for name in FRAME},
        "op": row.get("op"),
        "slot": row.get("slot"),
        "blueprint": row.get("blueprint"),
        "rolled_back": row.get("rolled_back") is True,
        "slots": [
            [
                row.get(f"{module}.stage"),
                row.get(f"{module}.blueprint"),
                number(row, f"{module}.alpha"),
                number(row, f"{module}.contribution"),
            ]
            for module in modules
        ],
    }


def _events(folder: Path, round_: int | None, env: int) -> list[dict[str, Any]]:
    """The latest events of one environment and of the policy, in words."""
    with lines_of(folder / EVENTS) as lines:
        told = [
            event
            for event in _of_round(lines, round_)
            if whole(event, "env") in (env, -1) and story.is_told(event)
        ]
    return [
        {
            "step": whole(event, "step"),
            "topic": story.topic(event),
            "words": story.in_words(event),
        }
        for event in told[-MOST_EVENTS:]
    ]


def _decisions(folder: Path, round_: int | None, env: int) -> list[dict[str, Any]]:
    """What a learned policy thought, where that was recorded."""
    told = _events_of("Decided", folder, round_, env)
    return [decision_line(event) for event in told[-MOST_DECISIONS:]]


def _events_of(kind: str, folder: Path, round_: int | None, env: int) -> list[Row]:
    with lines_of(folder / EVENTS) as lines:
        return [
            event
            for event in _of_round(lines, round_)
            if event.get("event") == kind and whole(event, "env") == env
        ]


def _compared(folder: Path) -> list[dict[str, Any]]:
    """Score curves of what the run is compared with."""
    arms = folder / ARMS
    if arms.is_symlink() or not arms.is_dir():
        return []
    curves = []
    for arm in sorted(arms.iterdir()):
        if not arm.is_symlink() and is_run(arm):
            with lines_of(arm / METRICS) as lines:
                rows = lines.sample(MOST_POINTS)
            label = glance(arm).config.get("arm", arm.name)
            curves.append(
                {
                    "label": str(label),
                    "step": [whole(row, "step") for row in rows],
                    "val_score": [number(row, "val_score") for row in rows],
                }
            )
    return curves


# --- settings, bill -----------------------------------------------------------------------------


def _bill(seen: Glance, rounds: Mapping[str, Sequence[Any]] | None) -> list[tuple[str, Any]]:
    """What it cost, as (what, multiply-adds or None)."""
    if rounds is not None:
        of_rounds = rounds["train_macs"][-1:]
        return [
            ("training a network of the latest round, on average", spent) for spent in of_rounds
        ]
    if not seen.summary:
        spent = number(seen.outcome, "train_macs")
        return [] if spent is None else [("training and evaluation", spent)]
    lines: list[tuple[str, Any]] = []
    for row in seen.summary:
        lines.append((f"{row.get('arm')}: training and evaluation", number(row, "train_macs")))
        asked = number(row, "attribution_macs")
        if asked:
            lines.append((f"{row.get('arm')}: finding out what seeds are worth", asked))
    return lines


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
