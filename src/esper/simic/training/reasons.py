"""Why a policy decided as it did: its observation and the probabilities of its choices, by name."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.leyline import BLEND_NAMES, HEAD_NAMES, OP, RELEVANT_HEADS, SLOT, LifecycleOp
from esper.leyline.events import Decided
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.types import Hidden, MaskTensors
from esper.tamiyo.policy.mask_reasons import why_no_blueprint, why_no_op, why_no_slot
from esper.tamiyo.situation import Situation

MOST_ENTRIES, MOST_PER_BLOCK, MOST_CHOICES = 40, 6, 12
HEAD_ORDER = ("op", "slot", "blueprint", "blend")  # in which heads are sampled

# (head, choice, probability, reason)
Row = tuple[str, str, float | None, str]


@dataclass(frozen=True)
class PolicyStep:
    """The input of a policy in one step and the values [E] that it estimated: observations [E, D],
    raw and as scaled for the network, and the hidden state before the step."""

    situation: Situation
    raw: Tensor
    scaled: Tensor
    hidden: Hidden
    values: Tensor


@torch.inference_mode()
def decision_events(
    agent: PPOAgent, step: PolicyStep, names: Sequence[tuple[str, str]], actions: np.ndarray
) -> list[Decided]:
    """One event per running environment: how the policy rated `actions` [E, 4] and the other
    choices. `names` are the (block, entry) of each column of the observation."""
    s, network = step.situation, agent.network
    masks = MaskTensors.of(s.masks, agent.device)
    features, _ = network.encode(step.scaled.to(agent.device), step.hidden)
    taken = torch.from_numpy(actions).to(agent.device)
    _, _, done, _ = network.decide(features, masks, actions=taken)
    # Where a seed can be planted: what the policy would plant, and where.
    can = masks.op[:, LifecycleOp.GERMINATE]
    germinate = torch.zeros_like(masks.op)
    germinate[:, LifecycleOp.GERMINATE] = can
    germinate[:, LifecycleOp.WAIT] = ~can
    planted, _, planting, _ = network.decide(features, masks._replace(op=germinate))

    events = []
    for env in np.flatnonzero(s.running).tolist():
        op = LifecycleOp(int(actions[env, OP]))
        supposed = op == LifecycleOp.WAIT and bool(can[env])
        relevant = RELEVANT_HEADS[LifecycleOp.GERMINATE if supposed else op]
        at = planted[env].cpu().numpy() if supposed else actions[env]
        rows: list[Row] = []
        for head in HEAD_ORDER:
            if head in relevant:
                heads = planting if supposed and head != "op" else done
                probabilities = heads[HEAD_NAMES.index(head)].probs[env].tolist()
                rows += _choices(s, env, head, at, probabilities)
        chosen = _most_relevant(rows)
        entries = _entries(step, names, env)
        events.append(
            Decided(
                env,
                s.step + 1,
                taken=_named(s, actions[env]),
                value=_rounded(step.values[env].item()),
                supposed=supposed,
                blocks=tuple(names[column][0] for column in entries),
                entries=tuple(names[column][1] for column in entries),
                numbers=tuple(_short(step.raw[env, column].item()) for column in entries),
                unusual=tuple(_short(step.scaled[env, column].item()) for column in entries),
                heads=tuple(row[0] for row in chosen),
                choices=tuple(row[1] for row in chosen),
                probabilities=tuple(row[2] for row in chosen),
                reasons=tuple(row[3] for row in chosen),
                left_out=len(rows) - len(chosen) + step.raw.shape[1] - len(entries),
            )
        )
    return events


def _choices(
    s: Situation, env: int, head: str, at: np.ndarray, probabilities: Sequence[float]
) -> Iterator[Row]:
    """Every choice of a head. `at` [4] holds the op for the slots, the slot for the blueprints."""
    op, slot = LifecycleOp(int(at[OP])), int(at[SLOT])
    heads: dict[str, tuple[Sequence[str], Callable[[int], str | None]]] = {
        "op": ([each.name for each in LifecycleOp], lambda i: why_no_op(s, env, LifecycleOp(i))),
        "slot": (s.slot_config.names, lambda i: why_no_slot(s, env, op, i)),
        "blueprint": (s.catalogue.names, lambda i: why_no_blueprint(s, env, slot, i)),
        "blend": (BLEND_NAMES, lambda i: None),
    }
    names, why_not = heads[head]
    for index, name in enumerate(names):
        reason = why_not(index)
        probability = None if reason is not None else _rounded(probabilities[index])
        yield head, name, probability, reason or ""


def _most_relevant(rows: list[Row]) -> list[Row]:
    """The most probable choices of each head, then the forbidden ones."""
    kept: list[Row] = []
    for head in HEAD_ORDER:
        own = [row for row in rows if row[0] == head]
        legal = sorted((row for row in own if row[2] is not None), key=lambda row: -(row[2] or 0.0))
        forbidden = [row for row in own if row[2] is None]
        kept += legal[:MOST_CHOICES] + forbidden[:MOST_CHOICES]
    return kept


def _entries(step: PolicyStep, names: Sequence[tuple[str, str]], env: int) -> list[int]:
    """The columns with the largest scaled values, limited per block and for all candidates."""
    far = step.scaled[env].abs().tolist()
    large = {names[0][0], *step.situation.slot_config.names}
    count: Counter[str] = Counter()
    kept = []
    for column in sorted(range(len(far)), key=lambda column: (-far[column], column)):
        block = names[column][0]
        kind, most = (block, MOST_PER_BLOCK) if block in large else ("candidates", MOST_CHOICES)
        count[kind] += 1
        if count[kind] <= most and far[column] > 0.0:
            kept.append(column)
        if len(kept) == MOST_ENTRIES:
            break
    return kept


def _named(s: Situation, action: np.ndarray) -> tuple[str | None, ...]:
    slot, blueprint, blend, index = action.tolist()
    op = LifecycleOp(index)
    relevant = RELEVANT_HEADS[op]
    return (
        op.name,
        s.slot_config.names[slot] if "slot" in relevant else None,
        s.catalogue.names[blueprint] if "blueprint" in relevant else None,
        BLEND_NAMES[blend] if "blend" in relevant else None,
    )


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _short(value: float) -> float:
    return float(f"{value:.4g}")
