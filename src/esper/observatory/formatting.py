"""Formatting that every view shares: quantities, names and colours of stages, numbers, events in
words."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from esper.leyline import HEAD_NAMES
from esper.leyline.errors import visible
from esper.leyline.reports import few_pairs
from esper.observatory.reading import EXACT, number


class Quantity(NamedTuple):
    label: str
    meaning: str
    bad: str


def _table(*rows: tuple[str, str, str, str]) -> dict[str, Quantity]:
    return {column: Quantity(*texts) for column, *texts in rows}


# fmt: off
# By the column in the row of a round.
POLICY = _table(
    ("return", "return", "mean sum of rewards of an episode", "falling, or flat from the start"),
    ("val_score", "score", "mean validation score of the resulting networks",
     "below that of hosts without growth"),
    ("validation_hosts_score", "validation hosts",
     "mean validation score on hosts that the policy does not learn from, with its most probable "
     "actions", "falling while the score rises"),
    ("entropy", "entropy", "how random the policy acts: 0 deterministic, 1 uniform",
     "below 0.1 early in training"),
    ("approx_kl", "KL", "how far one update moved the policy", "above 0.1: updates are too large"),
    ("explained_variance", "explained variance",
     "how well the critic predicts returns: 1 exactly, 0 no better than a constant",
     "below 0 after a quarter of the run"),
    ("clip_fraction", "clip fraction", "share of decisions whose gradient was clipped",
     "above 0.3, or always 0"),
    ("grad_norm", "gradient norm", "norm of the policy's gradient before clipping",
     "0, or growing tenfold"),
    ("value_loss", "value loss", "squared error of the critic", "growing"),
    ("params", "parameters", "mean size of the resulting networks", "at the budget"),
    ("germinated", "planted", "seeds planted per episode", "0 round after round"),
    ("fossilized", "kept", "seeds kept per episode", "0 round after round"),
    ("culled", "removed", "seeds removed per episode", "nearly all that were planted"),
    ("rollbacks", "rollbacks", "networks that failed and were restored", "frequent"),
    ("gradient_health", "gradient health", "1 without vanishing or exploding gradients",
     "below 0.8"),
    *((f"{head}_entropy", f"{head} entropy", f"entropy of the choice of the {head}", "below 0.1")
      for head in HEAD_NAMES),
    *((f"{head}_grad_norm", f"{head} gradient", f"gradient norm of the {head} head",
       "0, or growing tenfold") for head in (*HEAD_NAMES, "value")),
)

# By the column in the row of an epoch.
HOST = _table(
    ("val_score", "score", "score of the network on validation data, 0 to 100",
     "falling while the training score rises"),
    ("train_score", "training score", "score of the network on its training data",
     "far above the validation score"),
    ("params", "parameters", "size of the network including its seeds",
     "growing while the score stays flat"),
    ("macs", "multiply-adds", "cost of one forward pass of one example",
     "growing while the score stays flat"),
    ("train_macs", "cost", "multiply-adds of all training and evaluation, removed seeds included",
     "above the compute budget"),
    ("alpha", "alpha", "how far a seed is blended in: 0 not at all, 1 fully", "stays below 1"),
    ("contribution", "contribution", "points of score that are lost without the seed", "below 0"),
)
# fmt: on


# What users see instead of the names of `SeedStage`.
STAGE_NAMES = {
    "DORMANT": "empty",
    "GERMINATED": "planted",
    "TRAINING": "learning",
    "BLENDING": "blending",
    "HOLDING": "on trial",
    "FOSSILIZED": "kept",
    "CULLED": "removed",
    "EMBARGOED": "resting",
    "RESETTING": "resting",
}
# For terminals without colour and for readers who do not see it.
STAGE_LETTERS = dict(zip(STAGE_NAMES, "·PLBTKR--", strict=True))
# The palette of Okabe and Ito: colour-blind readers can tell it apart; lightness differs as well.
STAGE_COLOURS = {
    "GERMINATED": "#9fd3f2",
    "TRAINING": "#0072b2",
    "BLENDING": "#e69f00",
    "HOLDING": "#cc79a7",
    "FOSSILIZED": "#009e73",
    "CULLED": "#d55e00",
    "EMBARGOED": "#5c5c5c",
    "RESETTING": "#5c5c5c",
}

MAX_TEXT = 160  # characters of a name that a view shows


def stage_name(stage: object) -> str:
    """The name of a stage for users; text that is no stage in lower case."""
    return STAGE_NAMES.get(str(stage), str(stage).lower())


def with_stage_names(text: str) -> str:
    """The same text with the names of stages for users."""
    return re.sub(r"[A-Z]{6,}", lambda word: STAGE_NAMES.get(word[0], word[0]), text)


def safe_text(text: object, longest: int = MAX_TEXT) -> str:
    """One short line that no terminal or browser interprets.

    Control characters, direction marks and unknown characters are shown as `\\u001b`.
    """
    line = str(text)
    if len(line) > longest:
        line = line[: longest - 1] + "…"
    return visible(line)


def sanitize(value: Any) -> Any:
    """The same lists and dictionaries with safe text, and None for numbers that are not finite.

    Integers that a browser would round become text.
    """
    if isinstance(value, dict):
        return {safe_text(name): sanitize(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [sanitize(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT:
        return str(value) if abs(value) < 2**256 else None
    if value is None or isinstance(value, bool | int | float):
        return value
    return safe_text(value)


def format_number(value: float | None, form: str) -> str:
    """A number in the given format; '-' if it was not measured."""
    return "-" if value is None else format(value, form)


def format_columns(row: Mapping[str, Any], forms: Mapping[str, str]) -> list[str]:
    """The numbers of these columns, each in its format."""
    return [format_number(number(row, name), form) for name, form in forms.items()]


def mean_of(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean of the values that were measured."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def format_duration(seconds: float) -> str:
    """1:02:03, or 2:03 for less than an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def modules_of(row: Mapping[str, Any]) -> list[str]:
    """The modules that have a slot, from the columns of a metrics row, in order."""
    return [column.removesuffix(".stage") for column in row if column.endswith(".stage")]


def slot_columns(row: Mapping[str, Any], module: str) -> tuple[Any, Any, Any, Any]:
    """Stage, blueprint, alpha and contribution of a slot, from a metrics row."""
    alpha, contribution = (number(row, f"{module}.{name}") for name in ("alpha", "contribution"))
    return _stage(row, module), row.get(f"{module}.blueprint"), alpha, contribution


def stages_of(row: Mapping[str, Any]) -> list[str | None]:
    """The stages of all slots, from a metrics row."""
    return [_stage(row, module) for module in modules_of(row)]


def _stage(row: Mapping[str, Any], module: str) -> str | None:
    stage = row.get(f"{module}.stage")
    return stage if isinstance(stage, str) else None


def seed_location(seed: Mapping[str, Any]) -> str:
    """The name of the module, and the slot in brackets."""
    return f"{seed['module']} ({seed['slot_id']})"


def few_keys(report: Mapping[str, Any]) -> str | None:
    """One sentence if an evaluation has too few keys for any significant difference."""
    rows = report["comparisons"]
    known = [row["n"] for row in rows if isinstance(row.get("n"), int)]
    return few_pairs(min(known), len(rows)) if known else None


# The page can filter events by topic.
_TOPIC = {
    "ShapleyComputed": "seeds",
    "RemovalUndone": "seeds",
    "RewardHackingSuspected": "seeds",
    "SeedGateEvaluated": "gates",
    "AnomalyDetected": "policy",
    "Decided": "policy",
}
HIDDEN = ("GovernorSnapshot", "Decided")
# Another event of the same epoch describes these changes in more detail.
_COVERED = ("GERMINATED", "FOSSILIZED", "CULLED")


def is_listed(event: Mapping[str, Any]) -> bool:
    """Whether views list this event."""
    if event.get("event") == "SeedStageChanged":
        return event.get("to_stage") not in _COVERED
    return event.get("event") not in HIDDEN


def topic(event: Mapping[str, Any]) -> str:
    kind = str(event.get("event"))
    default = "seeds" if kind.startswith("Seed") else "other"
    return "governor" if kind.startswith("Governor") else _TOPIC.get(kind, default)


def in_words(event: Mapping[str, Any]) -> str:
    """One line about an event; fields that are missing are left out."""
    kind, reason = str(event.get("event")), event.get("reason")
    seed = f"{event.get('blueprint')} in {event.get('module')}"
    if not event.get("blueprint"):
        seed = str(event.get("module"))
    match kind:
        case "SeedGerminated":
            params = number(event, "params")
            return f"{seed} planted" + ("" if params is None else f", {params:,.0f} parameters")
        case "SeedStageChanged":
            before, after = event.get("from_stage"), event.get("to_stage")
            return f"{seed}: {stage_name(before)} → {stage_name(after)}"
        case "SeedGateEvaluated":
            failed = event.get("checks_failed")
            if not isinstance(failed, list | tuple):
                failed = ()
            checks = f" ({', '.join(map(str, failed))})" if failed else ""
            result = "passed" if event.get("passed") else "failed"
            return f"{seed} {result} the gate to '{stage_name(event.get('target_stage'))}'{checks}"
        case "SeedFossilized":
            return f"{seed} kept{_worth(event)}"
        case "SeedCulled":
            why = str(reason).lower().replace("_", " ")
            why = " by the controller" if why == "controller" else f": {why}"
            return f"{seed} removed{why}{_worth(event)}"
        case "RemovalUndone":
            return f"{seed} is back: without it the score fell"
        case "GovernorPanic":
            return f"the governor reports a failure: {reason}"
        case "GovernorRollback":
            return f"network restored to epoch {event.get('restored_step')}: {reason}"
        case "AnomalyDetected":
            anomaly = str(event.get("anomaly")).lower().replace("_", " ")
            return f"{anomaly}: {event.get('detail')}"
        case "Warned":
            return f"warning: {event.get('message')}"
        case "HostStabilized":
            return "the host's loss is stable; growth may begin"
        case "HostCooled":
            tau = event.get("tau")
            to = "" if tau is None else f" to {100 * float(tau):.3g} %"
            return f"the host has stopped learning; its output was cooled{to}"
        case "CoolingRefused":
            return f"the network cannot be cooled: {reason}"
        case "RewardHackingSuspected":
            return f"{seed}: suspicious contribution ({event.get('pattern')})"
        case "ShapleyComputed":
            return "contributions of the kept seeds measured"
    return kind


def _worth(event: Mapping[str, Any]) -> str:
    worth = number(event, "counterfactual")
    return "" if worth is None else f", contribution {worth:+.1f} points"
