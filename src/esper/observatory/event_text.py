"""Events as sentences."""

from collections.abc import Mapping
from typing import Any

from esper.observatory.formatting import stage_name
from esper.observatory.reading import number

# Views can filter events by topic.
TOPICS = ("seeds", "gates", "governor", "policy", "other")
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
