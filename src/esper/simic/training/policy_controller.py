"""The controller that follows a trained policy, and the reasons that it gives."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.growth.blueprints.catalogue import BlueprintCatalogue
from esper.leyline import (
    BLEND_NAMES,
    HEAD_NAMES,
    OP,
    RELEVANT_HEADS,
    SLOT,
    ConfigError,
    LifecycleOp,
    generator,
)
from esper.leyline.events import Decided
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.set_network import SetActorCritic
from esper.simic.agent.types import Hidden, MaskTensors
from esper.simic.training.checkpoint import load_state
from esper.simic.training.env_specs import Space
from esper.simic.training.state import TrainState
from esper.tamiyo.situation import Situation, why_no_blueprint, why_no_op, why_no_slot
from esper.tolaria.families import BUILT_IN

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


class LearnedController:
    """Takes the most probable action of a trained policy; with `deterministic=False` it samples,
    as a function of the episode's key and the step.

    A flat policy works for the number of slots and the blueprints that it was trained with; others
    are refused with ConfigError. A policy over sets works for any: it plants blueprints that it was
    trained with, and others only in hosts that none of these fits. Neither plants more seeds at a
    time than in its training.
    """

    def __init__(self, state: TrainState, name: str = "learned", deterministic: bool = True):
        self.agent, self.space = state.agent, state.space
        self.observations = state.observations
        self.task: str | None = state.settings.get("task")
        family = BUILT_IN.get(state.settings.get("family") or "")
        # How its hosts started, fresh or trained; empty if that is not known.
        self.starts: tuple[str, ...] = () if family is None else family.starts
        self.max_seeds: int | None = state.settings.get("growth.max_seeds")
        self.known_blueprints = state.space.blueprints
        self.name, self.deterministic = name, deterministic

    @staticmethod
    def load(path: str | Path, *, deterministic: bool = True) -> "LearnedController":
        """From a run directory (its newest checkpoint) or a single checkpoint."""
        return LearnedController(load_state(path), str(path), deterministic)

    def check_fit(self, num_slots: int, catalogue: BlueprintCatalogue) -> None:
        """Raises ConfigError if the policy was trained for other slots or blueprints."""
        if self.space.kind == "set":
            return
        if num_slots != self.space.num_slots:
            raise ConfigError(
                f"the policy {self.name} decides for {self.space.num_slots} slots, "
                f"this network has {num_slots}; name as many, or train a policy for it"
            )
        if tuple(catalogue.names) != self.space.blueprints:
            raise ConfigError(
                f"the policy {self.name} was trained with the blueprints "
                f"{', '.join(self.space.blueprints)}; here there are {', '.join(catalogue.names)}"
            )

    def reset(self, n_envs: int) -> None:
        self.hidden = self.agent.initial_hidden(n_envs)

    def state_dict(self) -> dict[str, torch.Tensor]:
        h, c = self.hidden
        return {"h": h.clone(), "c": c.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.hidden = (state["h"], state["c"])

    def _fit(self, num_slots: int, catalogue: BlueprintCatalogue) -> None:
        """Adapt a policy over sets to these slots and blueprints; raises ConfigError."""
        self.check_fit(num_slots, catalogue)
        space = Space.of(num_slots, catalogue.names, self.space.kind)
        network = self.agent.network
        if space != self.space and isinstance(network, SetActorCritic):
            fitted = network.fitted(num_slots, len(catalogue))
            self.agent = PPOAgent(fitted, self.agent.config, self.agent.device)
            self.space = space

    def act(self, situation: Situation) -> np.ndarray:
        self._fit(situation.slot_config.num_slots, situation.catalogue)
        situation = _only_known(_capped(situation, self.max_seeds), self.known_blueprints)
        observations, _ = self.space.observe(situation)
        raw = torch.from_numpy(observations)
        scaled = self.observations.normalize(raw)
        draws = None if self.deterministic else _draws(situation)
        decision = self.agent.act(scaled, self.hidden, situation.masks, draws)
        self.last_step = PolicyStep(situation, raw, scaled, self.hidden, decision.values)
        self.hidden = decision.hidden
        return decision.actions

    def reasons(self, actions: np.ndarray) -> list[Decided]:
        names = self.space.names(self.last_step.situation.slot_config.names)
        return decision_events(self.agent, self.last_step, names, actions)


def _capped(situation: Situation, max_seeds: int | None) -> Situation:
    """The situation with at most so many seeds at a time."""
    allowed = situation.max_seeds
    if max_seeds is None or (allowed is not None and allowed <= max_seeds):
        return situation
    full = situation.table.holds_seed.sum(axis=1) >= max_seeds
    op, slot = situation.masks.op.copy(), situation.masks.slot.copy()
    op[full, LifecycleOp.GERMINATE] = slot[full, LifecycleOp.GERMINATE] = False
    masks = replace(situation.masks, op=op, slot=slot)
    return replace(situation, masks=masks, max_seeds=max_seeds)


def _only_known(situation: Situation, blueprints: Sequence[str]) -> Situation:
    """The situation without other blueprints, if any of these fits the host."""
    known, facts = np.isin(situation.catalogue.names, blueprints), situation.facts
    if known.all() or facts is None or not (facts.fits & known).any():
        return situation
    masks, germinate = situation.masks, LifecycleOp.GERMINATE
    op, slot, blueprint = masks.op.copy(), masks.slot.copy(), masks.blueprint & known
    slot[:, germinate] &= blueprint.any(axis=2)
    op[:, germinate] &= slot[:, germinate].any(axis=1)
    masks = replace(masks, op=op, slot=slot, blueprint=blueprint)
    return replace(situation, masks=masks, facts=replace(facts, fits=facts.fits & known))


def _draws(situation: Situation) -> np.ndarray:
    keys, step = situation.keys.tolist(), situation.step
    return np.stack([generator(key, "policy", step).random(len(HEAD_NAMES)) for key in keys])
