"""Explains recorded decisions: the situation, the probabilities of the policy, the action and its
result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.observatory.evaluation import DECISIONS, REPORT
from esper.observatory.formatting import (
    format_number,
    in_words,
    is_listed,
    modules_of,
    sanitize,
    slot_columns,
    stage_name,
    with_stage_names,
)
from esper.observatory.reading import Row, integer, number, open_rows
from esper.observatory.run_directory import EVENTS, METRICS, OUTCOMES
from esper.observatory.runs import is_run, read_run

HEADS = ("op", "slot", "blueprint", "blend")


@dataclass(frozen=True)
class EpisodeRecord:
    """The recorded rows of one environment, in order; `about` names task, controller and key."""

    about: Mapping[str, Any]
    env: int
    steps: Mapping[int, Row]
    events: Sequence[Row]
    outcome: Row


def explain(
    run: str | Path,
    *,
    step: int,
    env: int = 0,
    arm: str | None = None,
    key: int | None = None,
) -> dict[str, Any]:
    """What a controller observed and decided before the epoch `step`, and what followed.

    `env` is the environment in a run that recorded episodes. `arm` and `key` select an episode of
    an evaluation. Raises ConfigError if there is no such run, environment, arm, key or step, and
    for runs of `esper train ppo`, which do not record their decisions.
    """
    folder = Path(run)
    if (folder / REPORT).is_file() or (folder / DECISIONS).is_file():
        record = _read_evaluation_episode(folder, arm, key)
    elif arm is not None or key is not None:
        raise ConfigError(f"{run} is not an evaluation; leave out --arm and --key")
    else:
        record = _read_episode(folder, env)
    if step not in record.steps or step < 1:
        raise ConfigError(
            f"environment {record.env} of {folder} has no decision before step {step}; "
            f"choose a step from 1 to {max(record.steps)}"
        )
    decided = (e for e in record.events if e.get("event") == "Decided")
    decision = next((e for e in decided if integer(e, "step") == step), None)
    before, after = record.steps.get(step - 1, {}), record.steps[step]
    return {
        "run": str(folder),
        **{name: record.about.get(name) for name in ("task", "controller", "key")},
        "env": record.env,
        "step": step,
        "situation": _situation(before),
        "observations": _observations(decision or {}),
        "policy": None if decision is None else _policy(decision),
        "action": {head: after.get(head) for head in HEADS},
        "result": _result(record, step, before, after),
    }


def _read_episode(folder: Path, env: int) -> EpisodeRecord:
    """Raises ConfigError if there is no such run or environment."""
    if not is_run(folder):
        raise ConfigError(f"{folder} is not the folder of a run")
    run = read_run(folder)
    if run.kind == "training":
        raise ConfigError(
            f"{folder} records no decisions, as all runs of esper train ppo; grow a network with "
            f"its policy (esper grow --controller {folder}) and explain that run"
        )
    metrics, events, outcomes = (
        [row for row in _rows(folder / name) if integer(row, "env") == env]
        for name in (METRICS, EVENTS, OUTCOMES)
    )
    steps = {
        step: row
        for row in metrics
        if row.get("kind") == "step" and (step := integer(row, "step")) is not None
    }
    if not steps:
        raise ConfigError(f"{folder} has no environment {env}; the first is 0")
    outcome = outcomes[-1] if outcomes else {}
    return EpisodeRecord({**outcome, **run.config}, env, steps, events, outcome)


def _rows(path: Path) -> list[Row]:
    with open_rows(path) as lines:
        return list(lines.rows())


def _read_evaluation_episode(folder: Path, arm: str | None, key: int | None) -> EpisodeRecord:
    """One episode of a learned policy in an evaluation. Raises ConfigError that lists the arms and
    keys if there is no such arm or key."""
    rows = _rows(folder / DECISIONS)
    own = [row for row in rows if row.get("label") == arm and integer(row, "key") == key]
    metrics, events, outcomes = (
        [part for row in own if isinstance(part := row.get(name), dict)]
        for name in ("metrics", "event", "outcome")
    )
    steps = {step: row for row in metrics if (step := integer(row, "step")) is not None}
    if not steps:
        raise ConfigError(_available_episodes(folder, rows))
    outcome = outcomes[0] if outcomes else {}
    about = {"task": outcome.get("task"), "controller": arm, "key": key}
    return EpisodeRecord(about, integer(outcome, "env") or 0, steps, events, outcome)


def _available_episodes(folder: Path, rows: Sequence[Row]) -> str:
    arms = list(dict.fromkeys(str(row.get("label")) for row in rows))
    if not arms:
        return (
            f"{folder} is an evaluation without learned policies, and decisions of rules are not "
            "recorded in evaluations; run esper grow with the same task, controller and key"
        )
    keys = {key for row in rows if (key := integer(row, "key")) is not None}
    return (
        f"{folder} is an evaluation: name a learned policy with --arm ({', '.join(arms)}) and a "
        f"key from {min(keys, default=0)} to {max(keys, default=0)} with --key"
    )


# --- one row per decision, for tables ------------------------------------------------------------


def decision_row(event: Mapping[str, Any]) -> dict[str, Any]:
    """Of a `Decided` event: the next epoch, the chosen names with their probabilities, the value,
    and the second most probable op."""
    legal: dict[str, dict[str, float]] = {}
    for row in _columns(event, ("heads", "choices", "probabilities")):
        if (probability := number(row, "probabilities")) is not None:
            legal.setdefault(str(row["heads"]), {})[str(row["choices"])] = probability
    taken = event.get("taken")
    names = taken if isinstance(taken, list | tuple) and len(taken) == len(HEADS) else [None] * 4
    action = {head: str(name) for head, name in zip(HEADS, names, strict=True) if name is not None}
    second = [[op, p] for op, p in legal.get("op", {}).items() if op != action.get("op")][:1]
    if second and second[0][0] == "GERMINATE" and event.get("supposed") is True:
        for head in ("slot", "blueprint"):
            second += [list(choice) for choice in list(legal.get(head, {}).items())[:1]]
    return {
        "step": integer(event, "step"),
        "value": number(event, "value"),
        "action": [[name, legal.get(head, {}).get(name)] for head, name in action.items()],
        "second": second,
    }


def _columns(event: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """The fields of equal length of an event as rows."""
    found = [event.get(name) for name in names]
    columns = [each if isinstance(each, list | tuple) else [] for each in found]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=False)]


# --- one decision in full ------------------------------------------------------------------------


def _situation(row: Row) -> dict[str, Any]:
    names = ("step", "val_score", "train_score", "val_loss", "plateau_epochs", "params")
    columns = ("module", "stage", "blueprint", "alpha", "contribution")
    slots = [
        dict(zip(columns, (module, *slot_columns(row, module)), strict=True))
        for module in modules_of(row)
    ]
    return {**{name: number(row, name) for name in names}, "slots": slots}


def _observations(decision: Row) -> list[dict[str, Any]]:
    rows = _columns(decision, ("blocks", "entries", "numbers", "unusual"))
    names = ("block", "entry", "value", "normalized")
    return [dict(zip(names, row.values(), strict=True)) for row in rows]


def _policy(decision: Row) -> dict[str, Any]:
    heads: dict[str, list[dict[str, Any]]] = {}
    for row in _columns(decision, ("heads", "choices", "probabilities", "reasons")):
        choice = {"choice": row["choices"], "probability": row["probabilities"]}
        heads.setdefault(str(row["heads"]), []).append(
            {**choice, "forbidden": row["reasons"] or None}
        )
    return {
        "value": number(decision, "value"),
        "hypothetical": decision.get("supposed") is True,
        "heads": heads,
        "left_out": integer(decision, "left_out"),
    }


def _result(record: EpisodeRecord, step: int, before: Row, after: Row) -> dict[str, Any]:
    score, previous = number(after, "val_score"), number(before, "val_score")
    events = [e for e in record.events if integer(e, "step") == step and is_listed(e)]
    return {
        "val_score": score,
        "change": None if score is None or previous is None else score - previous,
        "reward": number(after, "reward"),
        "rolled_back": after.get("rolled_back") is True,
        "events": [in_words(event) for event in events],
        "seed": _seed_result(record, step, after.get("slot")),
        "final_score": number(record.outcome, "val_score"),
        "ended": record.outcome.get("ended"),
    }


def _seed_result(record: EpisodeRecord, step: int, slot: str | None) -> str | None:
    """What became of the seed in the slot of the decision; None without a slot."""
    if slot is None:
        return None
    for event in record.events:
        at = integer(event, "step")
        ended = event.get("event") in ("SeedFossilized", "SeedCulled")
        if ended and event.get("module") == slot and at is not None and at >= step:
            return f"{in_words(event)}, in epoch {at}"
    last = max(record.steps)
    return f"{stage_name(record.steps[last].get(slot + '.stage'))} in epoch {last}, the last one"


# --- as text -------------------------------------------------------------------------------------


def explanation_in_words(explanation: Mapping[str, Any]) -> str:
    """The explanation as text for a terminal, without control characters."""
    data = sanitize(dict(explanation))
    lines = [
        f"{data['run']}: {data['controller']}, key {data['key']}, environment {data['env']}, "
        f"the decision before epoch {data['step']}",
        "",
        *_situation_lines(data["situation"]),
    ]
    if data["observations"]:
        lines += ["", "The most unusual observations (in brackets: as the network gets them):"]
        lines += _observation_lines(data["observations"])
    if data["policy"] is None:
        lines += ["", "The controller has recorded no probabilities: it is a rule, not a policy."]
    else:
        lines += ["", *_policy_lines(data["policy"], data["action"])]
    return "\n".join([*lines, "", *_result_lines(data["action"], data["result"])])


def _situation_lines(s: Mapping[str, Any]) -> list[str]:
    if s["step"] is None:
        return ["The epoch before is not recorded."]
    lines = [
        f"After epoch {s['step']}: validation score {format_number(s['val_score'], '.2f')}, "
        f"training score {format_number(s['train_score'], '.2f')}, "
        f"{format_number(s['plateau_epochs'], '.0f')} epochs without progress, "
        f"{format_number(s['params'], ',.0f')} parameters."
    ]
    return lines + [
        f"  {slot['module']}: "
        + slot_text(slot["stage"], slot["blueprint"], slot["alpha"], slot["contribution"])
        for slot in s["slots"]
    ]


def slot_text(stage: Any, blueprint: Any, alpha: float | None, contribution: float | None) -> str:
    """'conv_light blending, alpha 0.60, contribution +1.2 points', or the stage alone."""
    if not blueprint:
        return stage_name(stage)
    worth = "" if contribution is None else f", contribution {contribution:+.1f} points"
    return f"{blueprint} {stage_name(stage)}, alpha {format_number(alpha, '.2f')}{worth}"


def _observation_lines(observations: Sequence[Mapping[str, Any]]) -> list[str]:
    blocks: dict[str, list[str]] = {}
    for entry in observations:
        text = f"{with_stage_names(entry['entry'])} = {entry['value']:g}"
        if entry["normalized"] != entry["value"]:
            text += f" ({entry['normalized']:+g})"
        blocks.setdefault(entry["block"], []).append(text)
    return [f"  {block}: {'; '.join(entries)}" for block, entries in blocks.items()]


def _policy_lines(policy: Mapping[str, Any], action: Mapping[str, Any]) -> list[str]:
    lines = [f"Value of the state (normalized return): {format_number(policy['value'], '+.3f')}."]
    slots = policy["heads"].get("slot", [])
    slot = slots[0]["choice"] if policy["hypothetical"] and slots else action.get("slot")
    for head in HEADS:
        choices = policy["heads"].get(head, [])
        if not choices:
            continue
        hypothetical = policy["hypothetical"] and head != "op"
        of_slot = f" for {slot}" if head == "blueprint" else ""
        lines.append(f"{head}{of_slot}{', if it had planted a seed' if hypothetical else ''}:")
        forbidden: dict[str, list[str]] = {}
        for choice in choices:
            if choice["forbidden"] is not None:
                reason = with_stage_names(choice["forbidden"])
                forbidden.setdefault(reason, []).append(str(choice["choice"]))
                continue
            mark = "*" if not hypothetical and choice["choice"] == action.get(head) else " "
            probability = format_number(choice["probability"], ".4f")
            lines.append(f"  {mark} {probability} {choice['choice']}")
        lines += [f"    masked: {', '.join(names)} ({why})" for why, names in forbidden.items()]
    return lines


def _result_lines(action: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    what = str(action["op"])
    for head, form in (("blueprint", " {}"), ("slot", " in {}"), ("blend", ", blended {}")):
        if action[head] is not None:
            what += form.format(action[head])
    change = "" if result["change"] is None else f" ({result['change']:+.2f})"
    reward = "" if result["reward"] is None else f" Reward {result['reward']:+.4f}."
    score = format_number(result["val_score"], ".2f")
    lines = [f"Action: {what}.", f"Result: validation score {score}{change}.{reward}"]
    lines += [f"  {text}" for text in result["events"]]
    if result["seed"] is not None:
        lines.append(f"The seed: {result['seed']}.")
    if result["final_score"] is not None:
        lines.append(f"Validation score of the final network: {result['final_score']:.2f}.")
    return lines
