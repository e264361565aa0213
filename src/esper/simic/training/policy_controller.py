"""The controller that follows a trained policy."""

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
from esper.simic.training.reasons import PolicyStep, decision_events
from esper.simic.training.space import Space
from esper.simic.training.state import TrainState
from esper.tamiyo.situation import Situation
from esper.tolaria.families import BUILT_IN


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
        """Adapt a policy over sets to these slots and blueprints."""
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
    return np.stack(
        [
            generator(int(key), "policy", situation.step).random(len(HEAD_NAMES))
            for key in situation.keys
        ]
    )
