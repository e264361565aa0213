"""What the environments are made of: E copies of a growth problem, and how they are rendered."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from gymnasium import spaces

from esper.leyline import (
    BLEND_NAMES,
    BLUEPRINT,
    HOLDS_SEED,
    NUM_OPS,
    OP,
    SLOT,
    ActionMasks,
    ConfigError,
    LifecycleOp,
    SeedStage,
    generator,
    shortened,
)
from esper.observatory.formatting import stage_name
from esper.simic import analytic


@dataclass(frozen=True)
class Observed:
    """What E copies show: observations [E, n], masks, and further information, arrays [E]."""

    observations: np.ndarray
    masks: ActionMasks
    info: Mapping[str, np.ndarray]


class Problem(ABC):
    """E copies that step together. Episodes have `length` steps: all start and end at once.

    slots, blueprints  names of them
    actions            the last ones, int64 [E, 4]; all zeros is WAIT
    stages             the stage of every slot, [E, S]
    """

    length: int
    actions: np.ndarray
    stages: np.ndarray

    def __init__(
        self,
        n_envs: int,
        slots: Sequence[str],
        blueprints: Sequence[str],
        observation_space: spaces.Space[Any],
    ) -> None:
        self.n_envs, self.slots, self.blueprints = n_envs, slots, blueprints
        self.observation_space = observation_space
        self.sizes = (len(slots), len(blueprints), len(BLEND_NAMES), NUM_OPS)

    @abstractmethod
    def reset(self, keys: Sequence[int]) -> Observed:
        """Start an episode for each copy; what is random in it depends on its key only."""

    @abstractmethod
    def step(self, actions: np.ndarray) -> tuple[Observed, np.ndarray, bool]:
        """What is observed after legal actions (int [E, 4]), rewards [E], and whether it ends."""

    @abstractmethod
    def headline(self, env: int, action: str) -> str:
        """A line about one copy, with its last action."""

    @abstractmethod
    def describe_seed(self, env: int, slot: int) -> str:
        """The blueprint of a slot's seed and what else the text shows of it; empty without one."""

    def text(self, env: int) -> str:
        """One copy for a terminal: a headline, and a line for each slot."""
        op = LifecycleOp(int(self.actions[env, OP]))
        action = op.name
        if op == LifecycleOp.GERMINATE:
            action += f" {self.blueprints[self.actions[env, BLUEPRINT]]}"
        if op != LifecycleOp.WAIT:
            action += f" in {self.slots[self.actions[env, SLOT]]}"
        lines = [self.headline(env, action)]
        for slot, stage in enumerate(self.stages[env]):
            seed = self.describe_seed(env, slot)
            lines.append(
                f"  {self.slots[slot]}: {stage_name(SeedStage(stage).name)} {seed}".rstrip()
            )
        return "\n".join(lines) + "\n"


class FactoredActions:
    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.space: spaces.Space[Any] = spaces.MultiDiscrete(list(sizes))

    def mask(self, masks: ActionMasks) -> np.ndarray:
        # The other heads do not matter for WAIT, so they need no choices for it.
        slot = masks.slot[:, LifecycleOp.WAIT + 1 :].any(axis=1)
        germinates = masks.slot[:, LifecycleOp.GERMINATE]
        blueprint = (masks.blueprint & germinates[:, :, None]).any(axis=1)
        blend = masks.blend & masks.op[:, LifecycleOp.GERMINATE, None]
        heads = [slot, blueprint, blend, masks.op]
        for head in heads:
            # A head that does not matter has one choice: no entropy, nothing to learn.
            head[:, 0] |= ~head.any(axis=1)
        return np.concatenate(heads, axis=1)

    def rows(self, actions: np.ndarray) -> np.ndarray:
        return _checked(self.space, actions)


class FlatActions:
    """Number 0 is WAIT; `table` [n, 4] has the row of every number."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        slots, blueprints, blends, _ = sizes
        op = LifecycleOp
        rows = [(0, 0, 0, int(op.WAIT))]
        rows += [
            (*choice, int(op.GERMINATE))
            for choice in product(range(slots), range(blueprints), range(blends))
        ]
        rows += [(slot, 0, 0, int(o)) for o, slot in product((op.CULL, op.FOSSILIZE), range(slots))]
        self.table = np.array(rows, dtype=np.int64)
        self.space: spaces.Space[Any] = spaces.Discrete(len(rows))

    def mask(self, masks: ActionMasks) -> np.ndarray:
        slot, blueprint, blend, op = self.table.T
        seed = masks.blueprint[:, slot, blueprint] & masks.blend[:, blend]
        return np.asarray(
            masks.op[:, op] & masks.slot[:, op, slot] & (seed | (op != LifecycleOp.GERMINATE))
        )

    def rows(self, actions: np.ndarray) -> np.ndarray:
        return self.table[_checked(self.space, actions)]


def _checked(space: spaces.Space[Any], actions: np.ndarray) -> np.ndarray:
    found = np.asarray(actions)
    for action in found:
        if not space.contains(action):
            raise ConfigError(f"action {shortened(str(action))} is not in {space}")
    return found.astype(np.int64)


ENCODINGS: dict[str, type[FactoredActions | FlatActions]] = {
    "factored": FactoredActions,
    "flat": FlatActions,
}


@cache
def solution() -> analytic.Solution:
    """The best policy of the analytic problem and its value, by dynamic programming."""
    return analytic.solve()


class AnalyticProblem(Problem):
    length = analytic.HORIZON

    def __init__(self, n_envs: int) -> None:
        super().__init__(
            n_envs,
            [f"slot {slot}" for slot in range(analytic.NUM_SLOTS)],
            [f"blueprint {number}" for number in range(analytic.NUM_BLUEPRINTS)],
            spaces.Box(0.0, 1.0, (analytic.OBSERVATION_DIM,), np.float32),
        )
        self.env = analytic.AnalyticGrowth(n_envs)

    def reset(self, keys: Sequence[int]) -> Observed:
        observations, masks = self.env.begin([generator(key, "analytic") for key in keys])
        self.actions = np.zeros((self.n_envs, len(self.sizes)), dtype=np.int64)
        self.returns = np.zeros(self.n_envs)
        return self._observe(observations, masks)

    def step(self, actions: np.ndarray) -> tuple[Observed, np.ndarray, bool]:
        observations, masks, rewards, terminated, _ = self.env.step(actions)
        self.actions, self.returns = actions, self.returns + rewards
        return self._observe(observations, masks), rewards, bool(terminated.all())

    def _observe(self, observations: np.ndarray, masks: ActionMasks) -> Observed:
        first, second = self.env.states.T
        self.stages = self.env.stages
        best = solution().value[self.env.time, first, second]
        return Observed(observations, masks, {"optimal_value": best})

    def headline(self, env: int, action: str) -> str:
        return f"step {self.env.time} of {self.length}, {action}, return {self.returns[env]:+.2f}"

    def describe_seed(self, env: int, slot: int) -> str:
        state = analytic.STATES[self.env.states[env, slot]]
        return self.blueprints[state.blueprint] if HOLDS_SEED[state.stage] else ""
