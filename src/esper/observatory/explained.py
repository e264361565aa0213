"""One decision of a run, from its record: what was seen, thought and done, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.observatory import story
from esper.observatory.described import lines_of
from esper.observatory.evaluation import DECISIONS, REPORT
from esper.observatory.looks import presentable
from esper.observatory.reading import Row, number, whole
from esper.observatory.run_directory import EVENTS, METRICS, OUTCOMES
from esper.observatory.runs import glance, is_run, kind_of
from esper.observatory.terminal import modules_of, shown

HEADS = ("op", "slot", "blueprint", "blend")


@dataclass(frozen=True)
class EpisodeRecord:
    """What was recorded of one environment, in order. `round` is None for runs without rounds."""

    folder: Path
    kind: str
    config: Mapping[str, Any]
    round: int | None
    env: int
    steps: Mapping[int, Row]
    events: Sequence[Row]
    outcome: Row

    def decision(self, step: int) -> Row | None:
        """The `Decided` event of a step, if there is one."""
        return next(
            (e for e in self.events if _is(e, "Decided") and whole(e, "step") == step), None
        )


def _is(event: Row, kind: str) -> bool:
    return event.get("event") == kind


def read_episode(folder: Path, env: int, round_: int | None = None) -> EpisodeRecord:
    """Raises ConfigError, in a sentence, if there is no such run, round or environment."""
    if not is_run(folder):
        raise ConfigError(f"{folder} is not the folder of a run")
    config = glance(folder).config
    kind = kind_of(config)
    with lines_of(folder / METRICS) as lines:
        last = lines.last() or {}
    newest = whole(last, "round")
    if newest is None and round_ is not None:
        raise ConfigError(f"{folder} has no rounds; leave out --round")
    if newest is not None:
        # The newest may be under way: what is recorded last in a round is its own row.
        complete = newest if last.get("kind") == "round" else newest - 1
        if round_ is None:
            round_ = max(0, complete)
        if not 0 <= round_ <= newest:
            raise ConfigError(f"{folder} has the rounds 0 to {newest}, there is no {round_}")
    steps = {
        int(row["step"]): row
        for row in _rows(folder / METRICS, round_)
        if row.get("kind") == "step" and whole(row, "env") == env and whole(row, "step") is not None
    }
    if not steps:
        where = "" if round_ is None else f" in round {round_}"
        raise ConfigError(f"{folder} has no environment {env}{where}; the first is 0")
    outcomes = [row for row in _rows(folder / OUTCOMES, round_) if whole(row, "env") == env]
    return EpisodeRecord(
        folder=folder,
        kind=kind,
        config=config,
        round=round_,
        env=env,
        steps=steps,
        events=[row for row in _rows(folder / EVENTS, round_) if whole(row, "env") == env],
        outcome=outcomes[-1] if outcomes else {},
    )


def is_evaluation(folder: Path) -> bool:
    return (folder / REPORT).is_file() or (folder / DECISIONS).is_file()


def read_evaluated(folder: Path, arm: str | None, key: int | None) -> EpisodeRecord:
    """One episode of a learned policy in an evaluation. Raises ConfigError that says which there
    are if there is no such arm or key."""
    with lines_of(folder / DECISIONS) as lines:
        rows = list(lines.rows())
    own = [row for row in rows if row.get("label") == arm and whole(row, "key") == key]
    steps = {at: row for row in _parts(own, "metrics") if (at := whole(row, "step")) is not None}
    if not steps:
        raise ConfigError(_what_there_is(folder, rows))
    outcome: Row = next(iter(_parts(own, "outcome")), {})
    return EpisodeRecord(
        folder=folder,
        kind="evaluation",
        config={"task": outcome.get("task"), "controller": arm, "key": key},
        round=None,
        env=whole(outcome, "env") or 0,
        steps=steps,
        events=_parts(own, "event"),
        outcome=outcome,
    )


def _parts(rows: Sequence[Row], kind: str) -> list[Row]:
    return [part for row in rows if isinstance(part := row.get(kind), dict)]


def _what_there_is(folder: Path, rows: Sequence[Row]) -> str:
    arms = list(dict.fromkeys(str(row.get("label")) for row in rows))
    if not arms:
        return (
            f"{folder} is an evaluation without learned policies: of rules it keeps no decisions; "
            "esper grow with the same task, controller and key records them"
        )
    keys = {key for row in rows if (key := whole(row, "key")) is not None}
    return (
        f"{folder} is an evaluation: name a learned policy with --arm ({', '.join(arms)}) and a "
        f"key from {min(keys, default=0)} to {max(keys, default=0)} with --key"
    )


def _rows(path: Path, round_: int | None) -> list[Row]:
    with lines_of(path) as lines:
        if round_ is None:
            return list(lines.rows())
        return list(lines.rows(lines.start_of_round(round_), lines.start_of_round(round_ + 1)))


def explanation(
    record: EpisodeRecord, step: int, decision: Row | None, how: Sequence[str]
) -> dict[str, Any]:
    """All there is to say of the decision before the epoch `step`, as plain data; the sentences of
    `how` say where the thoughts come from, or why there are none. Raises ConfigError without such a
    step."""
    last = max(record.steps)
    if step not in record.steps or step < 1:
        first = "; before step 1 nobody decides" if step < 1 else ""
        raise ConfigError(
            f"environment {record.env} of {record.folder} decided before the steps 1 to {last}, "
            f"not before {step}{first}"
        )
    before, after = record.steps.get(step - 1, {}), record.steps[step]
    did = {head: after.get(head) for head in HEADS}
    return {
        "run": str(record.folder),
        "task": record.config.get("task"),
        "controller": record.config.get("controller", record.kind),
        "key": record.config.get("key"),
        "round": record.round,
        "env": record.env,
        "step": step,
        "how": list(how),
        "situation": _situation(before),
        "saw": _saw(decision),
        "thought": _thought(decision),
        "did": did,
        "came": _came(record, step, before, after),
    }


def _situation(row: Row) -> dict[str, Any]:
    names = ("step", "val_score", "train_score", "val_loss", "plateau_epochs", "params")
    slots = [
        {
            "module": module,
            "stage": row.get(f"{module}.stage"),
            "blueprint": row.get(f"{module}.blueprint"),
            "alpha": number(row, f"{module}.alpha"),
            "contribution": number(row, f"{module}.contribution"),
        }
        for module in modules_of(row)
    ]
    return {**{name: number(row, name) for name in names}, "slots": slots}


def _zip(event: Row, names: Sequence[str]) -> list[dict[str, Any]]:
    found = [event.get(name) for name in names]
    columns = [each if isinstance(each, list | tuple) else [] for each in found]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=False)]


def _saw(decision: Row | None) -> list[dict[str, Any]]:
    rows = [] if decision is None else _zip(decision, ("blocks", "entries", "numbers", "unusual"))
    return [
        {"block": r["blocks"], "entry": r["entries"], "number": r["numbers"], "as": r["unusual"]}
        for r in rows
    ]


def _thought(decision: Row | None) -> dict[str, Any] | None:
    if decision is None:
        return None
    rows = _zip(decision, ("heads", "choices", "probabilities", "reasons"))
    heads: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        choice = {"choice": r["choices"], "probability": r["probabilities"]}
        heads.setdefault(str(r["heads"]), []).append({**choice, "forbidden": r["reasons"] or None})
    return {
        "value": number(decision, "value"),
        "supposed": decision.get("supposed") is True,
        "heads": heads,
        "left_out": whole(decision, "left_out"),
    }


def _came(record: EpisodeRecord, step: int, before: Row, after: Row) -> dict[str, Any]:
    told = [e for e in record.events if whole(e, "step") == step and story.is_told(e)]
    return {
        "val_score": number(after, "val_score"),
        "change": _difference(number(after, "val_score"), number(before, "val_score")),
        "reward": number(after, "reward"),
        "rolled_back": after.get("rolled_back") is True,
        "events": [story.in_words(event) for event in told],
        "fate": _fate(record, step, after),
        "final_score": number(record.outcome, "val_score"),
        "ended": record.outcome.get("ended"),
    }


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _fate(record: EpisodeRecord, step: int, after: Row) -> str | None:
    """What became of the seed that the decision was about; None if it was about none."""
    if after.get("slot") is None:
        return None
    ends = ("SeedFossilized", "SeedCulled")
    for event in record.events:
        at = whole(event, "step")
        own = event.get("module") == after["slot"] and at is not None and at >= step
        if own and event.get("event") in ends:
            return f"{story.in_words(event)}, in epoch {at}"
    newest = record.steps[max(record.steps)]
    return f"undecided in epoch {max(record.steps)}: {newest.get(after['slot'] + '.stage')}".lower()


# --- in words ------------------------------------------------------------------------------------


def explanation_in_words(told: Mapping[str, Any]) -> str:
    """The same for a terminal; it may hold nothing that a terminal obeys."""
    told = presentable(dict(told))
    of_round = "" if told["round"] is None else f", round {told['round']}"
    lines = [
        f"{told['run']}: {told['controller']}, key {told['key']}{of_round}, environment "
        f"{told['env']}, the decision before epoch {told['step']}",
        *told["how"],
        "",
        *_situation_lines(told["situation"]),
    ]
    if told["saw"]:
        lines += [
            "",
            "What stood out of what it saw (in brackets as the network got it):",
        ]
        lines += _saw_lines(told["saw"])
    if told["thought"] is not None:
        lines += ["", *_thought_lines(told["thought"], told["did"])]
    return "\n".join([*lines, "", *_came_lines(told)])


def _situation_lines(s: Mapping[str, Any]) -> list[str]:
    if s["step"] is None:
        return ["Nothing is recorded of the epoch before."]
    lines = [
        f"After epoch {s['step']}: validation score {shown(s['val_score'], '.2f')}, training score "
        f"{shown(s['train_score'], '.2f')}, {shown(s['plateau_epochs'], '.0f')} epochs without "
        f"progress, {shown(s['params'], ',.0f')} parameters."
    ]
    for slot in s["slots"]:
        seed = str(slot["stage"]).lower()
        if slot["blueprint"]:
            worth = slot["contribution"]
            seed = f"{slot['blueprint']} {seed}, alpha {shown(slot['alpha'], '.2f')}"
            seed += "" if worth is None else f", worth {worth:+.2f} points"
        lines.append(f"  {slot['module']}: {seed}")
    return lines


def _saw_lines(saw: Sequence[Mapping[str, Any]]) -> list[str]:
    blocks: dict[str, list[str]] = {}
    for entry in saw:
        text = f"{entry['entry']} = {entry['number']:g}"
        if entry["as"] != entry["number"]:
            text += f" ({entry['as']:+g})"
        blocks.setdefault(entry["block"], []).append(text)
    return [f"  {block}: {'; '.join(entries)}" for block, entries in blocks.items()]


def _thought_lines(thought: Mapping[str, Any], did: Mapping[str, Any]) -> list[str]:
    lines = [f"It expected {shown(thought['value'], '+.3f')} of the rest, on its own scale."]
    slots = thought["heads"].get("slot", [])
    slot = slots[0]["choice"] if thought["supposed"] and slots else did.get("slot")
    for head in HEADS:
        choices = thought["heads"].get(head, [])
        if not choices:
            continue
        supposed = thought["supposed"] and head != "op"
        of_slot = f" for {slot}" if head == "blueprint" else ""
        lines.append(f"{head}{of_slot}{', had it germinated' if supposed else ''}:")
        for choice in choices:
            if choice["forbidden"] is not None:
                continue
            mark = "*" if not supposed and choice["choice"] == did.get(head) else " "
            lines.append(f"  {mark} {shown(choice['probability'], '.4f')} {choice['choice']}")
        lines += _forbidden_lines(choices)
    return lines


def _forbidden_lines(choices: Sequence[Mapping[str, Any]]) -> list[str]:
    """Choices that the mask forbade, those with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for choice in choices:
        if choice["forbidden"] is not None:
            by_reason.setdefault(choice["forbidden"], []).append(str(choice["choice"]))
    return [f"    forbidden: {', '.join(names)} ({why})" for why, names in by_reason.items()]


def _came_lines(told: Mapping[str, Any]) -> list[str]:
    did, came = told["did"], told["came"]
    what = str(did["op"])
    if did["blueprint"] is not None:
        what += f" {did['blueprint']}"
    if did["slot"] is not None:
        what += f" in {did['slot']}"
    if did["blend"] is not None:
        what += f", blended {did['blend']}"
    change = came["change"]
    moved = "" if change is None else f" ({change:+.2f})"
    lines = [
        f"It did: {what}.",
        f"Then: validation score {shown(came['val_score'], '.2f')}{moved}.",
    ]
    if came["reward"] is not None:
        lines[-1] += f" Reward {came['reward']:+.4f}."
    lines += [f"  {words}" for words in came["events"]]
    if came["fate"] is not None:
        lines.append(f"What became of the seed: {came['fate']}.")
    if came["final_score"] is not None:
        lines.append(f"The network that was kept scores {came['final_score']:.2f} on validation.")
    return lines
