"""Every setting of PPO does something."""

from dataclasses import fields
from functools import cache

import pytest

from agent_support import filled_buffer, make_agent, parameters_of, shuffle
from esper.simic.agent.config import PPOConfig


@cache
def plain_updates(settings):
    return two_updates(dict(settings))


def two_updates(settings):
    agent = make_agent(**settings)
    rows = []
    for _ in range(2):
        buffer = filled_buffer(agent, ends=0.1)
        buffer.groups //= 2
        rows.append(agent.update(buffer, shuffle()).flat())
    return rows, {name: p.tolist() for name, p in parameters_of(agent).items()}


# Each setting with another value, and what must be set for it to matter.
SETTINGS: dict[str, tuple[object, dict[str, object]]] = {
    "learning_rate": (1e-3, {}),
    "gamma": (0.5, {}),
    "gae_lambda": (0.5, {}),
    "epochs": (1, {}),
    "minibatches": (1, {}),
    "clip_ratio": (0.01, {"learning_rate": 1e-2}),
    "target_kl": (1e-6, {}),
    "entropy_coef": (0.5, {}),
    "entropy_coef_end": (0.5, {"entropy_anneal_updates": 1}),
    "entropy_anneal_updates": (1, {"entropy_coef_end": 0.5}),
    "entropy_coef_min": (0.05, {"adaptive_entropy_floor": True, "entropy_coef": 0.05}),
    "adaptive_entropy_floor": (True, {"entropy_coef_min": 0.01, "entropy_coef": 0.01}),
    "entropy_coef_per_head": ({"slot": 2.0}, {}),
    "group_baseline": (True, {}),
    "value_coef": (2.0, {}),
    "critic_first": (1, {}),
    "value_loss": ("huber", {}),
    "huber_delta": (0.1, {"value_loss": "huber"}),
    "value_clip": (1e-3, {}),
    "max_grad_norm": (1e-3, {}),
    "clip_separately": (True, {}),
    "weight_decay": (0.5, {}),
    "ratio_explosion": (1.0 + 1e-6, {}),
    "ratio_collapse": (1.0 - 1e-6, {}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_d31_every_setting_of_ppo_has_an_effect(name):
    value, needed = SETTINGS[name]
    assert two_updates(needed | {name: value}) != plain_updates(tuple(needed.items()))


def test_d31_no_setting_is_left_out():
    """Tests of compilation and of masks show what the two others do."""
    others = {"compile_backend", "validate_masks"}
    assert {f.name for f in fields(PPOConfig)} == SETTINGS.keys() | others
