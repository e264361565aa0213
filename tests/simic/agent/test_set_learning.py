"""A policy over sets learns what to read, and finds it in hosts that it has never seen."""

import numpy as np
import torch

from agent_support import shuffle
from esper.leyline import OP, SLOT, ActionMasks, LifecycleOp, generator
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import NetworkConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout import action_draws, play_round
from esper.simic.agent.set_network import SetActorCritic
from esper.tamiyo.policy.set_features import CANDIDATE_FEATURES, SLOT_FEATURES, SetLayout, pad_masks

WIDTH, COST = SLOT_FEATURES.index("channels_over_others"), CANDIDATE_FEATURES.index("params")
BLUEPRINTS = 4


class Bottlenecks:
    """Hosts with some narrow slot, at a random place: planting there pays, and the cheapest seed
    pays most. An episode is one decision. `shown` slots stand in an observation."""

    def __init__(self, num_envs: int, slots: int, shown: int) -> None:
        self.num_envs, self.slots, self.shown = num_envs, slots, shown
        self.groups = np.arange(num_envs)

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        rng, n, layout = generator(1, "hosts", round_), self.num_envs, SetLayout(self.slots, 4)
        parts = layout.split(torch.from_numpy(rng.normal(size=(n, layout.size)) * 0.3).float())
        run, slots, candidates = (part.clone() for part in parts)
        slots[..., 0], candidates[..., 0] = 1.0, 1.0
        self.narrow = rng.integers(self.slots, size=n)
        slots[..., WIDTH] = 0.5
        slots[np.arange(n), self.narrow, WIDTH] = -1.0
        self.cost = candidates[..., COST].numpy()
        more = self.shown - self.slots
        padded = torch.nn.functional.pad(slots, (0, 0, 0, more))
        wide = torch.nn.functional.pad(candidates, (0, 0, 0, 0, 0, more))
        self.seen = torch.cat([run, padded.flatten(1), wide.flatten(1)], dim=1).numpy()
        allowed = np.zeros((n, 4), dtype=bool)
        allowed[:, LifecycleOp.GERMINATE] = True
        slot = np.repeat(allowed[:, :, None], self.slots, axis=2)
        blueprint = np.ones((n, self.slots, BLUEPRINTS), dtype=bool)
        self.masks = pad_masks(
            ActionMasks(allowed, slot, blueprint, np.ones((n, 3), bool)), self.shown
        )
        return self.seen, self.masks

    def right(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """bool[E] each: the right place, and the cheapest of what could be planted there."""
        assert (actions[:, OP] == LifecycleOp.GERMINATE).all()
        cheapest = self.cost[np.arange(self.num_envs), actions[:, SLOT] % self.slots].argmin(axis=1)
        return actions[:, SLOT] == self.narrow, actions[:, 1] == cheapest

    def step(self, actions: np.ndarray) -> tuple:
        place, seed = self.right(actions)
        ended = np.ones(self.num_envs, dtype=bool)
        return self.seen, self.masks, place + 0.5 * seed, ended, ~ended


def test_it_finds_the_narrow_slot_wherever_it_is_and_in_deeper_hosts() -> None:
    config = NetworkConfig(
        SetLayout(4, BLUEPRINTS).size,
        4,
        BLUEPRINTS,
        kind="set",
        **{"feature_dim": 16, "lstm_hidden_dim": 16, "embedding_dim": 16},
    )
    ppo = PPOConfig(learning_rate=3e-3, minibatches=2, target_kl=None, entropy_coef=0.01)
    agent = PPOAgent(SetActorCritic(config, key=0), ppo)
    buffer = agent.new_buffer(64, 1)
    for round_ in range(25):
        # Hosts of three slots, shown with a fourth that is not there, and hosts of four.
        env = Bottlenecks(64, slots=3 + round_ % 2, shown=4)
        play_round(agent, env, buffer, round_, action_draws(0, round_, 64, 1))
        agent.update(buffer, shuffle(round_))
    deeper = PPOAgent(agent.network.fitted(7, BLUEPRINTS), ppo)
    env = Bottlenecks(200, slots=7, shown=7)
    seen, masks = env.reset(1_000)
    place, seed = env.right(deeper.act(seen, deeper.initial_hidden(200), masks, None).actions)
    # By chance it would be a seventh, and a quarter.
    assert place.mean() > 0.8
    assert seed.mean() > 0.7
