"""The controller that never grows anything: the host alone, in the same training loop."""

import numpy as np

from esper.tamiyo.situation import Situation, wait


class StaticController:
    name = "static"

    def reset(self, n_envs: int) -> None:
        pass

    def act(self, situation: Situation) -> np.ndarray:
        return wait(situation.n_envs)
