"""One whole update moves every parameter as sb3-contrib's does: same weights, same episodes.

With one slot, one blueprint and one blend our policy has a choice in its op head only, which is
what a Discrete(4) policy of sb3 has. sb3's policy gets copies of our layers; its buffer, its
advantages, its losses and its optimizer are its own.
"""

import copy
import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn

from agent_support import make_agent, shuffle
from esper.leyline import ActionMasks
from esper.leyline.constants import ADAM_EPSILON

OBS, ENVS = 6, 8
GAMMA, LAMBDA, RATE = 0.97, 0.9, 1e-3


class NoEnv(gymnasium.Env):
    """sb3 asks for an environment; the episodes come from elsewhere."""

    observation_space = spaces.Box(-np.inf, np.inf, (OBS,))
    action_space = spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        return np.zeros(OBS, dtype=np.float32), {}

    def step(self, action):
        raise NotImplementedError


class OneStepTrunk(BaseFeaturesExtractor):
    """Everything before our heads, for episodes of one step: the LSTM starts from zero."""

    def __init__(self, observation_space, network):
        super().__init__(observation_space, network.config.lstm_hidden_dim)
        self.feature_net, self.lstm, self.lstm_norm = copied(
            network.feature_net, network.lstm, network.lstm_norm
        )

    def forward(self, observations):
        output, _ = self.lstm(self.feature_net(observations).unsqueeze(1))
        return self.lstm_norm(output.squeeze(1))


class FeatureNet(BaseFeaturesExtractor):
    def __init__(self, observation_space, network):
        super().__init__(observation_space, network.config.feature_dim)
        (self.feature_net,) = copied(network.feature_net)

    def forward(self, observations):
        return self.feature_net(observations)


class SharedLSTMPolicy(RecurrentActorCriticPolicy):
    """sb3 stops the critic's gradient at a shared LSTM; ours does not, so neither does this."""

    def evaluate_actions(self, obs, actions, lstm_states, episode_starts):
        latent, _ = self._process_sequence(
            self.extract_features(obs), lstm_states.pi, episode_starts, self.lstm_actor
        )
        distribution = self._get_action_dist_from_latent(self.mlp_extractor.forward_actor(latent))
        values = self.value_net(self.mlp_extractor.forward_critic(latent))
        return values, distribution.log_prob(actions), distribution.entropy()


def copied(*modules):
    return copy.deepcopy(modules)


def with_our_heads(policy, network, norm=None):
    """Put copies of our heads (after `norm`, if any) in place of the policy's own."""
    op, value = copied(network.op_head, network.value_head)
    before = [] if norm is None else [norm]
    policy.mlp_extractor.policy_net = nn.Sequential(*before, *op[:2])
    policy.mlp_extractor.value_net = nn.Sequential(*before, *value[:2])
    policy.action_net, policy.value_net = op[2], value[2]
    policy.optimizer = torch.optim.Adam(policy.parameters(), lr=RATE, eps=ADAM_EPSILON)


def pairs(policy, network, trunk, norm):
    """(name, our module, theirs) for everything that learns."""
    theirs, skip = policy.mlp_extractor, 1 if norm is not None else 0
    return [
        ("feature_net", network.feature_net, policy.features_extractor.feature_net),
        ("lstm", network.lstm, trunk),
        ("lstm_norm", network.lstm_norm, norm or policy.features_extractor.lstm_norm),
        ("op_head.0", network.op_head[0], theirs.policy_net[skip]),
        ("op_head.2", network.op_head[2], policy.action_net),
        ("value_head.0", network.value_head[0], theirs.value_net[skip]),
        ("value_head.2", network.value_head[2], policy.value_net),
    ]


def difference(ours, theirs):
    return max(
        (a - b).abs().max().item()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def gradient_difference(ours, theirs):
    """Adam's first step hides the scale of a gradient, so gradients are compared as well."""
    return max(
        (a.grad - b.grad).abs().max().item()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def sb3_model(kind, policy, entropy_nats, batch, steps, extractor, network, **policy_kw):
    model = kind(
        policy,
        DummyVecEnv([NoEnv] * ENVS),
        learning_rate=RATE,
        n_steps=steps,
        batch_size=batch,
        n_epochs=1,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        ent_coef=entropy_nats,
        vf_coef=0.5,
        max_grad_norm=0.5,
        clip_range=0.2,
        device="cpu",
        policy_kwargs={
            "features_extractor_class": extractor,
            "features_extractor_kwargs": {"network": network},
            "net_arch": {"pi": [16], "vf": [16]},
            "activation_fn": nn.ReLU,
            "ortho_init": False,
            **policy_kw,
        },
    )
    model._logger = Logger(folder=None, output_formats=[])
    return model


def our_agent(entropy):
    return make_agent(
        key=1,
        network={
            "observation_dim": OBS,
            "num_slots": 1,
            "num_blueprints": 1,
            "num_blends": 1,
            "actor_gain": 1.0,
        },
        learning_rate=RATE,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        epochs=1,
        minibatches=1,
        target_kl=None,
        entropy_coef=entropy,
        entropy_coef_min=0.0,
    )


def op_masks(rng, legal):
    """[E, 4] with WAIT and `legal` ops in all (or any number of ops, if None)."""
    masks = np.zeros((ENVS, 4), dtype=bool)
    for row in masks:
        count = legal or rng.integers(1, 5)
        row[[0, *rng.permutation([1, 2, 3])[: count - 1]]] = True
    return masks


def wide(ops):
    """Masks of a problem whose only choice is the op."""
    one = np.ones((len(ops), 1), dtype=bool)
    return ActionMasks(ops, np.ones((len(ops), 4, 1), dtype=bool), one[:, None], one)


def play(agent, steps, legal, on_step):
    """A round of random observations and rewards, told step by step to `on_step` too."""
    rng = np.random.default_rng(0)
    buffer, hidden = agent.new_buffer(ENVS, steps), agent.initial_hidden(ENVS)
    buffer.start(hidden)
    for step in range(steps):
        observation = rng.normal(size=(ENVS, OBS)).astype(np.float32)
        masks = wide(op_masks(rng, legal))
        decision = agent.act(observation, hidden, masks, rng.random((ENVS, 4)))
        rewards = rng.normal(size=ENVS).astype(np.float32)
        last = step == steps - 1
        terminated = np.array([last and env % 2 == 0 for env in range(ENVS)])
        truncated = np.array([last and env % 2 == 1 for env in range(ENVS)])
        bootstrap = rng.normal(size=ENVS).astype(np.float32)
        buffer.add(observation, masks, decision, rewards, terminated, truncated, bootstrap)
        on_step(observation, masks, decision, rewards, hidden, step, bootstrap, terminated)
        hidden = decision.hidden
    return buffer


@pytest.mark.parametrize(("legal", "entropy"), [(None, 0.0), (3, 0.05), (4, 0.05)])
def test_update_equals_maskable_ppo(legal, entropy):
    agent = our_agent(entropy)
    network = agent.network
    nats = entropy / math.log(legal) if entropy else 0.0
    # Forty rounds of one step each: in our buffer a row per step, in sb3's a step per row.
    rounds = 5
    model = sb3_model(
        MaskablePPO,
        MaskableActorCriticPolicy,
        nats,
        ENVS * rounds,
        rounds,
        OneStepTrunk,
        network,
    )
    with_our_heads(model.policy, network)
    rng = np.random.default_rng(0)
    buffer = agent.new_buffer(ENVS * rounds, 1)
    buffer.start(agent.initial_hidden(ENVS * rounds))
    observations = rng.normal(size=(rounds, ENVS, OBS)).astype(np.float32)
    masks = np.stack([op_masks(rng, legal) for _ in range(rounds)])
    rewards = rng.normal(size=(rounds, ENVS)).astype(np.float32)
    flat = wide(masks.reshape(-1, 4))
    decision = agent.act(
        observations.reshape(-1, OBS),
        agent.initial_hidden(ENVS * rounds),
        flat,
        rng.random((ENVS * rounds, 4)),
    )
    ended = np.ones(ENVS * rounds, dtype=bool)
    buffer.add(
        observations.reshape(-1, OBS),
        flat,
        decision,
        rewards.reshape(-1),
        ended,
        ~ended,
        np.zeros(ENVS * rounds),
    )
    for t in range(rounds):
        rows = slice(t * ENVS, (t + 1) * ENVS)
        model.rollout_buffer.add(
            observations[t],
            decision.actions[rows, 3:],
            rewards[t],
            np.ones(ENVS),
            decision.values[rows],
            decision.log_probs[rows, 3],
            action_masks=masks[t],
        )
    model.rollout_buffer.compute_returns_and_advantage(torch.zeros(ENVS), np.ones(ENVS))
    before = copy.deepcopy(network)
    model.train()
    metrics = agent.update(buffer, shuffle())
    assert metrics.optimizer_steps == 1
    lstm = model.policy.features_extractor.lstm
    for name, ours, theirs in pairs(model.policy, network, lstm, None):
        assert difference(ours, theirs) < 1e-5, name
        assert gradient_difference(ours, theirs) < 1e-6, name
    assert difference(network, before) > 1e-4


@pytest.mark.parametrize("entropy", [0.0, 0.05])
def test_update_equals_recurrent_ppo(entropy, monkeypatch):
    steps = 12
    agent = our_agent(entropy)
    network = agent.network
    model = sb3_model(
        RecurrentPPO,
        SharedLSTMPolicy,
        entropy / math.log(4),
        ENVS * steps,
        steps,
        FeatureNet,
        network,
        lstm_hidden_size=network.config.lstm_hidden_dim,
        shared_lstm=True,
        enable_critic_lstm=False,
    )
    lstm, norm = copied(network.lstm, network.lstm_norm)
    lstm.batch_first = False
    model.policy.lstm_actor = lstm
    with_our_heads(model.policy, network, norm)
    final = {}

    def tell_sb3(observation, masks, decision, rewards, hidden, step, bootstrap, terminated):
        model.rollout_buffer.add(
            observation,
            decision.actions[:, 3:],
            rewards,
            np.full(ENVS, float(step == 0)),
            decision.values,
            decision.log_probs[:, 3],
            lstm_states=RNNStates(hidden, hidden),
        )
        final.update(last_values=torch.from_numpy(bootstrap), dones=terminated)

    buffer = play(agent, steps, 4, tell_sb3)
    model.rollout_buffer.compute_returns_and_advantage(**final)
    # sb3 rotates the data by a random offset, which would cut one episode in two.
    monkeypatch.setattr(np.random, "randint", lambda *args: 0)
    before = copy.deepcopy(network)
    model.train()
    metrics = agent.update(buffer, shuffle())
    assert metrics.optimizer_steps == 1
    for name, ours, theirs in pairs(model.policy, network, lstm, norm):
        assert difference(ours, theirs) < 1e-5, name
        assert gradient_difference(ours, theirs) < 1e-6, name
    assert difference(network, before) > 1e-4
