"""What a policy saw and thought before it decided, by the names of things."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
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
TOLD = ("op", "slot", "blueprint", "blend")  # the order in which heads are drawn

# (head, choice, probability, reason)
Row = tuple[str, str, float | None, str]


@dataclass(frozen=True)
class Look:
    """What a policy was shown: the observation as it is (`raw`) and as the network gets it, both
    [E, D], and the hidden state before; and the values [E] that it gave."""

    situation: Situation
    raw: Tensor
    scaled: Tensor
    hidden: Hidden
    values: Tensor


@torch.inference_mode()
def reasons_of(
    agent: PPOAgent, look: Look, names: Sequence[tuple[str, str]], actions: np.ndarray
) -> list[Decided]:
    """An event for each running environment, about what the policy thought of `actions` [E, 4]
    and of what else it might have done. `names` are (block, entry) of each column observed."""
    s, network = look.situation, agent.network
    masks = MaskTensors.of(s.masks, agent.device)
    features, _ = network.encode(look.scaled.to(agent.device), look.hidden)
    taken = torch.from_numpy(actions).to(agent.device)
    _, _, done, _ = network.decide(features, masks, actions=taken)
    # Where seeds can be planted at all: what it would plant, and where.
    can = masks.op[:, LifecycleOp.GERMINATE]
    germinate = torch.zeros_like(masks.op)
    germinate[:, LifecycleOp.GERMINATE] = can
    germinate[:, LifecycleOp.WAIT] = ~can
    planted, _, wished, _ = network.decide(features, masks._replace(op=germinate))

    events = []
    for env in np.flatnonzero(s.running).tolist():
        op = LifecycleOp(int(actions[env, OP]))
        supposed = op == LifecycleOp.WAIT and bool(can[env])
        asked = RELEVANT_HEADS[LifecycleOp.GERMINATE if supposed else op]
        shown = wished if supposed else done
        at = planted[env].cpu().numpy() if supposed else actions[env]
        rows: list[Row] = []
        for head in TOLD:
            if head in asked:
                source = done if head == "op" else shown
                probabilities = source[HEAD_NAMES.index(head)].probs[env].tolist()
                rows += _choices(s, env, head, at, probabilities)
        chosen, left_out = _most_telling(rows)
        entries = _entries(look, names, env)
        events.append(
            Decided(
                env,
                s.step + 1,
                taken=_named(s, actions[env]),
                value=_rounded(look.values[env].item()),
                supposed=supposed,
                blocks=tuple(names[column][0] for column in entries),
                entries=tuple(names[column][1] for column in entries),
                numbers=tuple(_short(look.raw[env, column].item()) for column in entries),
                unusual=tuple(_short(look.scaled[env, column].item()) for column in entries),
                heads=tuple(row[0] for row in chosen),
                choices=tuple(row[1] for row in chosen),
                probabilities=tuple(row[2] for row in chosen),
                reasons=tuple(row[3] for row in chosen),
                left_out=left_out + look.raw.shape[1] - len(entries),
            )
        )
    return events


def _choices(
    s: Situation, env: int, head: str, at: np.ndarray, probabilities: Sequence[float]
) -> Iterator[Row]:
    """Every choice of a head; for a slot `at` says the op, for a blueprint the slot."""
    op, slot = LifecycleOp(int(at[OP])), int(at[SLOT])
    names: dict[str, Sequence[str]] = {
        "op": [each.name for each in LifecycleOp],
        "slot": s.slot_config.names,
        "blueprint": s.catalogue.names,
        "blend": BLEND_NAMES,
    }
    for index, name in enumerate(names[head]):
        reason = None
        if head == "op":
            reason = why_no_op(s, env, LifecycleOp(index))
        elif head == "slot":
            reason = why_no_slot(s, env, op, index)
        elif head == "blueprint":
            reason = why_no_blueprint(s, env, slot, index)
        probability = None if reason is not None else _rounded(probabilities[index])
        yield head, name, probability, reason or ""


def _most_telling(rows: list[Row]) -> tuple[list[Row], int]:
    """The likeliest choices of each head, then those that were forbidden; how many are left out."""
    kept: list[Row] = []
    for head in TOLD:
        own = [row for row in rows if row[0] == head]
        legal = sorted((row for row in own if row[2] is not None), key=lambda row: -(row[2] or 0.0))
        forbidden = [row for row in own if row[2] is None]
        kept += legal[:MOST_CHOICES] + forbidden[:MOST_CHOICES]
    return kept, len(rows) - len(kept)


def _entries(look: Look, names: Sequence[tuple[str, str]], env: int) -> list[int]:
    """The columns that are farthest from what the network takes for usual, not too many of any
    block, nor of candidates, of which there are many."""
    far = look.scaled[env].abs().tolist()
    large = {names[0][0], *look.situation.slot_config.names}
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
    asked = RELEVANT_HEADS[op]
    return (
        op.name,
        s.slot_config.names[slot] if "slot" in asked else None,
        s.catalogue.names[blueprint] if "blueprint" in asked else None,
        BLEND_NAMES[blend] if "blend" in asked else None,
    )


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _short(value: float) -> float:
    return float(f"{value:.4g}")
