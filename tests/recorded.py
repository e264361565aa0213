"""Episodes of the analytic growth problem, and how a policy does in it."""

from collections.abc import Callable

import numpy as np
import torch

from esper.leyline import OP, SLOT, ActionMasks, LifecycleOp
from esper.simic import analytic
from esper.simic.agent.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.simic.agent.types import MaskTensors
from esper.simic.control.normalization import RunningMeanStd
from esper.simic.recordings.episodes import Episodes
from esper.simic.training.env_specs import Space

SPACE = Space(analytic.OBSERVATION_DIM, analytic.NUM_SLOTS, ("small", "middle", "large"))

Act = Callable[[analytic.AnalyticGrowth, np.ndarray, ActionMasks], np.ndarray]


def play_analytic(act: Act, envs: int, key: int) -> Episodes:
    env = analytic.AnalyticGrowth(envs, key)
    observation, masks = env.reset()
    seen, allowed, done, earned = [observation], [], [], []
    for _ in range(analytic.HORIZON):
        allowed.append(masks)
        done.append(act(env, observation, masks))
        observation, masks, rewards, _, _ = env.step(done[-1])
        seen.append(observation)
        earned.append(rewards)
    stacked = {
        f"{name}_masks": np.stack([getattr(m, name) for m in allowed], axis=1)
        for name in ("op", "slot", "blueprint", "blend")
    }
    return Episodes(
        SPACE,
        observations=np.stack(seen, axis=1),
        **stacked,
        actions=np.stack(done, axis=1),
        rewards=np.stack(earned, axis=1).astype(np.float64),
        lengths=np.full(envs, analytic.HORIZON),
        hosts=np.arange(envs),
    )


def random_player(key: int) -> Act:
    """Any legal action: op, then slot, blueprint and blend, each uniformly."""
    rng = np.random.default_rng(key)

    def act(env: analytic.AnalyticGrowth, _: np.ndarray, masks: ActionMasks) -> np.ndarray:
        actions = np.zeros((env.num_envs, 4), dtype=np.int64)
        for i in range(env.num_envs):
            op = rng.choice(np.flatnonzero(masks.op[i]))
            actions[i, OP] = op
            if op != LifecycleOp.WAIT:
                slot = rng.choice(np.flatnonzero(masks.slot[i, op]))
                actions[i, SLOT] = slot
                if op == LifecycleOp.GERMINATE:
                    actions[i, 1] = rng.choice(np.flatnonzero(masks.blueprint[i, slot]))
                    actions[i, 2] = rng.choice(np.flatnonzero(masks.blend[i]))
        return actions

    return act


def best_player() -> Act:
    solution = analytic.solve()
    return lambda env, _, masks: solution.act(env.time, env.states)


def learner(network: FactoredRecurrentActorCritic, scale: RunningMeanStd) -> Act:
    """The most probable actions of a network; remembers over one play."""
    hidden: list = []

    def act(env: analytic.AnalyticGrowth, seen: np.ndarray, masks: ActionMasks) -> np.ndarray:
        if env.time == 0:
            hidden[:] = [network.get_initial_hidden(env.num_envs)]
        with torch.no_grad():
            actions, _, _, hidden[0] = network.get_action(
                scale.normalize(torch.from_numpy(seen)), hidden[0], MaskTensors.of(masks), None
            )
        return actions.numpy()

    return act


def small_network(space: Space = SPACE, width: int = 48) -> FactoredRecurrentActorCritic:
    sizes = (space.observation_dim, space.num_slots, len(space.blueprints))
    return FactoredRecurrentActorCritic(
        NetworkConfig(*sizes, feature_dim=width, lstm_hidden_dim=width), key=1
    )
