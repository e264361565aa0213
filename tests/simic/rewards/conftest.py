"""Random lives of seeds in real networks, played once for all tests of rewards."""

import pytest

from esper.leyline import History
from esper.tamiyo.controllers.simple import RandomController
from esper.tolaria.engine.run import play
from helpers import break_host
from reward_support import small_env


@pytest.fixture(scope="session")
def lifecycles():
    """([transitions of an episode], recorder); in each the second of three hosts breaks down."""
    episodes, recorder = [], History()
    for episode, on_panic in enumerate(("terminate", "continue", "terminate", "continue")):
        env = small_env(range(10 * episode, 10 * episode + 3), recorder=recorder, on_panic=on_panic)
        steps = []

        def keep(t, steps=steps, env=env):
            steps.append(t)
            if t.after.step == 17:
                break_host(env, 1)

        play(env, RandomController(), on_step=keep)
        episodes.append(steps)
    return episodes, recorder
