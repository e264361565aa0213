"""Short reasons why an action is masked."""

from esper.leyline import IS_LIVE, LifecycleOp, SeedStage
from esper.leyline.constants import MIN_CULL_AGE
from esper.tamiyo.situation import Situation

# A policy may see only some of the candidates.
NO_CANDIDATE = "does not fit the slot, or is not what the policy has learnt with"


def why_no_op(s: Situation, env: int, op: LifecycleOp) -> str | None:
    """None if the op is legal."""
    if s.masks.op[env, op]:
        return None
    if not s.running[env]:
        return "the episode is over"
    reasons = {why_no_slot(s, env, op, slot) for slot in range(s.slot_config.num_slots)}
    if len(reasons) == 1:
        return f"every slot: {reasons.pop()}"
    return {
        LifecycleOp.GERMINATE: "no slot is free for a seed that fits and can be paid for",
        LifecycleOp.CULL: "no live seed is old enough",
        LifecycleOp.FOSSILIZE: "no seed is HOLDING and has passed gate G5",
    }[op]


def why_no_slot(s: Situation, env: int, op: LifecycleOp, slot: int) -> str | None:
    """Why the op cannot be done in a slot; None if it can."""
    if s.masks.slot[env, op, slot]:
        return None
    if not s.running[env]:
        return "the episode is over"
    stage = SeedStage(s.table.stage[env, slot])
    if op == LifecycleOp.GERMINATE:
        if s.table.holds_seed[env, slot]:
            return f"its seed is {stage.name}"
        if stage != SeedStage.DORMANT:
            return f"it rests ({stage.name})"
        if not s.masks.blueprint[env, slot].any():
            return "no blueprint fits it and what is left to spend"
        return f"the network holds {s.max_seeds} seeds, as many as it may"
    if op == LifecycleOp.CULL:
        if stage == SeedStage.FOSSILIZED:
            return "its seed is kept, and not audited now"
        if not IS_LIVE[stage]:
            return f"it holds no live seed ({stage.name})"
        return f"its seed is not {MIN_CULL_AGE} epochs old"
    if stage != SeedStage.HOLDING:
        return f"it is {stage.name}, not HOLDING"
    return "its seed has not passed gate G5"


def why_no_blueprint(s: Situation, env: int, slot: int, blueprint: int) -> str | None:
    """Why a blueprint cannot be planted in a slot; None if it can."""
    if s.masks.blueprint[env, slot, blueprint]:
        return None
    if s.facts is None:
        return "does not fit the slot, or costs more than is left"
    return "costs more than is left" if s.facts.fits[slot, blueprint] else NO_CANDIDATE
