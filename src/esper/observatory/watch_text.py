"""What `esper watch` writes on the screen: text of a given width, from the data of a run.

Every stage has its letter, so that nothing depends on colour.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.text import Text

from esper.observatory.looks import STAGE_COLOURS, STAGE_LETTERS
from esper.observatory.quantities import HOST, POLICY
from esper.observatory.terminal import clock, shown

BLOCKS = " ▁▂▃▄▅▆▇█"
CURVE, MARKED = "#56b4e9 on #202428", "#ffffff on #5c5c5c"
NAME = 14  # columns for the name of a slot or a quantity
DARK = ("TRAINING", "EMBARGOED", "CULLED", "FOSSILIZED")  # colours that white letters stand out on


def heading(data: Mapping[str, Any], width: int, paused: bool) -> Text:
    """Two lines: who, in which state; how far, how fast, how long still."""
    line = data["line"]
    state = line["state"] + (", paused" if paused else "")
    first = Text(no_wrap=True, overflow="ellipsis")
    first.append(_cut(line["name"], max(10, width - len(state) - 3)), "bold")
    first.append(f"  {state}", "bold" if line["state"] == "running" else "")
    done, total = line["done"], line["total"]
    words = [] if done is None else [f"{done}{'' if total is None else f'/{total}'} {line['unit']}"]
    speed = (data.get("timing") or {}).get("steps_per_second")
    if isinstance(speed, float):
        words.append(f"{speed:.1f} steps/s")
    if line["left"] is not None:
        words.append(f"{clock(line['left'])} left")
    if line["val_score"] is not None:
        words.append(f"score {line['val_score']:.1f}")
    if line["params"] is not None:
        words.append(f"{line['params']:,.0f} parameters")
    second = "\n" + _cut(_bar(done, total, 10) + "  " + "  ".join(words), width)
    problem = line["why"] or "; ".join(data["faults"])
    third = Text(f"\n{_cut(problem, width)}", "bold") if problem else Text("\n")
    return first.append(second).append_text(third)


def _bar(done: int | None, total: int | None, width: int) -> str:
    full = round(width * min(1.0, done / total)) if done and total else 0
    return "█" * full + "░" * (width - full)


def network(data: Mapping[str, Any], at: int, width: int, height: int) -> Text:
    """The score over the epochs, a line of stages for every slot under it, and the slots now."""
    episode = data["episode"]
    frames = episode["frames"]
    if not frames:
        return Text("No epoch has ended yet.")
    slots = len(episode["modules"])
    columns = columns_of(len(frames), max(10, width - NAME - 1))
    here = [at in column for column in columns]
    scores = [_last_of(frames, column, "val_score") for column in columns]
    text = curve(scores, here, max(3, min(9, height - 2 * slots - 5)))
    text.append("\n")
    for i, module in enumerate(episode["modules"]):
        text.append(f"{_cut(module, NAME):<{NAME}} ")
        for n, column in enumerate(columns):
            stage = frames[column[-1]]["slots"][i][0]
            text.append(*cell(stage, marked=here[n]))
        text.append("\n")
    text.append(now_line(frames, at))
    for module, slot in zip(episode["modules"], frames[at]["slots"], strict=True):
        text.append(f"\n{_cut(module, NAME):<{NAME}} {slot_in_words(slot)}")
    return text


def now_line(frames: Sequence[Mapping[str, Any]], at: int) -> str:
    frame = frames[at]
    spent = [f["train_macs"] for f in frames[: at + 1] if f["train_macs"] is not None]
    words = [
        f"epoch {frame['step']}",
        f"validation {shown(frame['val_score'], '.1f')}",
        f"training {shown(frame['train_score'], '.1f')}",
        f"{shown(frame['params'], ',.0f')} parameters",
        f"bill {sum(spent) / 1e6:,.0f} M" if spent else "bill -",
    ]
    return "  ".join(words)


def slot_in_words(slot: Sequence[Any]) -> str:
    stage, blueprint, alpha, contribution = slot
    if blueprint is None:
        return "empty" if stage == "DORMANT" else str(stage).lower()
    worth = "" if contribution is None else f", worth {contribution:+.1f} points"
    return f"{blueprint} {str(stage).lower()}, alpha {shown(alpha, '.2f')}{worth}"


def columns_of(count: int, width: int) -> list[range]:
    """Which frames stand in which column: up to three columns each, or equal groups of frames."""
    if count <= width:
        times = min(3, width // max(1, count))
        return [range(i, i + 1) for i in range(count) for _ in range(times)]
    edges = [count * i // width for i in range(width + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def _last_of(frames: Sequence[Mapping[str, Any]], column: range, name: str) -> float | None:
    measured = [frames[i][name] for i in column if frames[i][name] is not None]
    return measured[-1] if measured else None


def curve(values: Sequence[float | None], here: Sequence[bool], height: int) -> Text:
    """Columns of blocks between the lowest and the highest of the later values."""
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
            text.append(block, MARKED if here[i] else CURVE)
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
    return [
        Text(str(environment["env"])),
        Text(str(environment["step"])),
        Text(shown(environment["val_score"], ".1f")),
        Text(shown(environment["return"], "+.3f")),
        Text(shown(environment["params"], ",.0f")),
        stages,
    ]


def policy(data: Mapping[str, Any], width: int) -> Text:
    """Every quantity of the policy: its latest value and its course over the rounds."""
    rounds = data["rounds"]
    if not rounds or not rounds["round"]:
        return Text("No round has ended yet. Runs without rounds have no policy to show.")
    text = Text()
    text.append(f"round {rounds['round'][-1]}", "bold")
    alarms = [what for what in rounds["anomalies"][-1:] if what]
    text.append(f"   anomalies: {alarms[0] if alarms else 'none'}", "bold" if alarms else "")
    room = max(8, width - 33)
    for name, quantity in POLICY.items():
        values = rounds[name]
        columns = columns_of(len(values), room)
        course = [_last_measured(values, column) for column in columns]
        latest = shown(values[-1], ",.4g")
        text.append(f"\n{_cut(quantity.label, 19):<19} {latest:>10}  {sparkline(course)}")
    if data["bill"]:
        what, spent = data["bill"][0]
        text.append(f"\n{what}: {shown(spent, ',.0f')} multiply-adds")
    return text


def _last_measured(values: Sequence[float | None], column: range) -> float | None:
    measured = [values[i] for i in column if values[i] is not None]
    return measured[-1] if measured else None


def sparkline(values: Sequence[float | None]) -> str:
    measured = [value for value in values if value is not None]
    if not measured:
        return ""
    low, span = min(measured), (max(measured) - min(measured)) or 1.0
    return "".join(
        " " if value is None else BLOCKS[1 + round((value - low) / span * 7)] for value in values
    )


def events(data: Mapping[str, Any], topic: str | None) -> Text:
    told = [e for e in data["episode"]["events"] if topic is None or e["topic"] == topic]
    text = Text()
    text.append(f"events: {topic or 'all'} (f filters)", "bold")
    for event in reversed(told):
        text.append(f"\nepoch {event['step']!s:>4}  {event['words']}")
    if not told:
        text.append("\nnone")
    return text


KEYS = """\
space      stop following a run that goes on; play again one that has ended
left right back and on: epochs of a network, rounds of a training run; home end: first and last
n e p v    the network, the environments, the policy, the events; enter opens an environment
f          narrow the events down
q          quit

"""


def explanation() -> Text:
    """Keys, stages, and every quantity with what a bad value looks like."""
    text = Text()
    text.append("Keys\n", "bold")
    text.append(KEYS)
    text.append("Stages\n", "bold")
    for stage in STAGE_LETTERS:
        text.append(*cell(stage))
        text.append(f" {stage.lower()}\n")
    for title, table in (("The network", HOST), ("The policy", POLICY)):
        text.append(f"\n{title}\n", "bold")
        for quantity in table.values():
            text.append(quantity.label, "underline")
            text.append(f": {quantity.meaning}. Bad: {quantity.bad}.\n")
    return text


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
