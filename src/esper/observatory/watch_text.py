"""The text of `esper watch`, for a given width, from the data of a run.

Every stage has a letter, so that nothing depends on colour.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.text import Text

from esper.observatory.explain import slot_text
from esper.observatory.formatting import (
    HOST,
    POLICY,
    STAGE_COLOURS,
    STAGE_LETTERS,
    format_columns,
    format_duration,
    format_number,
    stage_name,
)

BLOCKS = " ▁▂▃▄▅▆▇█"
CURVE, MARKED = "#56b4e9 on #202428", "#ffffff on #5c5c5c"
NAME = 14  # columns for the name of a slot or a quantity
DARK = ("TRAINING", "EMBARGOED", "RESETTING", "CULLED", "FOSSILIZED")  # need white letters


def heading(data: Mapping[str, Any], width: int, paused: bool) -> Text:
    """Name and state; progress, speed and time left; faults."""
    run = data["run"]
    state = run["state"] + (", paused" if paused else "")
    first = Text(no_wrap=True, overflow="ellipsis")
    first.append(_cut(run["name"], max(10, width - len(state) - 3)), "bold")
    first.append(f"  {state}", "bold" if run["state"] == "running" else "")
    done, total = run["done"], run["total"]
    words = [] if done is None else [f"{done}{'' if total is None else f'/{total}'} {run['unit']}"]
    speed = (data.get("timing") or {}).get("steps_per_second")
    if isinstance(speed, float):
        words.append(f"{speed:.1f} steps/s")
    if run["left"] is not None:
        words.append(f"{format_duration(run['left'])} left")
    if run["val_score"] is not None:
        words.append(f"score {run['val_score']:.1f}")
    if run["params"] is not None:
        words.append(f"{run['params']:,.0f} parameters")
    second = "\n" + _cut(_bar(done, total, 10) + "  " + "  ".join(words), width)
    problem = run["why"] or "; ".join(data["faults"])
    third = Text(f"\n{_cut(problem, width)}", "bold") if problem else Text("\n")
    return first.append(second).append_text(third)


def _bar(done: int | None, total: int | None, width: int) -> str:
    full = round(width * min(1.0, done / total)) if done and total else 0
    return "█" * full + "░" * (width - full)


def network(data: Mapping[str, Any], at: int, width: int, height: int) -> Text:
    """The score by epoch, below it the stages of every slot, and the slots at this epoch."""
    episode = data["episode"]
    frames = episode["frames"]
    if not frames:
        return Text("No epoch has ended yet.")
    slots = len(episode["modules"])
    columns = columns_of(len(frames), max(10, width - NAME - 1))
    marked = [at in column for column in columns]
    scores = _by_column([frame["val_score"] for frame in frames], columns)
    text = curve(scores, marked, max(3, min(9, height - 2 * slots - 5)))
    text.append("\n")
    for i, module in enumerate(episode["modules"]):
        text.append(f"{_cut(module, NAME):<{NAME}} ")
        for n, column in enumerate(columns):
            stage = frames[column[-1]]["slots"][i][0]
            text.append(*cell(stage, marked=marked[n]))
        text.append("\n")
    text.append(_epoch_line(frames, at))
    for module, slot in zip(episode["modules"], frames[at]["slots"], strict=True):
        text.append(f"\n{_cut(module, NAME):<{NAME}} {slot_text(*slot)}")
    return text


def _epoch_line(frames: Sequence[Mapping[str, Any]], at: int) -> str:
    frame = frames[at]
    spent = [f["train_macs"] for f in frames[: at + 1] if f["train_macs"] is not None]
    words = [
        f"epoch {frame['step']}",
        f"validation {format_number(frame['val_score'], '.1f')}",
        f"training {format_number(frame['train_score'], '.1f')}",
        f"{format_number(frame['params'], ',.0f')} parameters",
        f"cost {sum(spent) / 1e6:,.0f} M" if spent else "cost -",
    ]
    return "  ".join(words)


def columns_of(count: int, width: int) -> list[range]:
    """The frames of every column: up to three columns per frame, or equal groups of frames."""
    if count <= width:
        times = min(3, width // max(1, count))
        return [range(i, i + 1) for i in range(count) for _ in range(times)]
    edges = [count * i // width for i in range(width + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def _by_column(values: Sequence[float | None], columns: Sequence[range]) -> list[float | None]:
    """The last measured value of every column."""
    measured = [[values[i] for i in column if values[i] is not None] for column in columns]
    return [own[-1] if own else None for own in measured]


def curve(values: Sequence[float | None], marked: Sequence[bool], height: int) -> Text:
    """A bar chart between the lowest and the highest value after the first tenth."""
    measured = [value for value in values[len(values) // 10 :] if value is not None]
    low, high = (min(measured), max(measured)) if measured else (0.0, 1.0)
    span = (high - low) or 1.0
    text = Text()
    for line in range(height - 1, -1, -1):
        label = {height - 1: f"{high:.1f}", 0: f"{low:.1f}"}.get(line, "")
        text.append(f"{label:>{NAME}} ")
        for i, value in enumerate(values):
            eighths = -1 if value is None else round((value - low) / span * (8 * height - 1)) + 1
            block = BLOCKS[max(0, min(8, eighths - 8 * line))]
            text.append(block, MARKED if marked[i] else CURVE)
        text.append("\n")
    text.right_crop(1)
    return text


def cell(stage: Any, *, marked: bool = False) -> tuple[str, str]:
    """(letter, style) of a stage."""
    letter, colour = STAGE_LETTERS.get(stage, "?"), STAGE_COLOURS.get(stage)
    if colour is None:
        return letter, "reverse" if marked else ""
    style = f"{'white' if stage in DARK else 'black'} on {colour}"
    return letter, style + (" bold underline" if marked else "")


def environment_row(environment: Mapping[str, Any]) -> list[Text]:
    stages = Text()
    for stage in environment["stages"]:
        stages.append(*cell(stage))
        stages.append(" ")
    forms = {"env": "d", "step": "d", "val_score": ".1f", "return": "+.3f", "params": ",.0f"}
    return [*map(Text, format_columns(environment, forms)), stages]


def policy(data: Mapping[str, Any], width: int) -> Text:
    """The latest value of every quantity, and its values over the rounds."""
    rounds = data["rounds"]
    if not rounds or not rounds["round"]:
        return Text("No round has ended yet; only runs of esper train ppo have rounds.")
    text = Text()
    text.append(f"round {rounds['round'][-1]}", "bold")
    alarms = [what for what in rounds["anomalies"][-1:] if what]
    text.append(f"   anomalies: {alarms[0] if alarms else 'none'}", "bold" if alarms else "")
    space = max(8, width - 33)
    for name, quantity in POLICY.items():
        values = rounds[name]
        course = _by_column(values, columns_of(len(values), space))
        latest = format_number(values[-1], ",.4g")
        text.append(f"\n{_cut(quantity.label, 19):<19} {latest:>10}  {sparkline(course)}")
    if data["cost"]:
        what, spent = data["cost"][0]
        text.append(f"\n{what}: {format_number(spent, ',.0f')} multiply-adds")
    return text


def sparkline(values: Sequence[float | None]) -> str:
    measured = [value for value in values if value is not None]
    if not measured:
        return ""
    low, span = min(measured), (max(measured) - min(measured)) or 1.0
    return "".join(
        " " if value is None else BLOCKS[1 + round((value - low) / span * 7)] for value in values
    )


def events(data: Mapping[str, Any]) -> Text:
    found = data["episode"]["events"]
    lines = [f"epoch {event['step']!s:>4}  {event['text']}" for event in reversed(found)]
    return Text("\n".join(lines) or "No events yet.")


KEYS = """\
space      pause, or follow the run
left right previous and next epoch (or round of a training run); home and end: first and last
n e p v    network, environments, policy, events; enter opens an environment
q          quit

"""


def help_text() -> Text:
    """Keys, stages, and every quantity with what a bad value looks like."""
    text = Text()
    text.append("Keys\n", "bold")
    text.append(KEYS)
    text.append("Stages\n", "bold")
    for name, stage in {stage_name(stage): stage for stage in STAGE_LETTERS}.items():
        text.append(*cell(stage))
        text.append(f" {name}\n")
    for title, table in (("Network", HOST), ("Policy", POLICY)):
        text.append(f"\n{title}\n", "bold")
        for quantity in table.values():
            text.append(quantity.label, "underline")
            text.append(f": {quantity.meaning}. Bad: {quantity.bad}.\n")
    return text


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
