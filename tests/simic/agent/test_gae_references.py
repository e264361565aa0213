"""GAE against rlax (golden arrays), SB3's buffer and TorchRL, and against arithmetic by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from torchrl.objectives.value.functional import generalized_advantage_estimate

from esper.simic.agent.advantages import compute_gae, normalize_advantages

GOLDEN = json.loads((Path(__file__).parent / "golden" / "rlax.json").read_text())


def random_rows(rows: int, steps: int, key: int, truncations: bool = True) -> dict:
    rng = np.random.default_rng(key)
    ends = rng.choice(3, size=(rows, steps), p=[0.7, 0.15, 0.15])
    return {
        "rewards": torch.from_numpy(rng.normal(size=(rows, steps))).float(),
        "values": torch.from_numpy(rng.normal(size=(rows, steps))).float(),
        "bootstrap_values": torch.from_numpy(rng.normal(size=(rows, steps))).float(),
        "terminated": torch.from_numpy(ends == 1),
        "truncated": torch.from_numpy((ends == 2) & truncations),
    }


@pytest.mark.parametrize("case", GOLDEN["gae"], ids=lambda c: f"{len(c['rewards'])}-steps")
def test_gae_equals_rlax(case):
    row = {
        name: torch.tensor(case[name], dtype=torch.float64)[None]
        for name in ("rewards", "values", "bootstrap_values")
    }
    ends = {name: torch.tensor(case[name])[None] for name in ("terminated", "truncated")}
    advantages, returns = compute_gae(**row, **ends, gamma=GOLDEN["gamma"], lam=GOLDEN["lambda"])
    expected = torch.tensor(case["advantages"], dtype=torch.float64)[None]
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, expected + row["values"], rtol=0, atol=1e-12)


def test_golden_cases_contain_ends_in_the_middle_of_a_row():
    assert any(any(case["truncated"][:-1]) for case in GOLDEN["gae"])
    assert any(any(case["terminated"][:-1]) for case in GOLDEN["gae"])


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_gae_equals_torchrl(steps):
    row = random_rows(5, steps, key=steps)
    ours, ours_returns = compute_gae(**row, gamma=0.98, lam=0.9)
    follows = torch.cat([row["values"][:, 1:], row["bootstrap_values"][:, -1:]], dim=1)
    follows = torch.where(row["truncated"], row["bootstrap_values"], follows)
    theirs, their_returns = generalized_advantage_estimate(
        gamma=0.98,
        lmbda=0.9,
        state_value=row["values"][..., None],
        next_state_value=follows[..., None],
        reward=row["rewards"][..., None],
        done=(row["terminated"] | row["truncated"])[..., None],
        terminated=row["terminated"][..., None],
    )
    torch.testing.assert_close(ours, theirs.squeeze(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_returns, their_returns.squeeze(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_gae_equals_the_buffer_of_sb3(steps):
    rows, gamma, lam = 4, 0.98, 0.9
    row = random_rows(rows, steps, key=10 + steps)
    buffer = RolloutBuffer(
        steps, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), "cpu", lam, gamma, rows
    )
    ended = (row["terminated"] | row["truncated"]).numpy()
    for t in range(steps):
        # SB3 adds the discounted bootstrap to the reward of a truncated step and calls it done.
        extra = gamma * row["bootstrap_values"][:, t] * row["truncated"][:, t]
        buffer.add(
            np.zeros((rows, 1)),
            np.zeros((rows, 1)),
            (row["rewards"][:, t] + extra).numpy(),
            np.ones(rows) if t == 0 else ended[:, t - 1].astype(float),
            row["values"][:, t],
            torch.zeros(rows),
        )
    buffer.compute_returns_and_advantage(row["bootstrap_values"][:, -1], ended[:, -1])
    advantages, returns = compute_gae(**row, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages.T, buffer.advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(returns.T, buffer.returns, rtol=1e-4, atol=1e-5)


def by_hand(rewards, values, bootstrap, terminated, truncated):
    advantages, _ = compute_gae(
        torch.tensor([rewards]),
        torch.tensor([values]),
        torch.tensor([bootstrap]),
        torch.tensor([terminated]),
        torch.tensor([truncated]),
        gamma=0.5,
        lam=0.5,
    )
    return advantages[0].tolist()


def test_gae_by_hand_terminal():
    # δ1 = 2 - 1 = 1; δ0 = 1 + .5*1 - 2 = -.5; A0 = -.5 + .25*1
    assert by_hand([1.0, 2.0], [2.0, 1.0], [9.0, 9.0], [False, True], [False, False]) == [-0.25, 1]


def test_gae_by_hand_truncated_at_the_end():
    # δ1 = 2 + .5*4 - 1 = 3; A0 = -.5 + .25*3
    assert by_hand([1.0, 2.0], [2.0, 1.0], [9.0, 4.0], [False, False], [False, True]) == [0.25, 3]


def test_gae_by_hand_truncated_in_the_middle():
    # The first step is cut: δ0 = 1 + .5*6 - 2 = 2, whatever the next episode brings.
    assert by_hand([1.0, 2.0], [2.0, 1.0], [6.0, 9.0], [False, True], [True, False]) == [2, 1]


def test_gae_keeps_environments_apart():
    both = random_rows(2, 12, key=3)
    together, _ = compute_gae(**both, gamma=0.9, lam=0.8)
    for n in range(2):
        alone, _ = compute_gae(
            **{name: x[n : n + 1] for name, x in both.items()}, gamma=0.9, lam=0.8
        )
        torch.testing.assert_close(alone[0], together[n])


def test_gae_of_no_steps_is_empty():
    empty, none = torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.bool)
    advantages, returns = compute_gae(empty, empty, empty, none, none, 0.9, 0.9)
    assert advantages.shape == returns.shape == (3, 0)


def test_gae_does_not_read_a_bootstrap_it_should_not():
    row = random_rows(1, 6, key=0, truncations=False)
    row["terminated"][:, -1] = True
    row["bootstrap_values"][:] = torch.nan
    advantages, returns = compute_gae(**row, gamma=0.9, lam=0.9)
    assert advantages.isfinite().all()
    assert returns.isfinite().all()


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_gae_does_not_let_a_broken_episode_spoil_the_one_before_it(end):
    row = random_rows(1, 6, key=0, truncations=False)
    for name in ("terminated", "truncated"):
        row[name][:] = False
        row[name][:, 2] = name == end
    row["rewards"][:, 3:] = torch.nan
    advantages, _ = compute_gae(**row, gamma=0.9, lam=0.9)
    assert advantages[:, :3].isfinite().all()
    assert advantages[:, 3:].isnan().all()


def test_gae_refuses_arrays_that_differ_in_shape():
    row = random_rows(2, 5, key=0)
    row["values"] = row["values"][:, :4]
    with pytest.raises(ValueError, match="one shape"):
        compute_gae(**row, gamma=0.9, lam=0.9)


def test_normalised_advantages_equal_the_usual_formula_over_valid_steps():
    advantages = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    valid = torch.arange(8) < torch.tensor([8, 3, 5])[:, None]
    normalized = normalize_advantages(advantages, valid)
    chosen = advantages[valid].numpy()
    expected = (chosen - chosen.mean()) / chosen.std(ddof=1)
    np.testing.assert_allclose(normalized[valid], expected, rtol=1e-5, atol=1e-6)
    assert (normalized[~valid] == 0).all()


def test_d33_a_truncation_in_the_middle_of_a_row_uses_its_own_bootstrap():
    """The two-step probe: nothing but the reward is worth anything, so A0 is the reward's."""
    zeros = torch.zeros(1, 2)
    advantages, _ = compute_gae(
        rewards=torch.tensor([[0.0, 3.0]]),
        values=zeros,
        bootstrap_values=torch.tensor([[1.0, 0.0]]),
        terminated=torch.tensor([[False, True]]),
        truncated=torch.tensor([[True, False]]),
        gamma=0.995,
        lam=0.97,
    )
    assert advantages[0].tolist() == pytest.approx([0.995, 3.0])
