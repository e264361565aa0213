"""The controller that follows a policy that was learnt."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from esper.growth.blueprints.catalogue import BlueprintCatalogue
from esper.leyline import HEAD_NAMES, ConfigError, LifecycleOp, generator
from esper.leyline.events import Decided
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.set_network import SetActorCritic
from esper.simic.training.checkpoint import load_state
from esper.simic.training.reasons import Look, reasons_of
from esper.simic.training.space import Space
from esper.simic.training.state import TrainState
from esper.tamiyo.situation import Situation
from esper.tolaria.families import BUILT_IN


class LearnedController:
    """Takes the most probable action of a trained policy; with `deterministic=False` it draws,
    as a function of the episode's key and the step.

    A flat policy decides for hosts with as many slots, and for the blueprints, that it was trained
    with; others are refused with ConfigError. One over sets decides for any: it plants blueprints
    that it has learnt with, and others only in hosts that none of these fits. Neither plants more
    seeds at a time than it has learnt with.
    """

    def __init__(self, state: TrainState, name: str = "learned", deterministic: bool = True):
        self.agent, self.space = state.agent, state.space
        self.observations = state.observations
        self.task: str | None = state.settings.get("task")
        family = BUILT_IN.get(state.settings.get("family") or "")
        # How the networks arrived that it has learnt with; empty if that is not known.
        self.starts: tuple[str, ...] = () if family is None else family.starts
        self.max_seeds: int | None = state.settings.get("max_seeds")
        self.learnt_with = state.space.blueprints
        self.name, self.deterministic = name, deterministic

    @staticmethod
    def load(path: str | Path, *, deterministic: bool = True) -> "LearnedController":
        """From a run directory (its newest checkpoint) or a single checkpoint."""
        return LearnedController(load_state(path), str(path), deterministic)

    def check_fit(self, num_slots: int, catalogue: BlueprintCatalogue) -> None:
        """Raises ConfigError if the policy was made for other slots or blueprints."""
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
        """Be the policy for these slots and blueprints."""
        self.check_fit(num_slots, catalogue)
        space = Space.of(num_slots, catalogue.names, self.space.kind)
        network = self.agent.network
        if space != self.space and isinstance(network, SetActorCritic):
            fitted = network.fitted(num_slots, len(catalogue))
            self.agent = PPOAgent(fitted, self.agent.config, self.agent.device)
            self.space = space

    def act(self, situation: Situation) -> np.ndarray:
        self._fit(situation.slot_config.num_slots, situation.catalogue)
        situation = _familiar(_capped(situation, self.max_seeds), self.learnt_with)
        seen, _ = self.space.look(situation)
        raw = torch.from_numpy(seen)
        scaled = self.observations.normalize(raw)
        draws = None if self.deterministic else _draws(situation)
        decision = self.agent.act(scaled, self.hidden, situation.masks, draws)
        self.look = Look(situation, raw, scaled, self.hidden, decision.values)
        self.hidden = decision.hidden
        return decision.actions

    def reasons(self, actions: np.ndarray) -> list[Decided]:
        shown = self.look.situation
        names = self.space.names(shown.slot_config.names)
        return reasons_of(self.agent, self.look, names, actions)


def _capped(situation: Situation, max_seeds: int | None) -> Situation:
    """The same with at most so many seeds at a time."""
    allowed = situation.max_seeds
    if max_seeds is None or (allowed is not None and allowed <= max_seeds):
        return situation
    full = situation.table.holds_seed.sum(axis=1) >= max_seeds
    op, slot = situation.masks.op.copy(), situation.masks.slot.copy()
    op[full, LifecycleOp.GERMINATE] = slot[full, LifecycleOp.GERMINATE] = False
    masks = replace(situation.masks, op=op, slot=slot)
    return replace(situation, masks=masks, max_seeds=max_seeds)


def _familiar(situation: Situation, blueprints: Sequence[str]) -> Situation:
    """The same without all other blueprints, where any of these fits the host."""
    known, facts = np.isin(situation.catalogue.names, blueprints), situation.facts
    if known.all() or facts is None or not (facts.fits & known).any():
        return situation
    masks, grows = situation.masks, LifecycleOp.GERMINATE
    op, slot, blueprint = masks.op.copy(), masks.slot.copy(), masks.blueprint & known
    slot[:, grows] &= blueprint.any(axis=2)
    op[:, grows] &= slot[:, grows].any(axis=1)
    masks = replace(masks, op=op, slot=slot, blueprint=blueprint)
    return replace(situation, masks=masks, facts=replace(facts, fits=facts.fits & known))


def _draws(situation: Situation) -> np.ndarray:
    return np.stack(
        [
            generator(int(key), "policy", situation.step).random(len(HEAD_NAMES))
            for key in situation.keys
        ]
    )
