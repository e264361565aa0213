"""Controllers without any rule: wait, act at random, plant one given candidate."""

import numpy as np

from esper.leyline import BLEND, BLUEPRINT, OP, SLOT, LifecycleOp, generator
from esper.tamiyo.situation import Situation, wait


class StaticController:
    name = "static"

    def reset(self, n_envs: int) -> None:
        pass

    def act(self, situation: Situation) -> np.ndarray:
        return wait(situation.n_envs)


class RandomController:
    """Uniform over the legal ops, then over the op's legal slots, then blueprints and blends.

    This is what an untrained policy does. Draws depend on the episode's key and the step; for
    environments with the same key also on their order.
    """

    name = "random"

    def reset(self, n_envs: int) -> None:
        pass

    def act(self, situation: Situation) -> np.ndarray:
        masks = situation.masks
        draws = _draws(situation)
        envs = np.arange(situation.n_envs)
        op = _pick(masks.op, draws[:, OP])
        slot = _pick(masks.slot[envs, op], draws[:, SLOT])
        germinates = op == LifecycleOp.GERMINATE
        actions = wait(situation.n_envs)
        actions[:, OP] = op
        actions[:, SLOT] = np.where(op == LifecycleOp.WAIT, 0, slot)
        blueprint = _pick(masks.blueprint[envs, slot], draws[:, BLUEPRINT])
        actions[:, BLUEPRINT] = np.where(germinates, blueprint, 0)
        actions[:, BLEND] = np.where(germinates, _pick(masks.blend, draws[:, BLEND]), 0)
        return actions


def _draws(situation: Situation) -> np.ndarray:
    keys, drawn = situation.keys.tolist(), []
    for env, key in enumerate(keys):
        earlier = keys[:env].count(key)
        which = (earlier,) if earlier else ()
        drawn.append(generator(key, "random", situation.step, *which).random(4))
    return np.stack(drawn)


def _pick(mask: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """Index of one True entry per row of `mask` [E, n], chosen by `draw` in [0, 1)."""
    rank = np.floor(draw * mask.sum(axis=1)).astype(np.int64)
    return (mask.cumsum(axis=1) > rank[:, None]).argmax(axis=1)


class EachController:
    """Plants one legal candidate per environment before the first step, and nothing in one of them.

    The candidates follow one another from one drawn by the key on. A seed that may be kept is kept.
    """

    name = "each"

    def reset(self, n_envs: int) -> None:
        pass

    def act(self, situation: Situation) -> np.ndarray:
        actions, masks = wait(situation.n_envs), situation.masks
        if situation.step > 0:
            ripe = masks.op[:, LifecycleOp.FOSSILIZE]
            actions[ripe, OP] = LifecycleOp.FOSSILIZE
            actions[ripe, SLOT] = masks.slot[ripe, LifecycleOp.FOSSILIZE].argmax(axis=1)
            return actions
        slot_masks = masks.slot[:, LifecycleOp.GERMINATE]
        for env, key in enumerate(situation.keys.tolist()):
            candidates = np.argwhere(slot_masks[env][:, None] & masks.blueprint[env])
            first = int(generator(key, "each").integers(len(candidates) + 1))
            chosen = (first + env) % (len(candidates) + 1)
            if chosen < len(candidates):
                actions[env, OP] = LifecycleOp.GERMINATE
                actions[env, [SLOT, BLUEPRINT]] = candidates[chosen]
                actions[env, BLEND] = masks.blend[env].argmax()
        return actions
