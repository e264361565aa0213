"""The controller that plants a different candidate in each environment, for recordings."""

import numpy as np

from esper.leyline import BLEND, BLUEPRINT, OP, SLOT, LifecycleOp, generator
from esper.tamiyo.situation import Situation, wait


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
