"""Two small problems on which a policy is seen to learn: a memory and a conditional bandit."""

import numpy as np

from esper.leyline import NUM_OPS, ActionMasks, LifecycleOp, generator


def all_legal(envs: int, slots: int, blueprints: int, ops: np.ndarray | None = None) -> ActionMasks:
    op = np.ones((envs, NUM_OPS), dtype=bool) if ops is None else ops
    return ActionMasks(
        op=op,
        slot=np.ones((envs, NUM_OPS, slots), dtype=bool),
        blueprint=np.ones((envs, slots, blueprints), dtype=bool),
        blend=np.ones((envs, 3), dtype=bool),
    )


class CueMemory:
    """A cue at the first step, blanks, then the op that answers it; only memory can know it."""

    observation_dim = NUM_OPS + 1
    num_slots = 1
    num_blueprints = 1

    def __init__(self, num_envs: int, key: int, blanks: int = 8) -> None:
        self.num_envs, self.key, self.steps = num_envs, key, blanks + 2
        self.groups = np.arange(num_envs)

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        self.cues = np.array(
            [
                int(generator(self.key, "cue", round_, env).integers(NUM_OPS))
                for env in range(self.num_envs)
            ]
        )
        self.time = 0
        return self._observe()

    def step(self, actions: np.ndarray) -> tuple:
        self.time += 1
        over = self.time == self.steps
        rewards = ((actions[:, 3] == self.cues) & over).astype(np.float32)
        ended = np.full(self.num_envs, over)
        return *self._observe(), rewards, ended, np.zeros_like(ended)

    def _observe(self) -> tuple[np.ndarray, ActionMasks]:
        observations = np.zeros((self.num_envs, self.observation_dim), dtype=np.float32)
        if self.time == 0:
            observations[np.arange(self.num_envs), self.cues] = 1.0
        asked = self.time == self.steps - 1
        observations[:, -1] = asked
        ops = np.full((self.num_envs, NUM_OPS), asked)
        ops[:, LifecycleOp.WAIT] = True
        return observations, all_legal(self.num_envs, 1, 1, ops)


class ConditionalBandit:
    """One step. The context asks for an op; what else counts depends on the op.

    WAIT pays 1. GERMINATE pays a quarter, and a quarter each for the right slot, blueprint and
    blend. CULL pays a quarter, and the rest for the right slot, which is another one. The wrong
    op pays nothing.
    """

    observation_dim = 3
    num_slots = 4
    num_blueprints = 6
    ops = (LifecycleOp.WAIT, LifecycleOp.GERMINATE, LifecycleOp.CULL)
    germinate_right = (1, 4, 2)
    cull_right = 3

    def __init__(self, num_envs: int, key: int) -> None:
        self.num_envs, self.key, self.steps = num_envs, key, 1
        self.groups = np.arange(num_envs)

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        rng = generator(self.key, "bandit", round_)
        self.context = rng.integers(3, size=self.num_envs)
        return self._observe()

    def step(self, actions: np.ndarray) -> tuple:
        rewards = self.rewards(self.context, actions)
        ended = np.ones(self.num_envs, dtype=bool)
        return *self._observe(), rewards, ended, ~ended

    @classmethod
    def rewards(cls, context: np.ndarray, actions: np.ndarray) -> np.ndarray:
        slot, blueprint, blend, op = actions.T
        right_slot, right_blueprint, right_blend = cls.germinate_right
        germinate = 0.25 * (
            1.0 + (slot == right_slot) + (blueprint == right_blueprint) + (blend == right_blend)
        )
        cull = 0.25 + 0.75 * (slot == cls.cull_right)
        paid = np.choose(context, [np.ones(len(op)), germinate, cull])
        return (paid * (op == context)).astype(np.float32)

    def _observe(self) -> tuple[np.ndarray, ActionMasks]:
        ops = np.ones((self.num_envs, NUM_OPS), dtype=bool)
        ops[:, LifecycleOp.FOSSILIZE] = False
        observations = np.eye(3, dtype=np.float32)[self.context]
        return observations, all_legal(self.num_envs, self.num_slots, self.num_blueprints, ops)
