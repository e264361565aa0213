"""Events in words."""

from collections.abc import Mapping
from typing import Any

from esper.observatory.reading import number

# What the feed of events can be narrowed down to.
TOPICS = ("seeds", "gates", "governor", "policy", "other")
_TOPIC = {
    "SeedGerminated": "seeds",
    "SeedStageChanged": "seeds",
    "SeedFossilized": "seeds",
    "SeedCulled": "seeds",
    "ShapleyComputed": "seeds",
    "RewardHackingSuspected": "seeds",
    "SeedGateEvaluated": "gates",
    "GovernorPanic": "governor",
    "GovernorRollback": "governor",
    "AnomalyDetected": "policy",
    "Decided": "policy",
}
# Told by a more telling event of the same moment, or of interest to nobody who looks.
UNTOLD = ("GovernorSnapshot", "Decided")
_TOLD_OTHERWISE = ("GERMINATED", "FOSSILIZED", "CULLED")


def is_told(event: Mapping[str, Any]) -> bool:
    if event.get("event") == "SeedStageChanged":
        return event.get("to_stage") not in _TOLD_OTHERWISE
    return event.get("event") not in UNTOLD


def topic(event: Mapping[str, Any]) -> str:
    return _TOPIC.get(str(event.get("event")), "other")


def in_words(event: Mapping[str, Any]) -> str:
    """One line; what is not known of the event is left out."""
    kind = str(event.get("event"))
    named = f"{event['blueprint']} in " if event.get("blueprint") else ""
    seed = f"{named}{event.get('module')}"
    match kind:
        case "SeedGerminated":
            return f"{seed} germinated{_size(event)}"
        case "SeedStageChanged":
            return f"{seed}: {_low(event, 'from_stage')} → {_low(event, 'to_stage')}"
        case "SeedGateEvaluated":
            failed = event.get("checks_failed") or ()
            checks = f" ({', '.join(map(str, failed))})" if isinstance(failed, list) else ""
            answer = "may become" if event.get("passed") else "may not become"
            return f"{seed} {answer} {_low(event, 'target_stage')}{checks if failed else ''}"
        case "SeedFossilized":
            return f"{seed} kept for good{_worth(event)}"
        case "SeedCulled":
            reason = _low(event, "reason").replace("_", " ")
            why = " by the controller" if reason == "controller" else f": {reason}"
            return f"{seed} removed{why}{_worth(event)}"
        case "GovernorPanic":
            return f"governor alarmed: {event.get('reason')}"
        case "GovernorRollback":
            return f"network restored to epoch {event.get('restored_step')}: {event.get('reason')}"
        case "AnomalyDetected":
            return f"{_low(event, 'anomaly').replace('_', ' ')}: {event.get('detail')}"
        case "Warned":
            return f"warning: {event.get('message')}"
        case "HostStabilized":
            return "the host has settled; growth may begin"
        case "HostCooled":
            return f"nothing left to learn: output cooled{_by(event)}"
        case "CoolingRefused":
            return f"the network cannot be cooled: {event.get('reason')}"
        case "RewardHackingSuspected":
            return f"{seed}: suspicious worth ({event.get('pattern')})"
        case "ShapleyComputed":
            return "worth of the kept seeds measured"
    return kind


def _by(event: Mapping[str, Any]) -> str:
    return "" if event.get("tau") is None else f" to {100 * float(event['tau']):.3g} %"


def _low(event: Mapping[str, Any], name: str) -> str:
    return str(event.get(name)).lower()


def _size(event: Mapping[str, Any]) -> str:
    params = number(event, "params")
    return "" if params is None else f", {params:,.0f} parameters"


def _worth(event: Mapping[str, Any]) -> str:
    worth = number(event, "counterfactual")
    return "" if worth is None else f", worth {worth:+.1f} points"
