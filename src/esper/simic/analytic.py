"""A growth problem small enough to solve exactly, to test whether an agent learns.

Two slots, three blueprints, one operation per step. Planting a seed costs its price; it pays rent
while it lives, and after a few steps turns out good or bad. Only then can it be kept: a good seed
earns in every remaining step, a bad one loses. Seeds do worse while the host is young, and better
with the right blend for the slot; the largest blueprint fits only the second slot. A good policy
waits, plants what pays back in the time left, keeps good seeds and removes bad ones.

Order of a step: action -> reward(state) -> seeds age and change their stage
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from esper.leyline import (
    BLEND_NAMES,
    BLUEPRINT,
    HOLDS_SEED,
    OP,
    SLOT,
    ActionMasks,
    LifecycleOp,
    SeedStage,
    generator,
)

NUM_SLOTS = 2
NUM_BLUEPRINTS = 3
NUM_BLENDS = len(BLEND_NAMES)
HORIZON = 16
YOUNG_STEPS = 3
EMBARGO = 2

TRAIN_STEPS = (1, 2, 3)
PRICE = (0.05, 0.10, 0.20)
RENT = (0.02, 0.03, 0.05)
EARNINGS = (0.06, 0.12, 0.30)
BAD_EARNINGS = -0.10
CHANCE_OF_GOOD = (0.45, 0.55, 0.60)
YOUNG_FACTOR = 0.1
RIGHT_BLEND = (1, 2)
RIGHT_BLEND_BONUS = 0.25
FITS = np.array([[True, True, False], [True, True, True]])


@dataclass(frozen=True)
class SlotState:
    """`quality` of a seed in training is 2 * (host was old) + (blend was right)."""

    stage: SeedStage
    blueprint: int = 0
    age: int = 0
    quality: int = 0
    good: bool = False

    @property
    def chance(self) -> float:
        factor = 1.0 if self.quality & 2 else YOUNG_FACTOR
        return factor * (CHANCE_OF_GOOD[self.blueprint] + RIGHT_BLEND_BONUS * (self.quality & 1))

    @property
    def earnings(self) -> float:
        """Reward of the slot in one step."""
        if self.stage == SeedStage.FOSSILIZED:
            return EARNINGS[self.blueprint] if self.good else BAD_EARNINGS
        if self.stage in (SeedStage.TRAINING, SeedStage.HOLDING):
            return -RENT[self.blueprint]
        return 0.0


def _all_states() -> list[SlotState]:
    states = [SlotState(SeedStage.DORMANT)]
    for blueprint in range(NUM_BLUEPRINTS):
        states += [
            SlotState(SeedStage.TRAINING, blueprint, age, quality)
            for age, quality in product(range(TRAIN_STEPS[blueprint]), range(4))
        ]
        states += [
            SlotState(stage, blueprint, good=good)
            for stage, good in product((SeedStage.HOLDING, SeedStage.FOSSILIZED), (False, True))
        ]
    return states + [SlotState(SeedStage.EMBARGOED, age=age) for age in range(EMBARGO)]


STATES = _all_states()
_INDEX = {state: index for index, state in enumerate(STATES)}
_STAGE = np.array([int(state.stage) for state in STATES])
_EARNINGS = np.array([state.earnings for state in STATES])
_CHANCE = np.array([s.chance if s.stage == SeedStage.TRAINING else 0.0 for s in STATES])
_DORMANT = _INDEX[SlotState(SeedStage.DORMANT)]
_LIVE = np.isin(_STAGE, (SeedStage.TRAINING, SeedStage.HOLDING))
# _LEGAL[op, state]
_LEGAL = np.stack(
    [np.full(len(STATES), True), _STAGE == SeedStage.DORMANT, _LIVE, _STAGE == SeedStage.HOLDING]
)


def _tick(state: SlotState, good: bool) -> int:
    """The state after one step; `good` decides if the seed completes its training now."""
    if state.stage == SeedStage.TRAINING:
        if state.age + 1 == TRAIN_STEPS[state.blueprint]:
            return _INDEX[SlotState(SeedStage.HOLDING, state.blueprint, good=good)]
        return _INDEX[SlotState(SeedStage.TRAINING, state.blueprint, state.age + 1, state.quality)]
    if state.stage == SeedStage.EMBARGOED:
        if state.age + 1 == EMBARGO:
            return _DORMANT
        return _INDEX[SlotState(SeedStage.EMBARGOED, age=state.age + 1)]
    return _INDEX[state]


# _AFTER_TICK[good, state]
_AFTER_TICK = np.array([[_tick(state, good) for state in STATES] for good in (False, True)])


def _after_action(action: Sequence[int], state: int, step: int) -> int:
    """The state of the chosen slot after a legal action (slot, blueprint, blend, op)."""
    slot, blueprint, blend, op = action
    if op == LifecycleOp.GERMINATE:
        quality = 2 * (step >= YOUNG_STEPS) + (blend == RIGHT_BLEND[slot])
        return _INDEX[SlotState(SeedStage.TRAINING, blueprint, quality=int(quality))]
    if op == LifecycleOp.CULL:
        return _INDEX[SlotState(SeedStage.EMBARGOED)]
    if op == LifecycleOp.FOSSILIZE:
        kept = STATES[state]
        return _INDEX[SlotState(SeedStage.FOSSILIZED, kept.blueprint, good=kept.good)]
    return state


def _features(state: SlotState) -> list[float]:
    stages = dict.fromkeys(each.stage for each in STATES)
    holds = bool(HOLDS_SEED[state.stage])
    return [
        *(float(state.stage == stage) for stage in stages),
        *(float(holds and state.blueprint == b) for b in range(NUM_BLUEPRINTS)),
        state.age / max(TRAIN_STEPS),
        float(state.good),
    ]


_FEATURES = np.array([_features(state) for state in STATES], dtype=np.float32)
OBSERVATION_DIM = 2 + NUM_SLOTS * _FEATURES.shape[1]


class AnalyticGrowth:
    """E environments with this problem.

    Every episode has HORIZON steps and then terminates. Its randomness is a function of (key,
    round, group); `group` environments form a group. With `spread` hosts differ: the last step
    adds to each member of a group the same normal number with that standard deviation.
    """

    def __init__(self, num_envs: int, key: int = 0, group: int = 1, spread: float = 0.0) -> None:
        self.num_envs = num_envs
        self.key = key
        self.groups = np.arange(num_envs) // group
        self.spread = spread

    def reset(self, round_: int = 0) -> tuple[np.ndarray, ActionMasks]:
        return self.begin(
            [generator(self.key, "analytic", round_, int(group)) for group in self.groups]
        )

    def begin(self, generators: Sequence[np.random.Generator]) -> tuple[np.ndarray, ActionMasks]:
        """Begin episodes with one random generator for each environment."""
        self.time = 0
        self.states = np.full((self.num_envs, NUM_SLOTS), _DORMANT)
        self._luck = np.stack([rng.random((HORIZON, NUM_SLOTS)) for rng in generators])
        self._host = self.spread * np.array([rng.normal() for rng in generators])
        return self._observation(), self._masks()

    @property
    def stages(self) -> np.ndarray:
        """[E, S]: the stage of every slot."""
        return _STAGE[self.states]

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, ActionMasks, np.ndarray, np.ndarray, np.ndarray]:
        """Observations, masks, rewards, terminated, truncated, each for all E environments."""
        if self.time >= HORIZON:
            raise RuntimeError("the episodes are over; reset first")
        legal = self._masks().allows(actions)
        if not legal.all():
            raise ValueError(f"environment {int(np.argmin(legal))} was given an illegal action")
        germinates = actions[:, OP] == LifecycleOp.GERMINATE
        rewards = -np.where(germinates, np.take(PRICE, actions[:, BLUEPRINT]), 0.0)
        self._apply(actions)
        rewards += _EARNINGS[self.states].sum(axis=1)
        good = self._luck[:, self.time] < _CHANCE[self.states]
        self.states = _AFTER_TICK[good.astype(int), self.states]
        self.time += 1
        terminated = np.full(self.num_envs, self.time == HORIZON)
        rewards += np.where(terminated, self._host, 0.0)
        return (
            self._observation(),
            self._masks(),
            rewards.astype(np.float32),
            terminated,
            np.zeros(self.num_envs, dtype=bool),
        )

    def _apply(self, actions: np.ndarray) -> None:
        for state, action in zip(self.states, actions.tolist(), strict=True):
            state[action[SLOT]] = _after_action(action, state[action[SLOT]], self.time)

    def _masks(self) -> ActionMasks:
        slot = np.moveaxis(_LEGAL[:, self.states], 0, 1)
        return ActionMasks(
            op=np.asarray(slot.any(axis=2)),
            slot=slot,
            blueprint=np.broadcast_to(FITS, (self.num_envs, *FITS.shape)),
            blend=np.ones((self.num_envs, NUM_BLENDS), dtype=bool),
        )

    def _observation(self) -> np.ndarray:
        clock = np.array([self.time / HORIZON, float(self.time < YOUNG_STEPS)], dtype=np.float32)
        slots = _FEATURES[self.states].reshape(self.num_envs, -1)
        return np.concatenate([np.tile(clock, (self.num_envs, 1)), slots], axis=1)


@dataclass(frozen=True)
class Solution:
    """`value[t, i, j]`: best expected return from step t with the slots in states i and j.

    `action[t, i, j]` is the row of `actions`, which has columns (slot, blueprint, blend, op).
    """

    value: np.ndarray
    action: np.ndarray
    actions: np.ndarray

    @property
    def optimum(self) -> float:
        return float(self.value[0, _DORMANT, _DORMANT])

    def act(self, time: int, states: np.ndarray) -> np.ndarray:
        """Best actions [E, 4] for slots in `states` [E, 2]."""
        return self.actions[self.action[time, states[:, 0], states[:, 1]]]


def solve() -> Solution:
    """Dynamic programming over every pair of slot states, backwards from the last step."""
    n = len(STATES)
    everything = np.arange(n)
    choices = [(0, 0, 0, int(LifecycleOp.WAIT))]
    for slot in range(NUM_SLOTS):
        choices += [
            (slot, blueprint, blend, int(LifecycleOp.GERMINATE))
            for blueprint, blend in product(range(NUM_BLUEPRINTS), range(NUM_BLENDS))
            if FITS[slot, blueprint]
        ]
        choices += [(slot, 0, 0, int(op)) for op in (LifecycleOp.CULL, LifecycleOp.FOSSILIZE)]
    tick = np.zeros((n, n))
    tick[everything, _AFTER_TICK[1]] += _CHANCE
    tick[everything, _AFTER_TICK[0]] += 1.0 - _CHANCE
    value = np.zeros((HORIZON + 1, n, n))
    best = np.zeros((HORIZON, n, n), dtype=np.int64)
    for time in reversed(range(HORIZON)):
        # Value of every pair of states after the action: earnings of this step and all later ones.
        settled = _EARNINGS[:, None] + _EARNINGS[None, :] + tick @ value[time + 1] @ tick.T
        options = np.stack([_expected(choice, settled, time) for choice in choices])
        best[time] = options.argmax(axis=0)
        value[time] = options.max(axis=0)
    return Solution(value, best, np.array(choices))


def _expected(choice: tuple[int, int, int, int], settled: np.ndarray, time: int) -> np.ndarray:
    """Expected return [n, n] of one action in every pair of states, -inf where it is illegal."""
    slot, blueprint, _, op = choice
    legal = np.flatnonzero(_LEGAL[op])
    values = settled if slot == 0 else settled.T
    expected = np.full(values.shape, -np.inf)
    expected[legal] = values[[_after_action(choice, int(state), time) for state in legal]]
    if op == LifecycleOp.GERMINATE:
        expected -= PRICE[blueprint]
    return expected if slot == 0 else expected.T
