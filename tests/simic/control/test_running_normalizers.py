"""Running statistics against NumPy on everything seen, and by hand."""

import numpy as np
import pytest
import torch

from agent_support import shuffle
from esper.leyline import ConfigError
from esper.simic.control.normalization import RewardNormalizer, RunningMeanStd


def test_exact_statistics_equal_numpy_on_the_concatenation():
    rng = np.random.default_rng(0)
    batches = [rng.normal(5, 3, size=(n, 4)) for n in (1, 7, 32, 2)]
    running = RunningMeanStd((4,), epsilon=1e-12)
    for batch in batches:
        running.update(torch.from_numpy(batch))
    everything = np.concatenate(batches)
    np.testing.assert_allclose(running.mean, everything.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(running.var, everything.var(axis=0), rtol=1e-9)
    assert running.count == pytest.approx(42)


def test_normalize_by_hand_and_clipped():
    running = RunningMeanStd((1,), epsilon=1e-12)
    running.update(torch.tensor([[1.0], [3.0]]))
    scaled = running.normalize(torch.tensor([[4.0], [1e6]]))
    assert scaled[0, 0].item() == pytest.approx(2 / (1 + 1e-4) ** 0.5)
    assert scaled[1, 0].item() == 10.0
    assert scaled.dtype == torch.float32


def test_first_batch_of_a_forgetting_normaliser_sets_the_scale():
    running = RunningMeanStd((1,), momentum=0.99)
    batch = torch.tensor([[1e6], [1e6 + 2]])
    running.update(batch)
    np.testing.assert_allclose(running.normalize(batch), [[-1.0], [1.0]], atol=1e-3)


def test_an_empty_batch_changes_nothing():
    running = RunningMeanStd((3,), momentum=0.9)
    running.update(torch.zeros(0, 3))
    assert running.state_dict()["count"] == 1e-4


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_state_round_trip_continues_exactly(momentum):
    rng = np.random.default_rng(1)
    one, two = RunningMeanStd((3,), momentum=momentum), RunningMeanStd((3,), momentum=momentum)
    one.update(torch.from_numpy(rng.normal(size=(8, 3))))
    two.load_state_dict(one.state_dict())
    batch = torch.from_numpy(rng.normal(size=(8, 3)))
    for running in (one, two):
        running.update(batch)
    assert torch.equal(one.normalize(batch), two.normalize(batch))
    with pytest.raises(ConfigError, match="saved statistics"):
        RunningMeanStd((4,)).load_state_dict(one.state_dict())


def test_rewards_are_divided_by_the_sample_deviation_of_all_seen():
    rng = np.random.default_rng(2)
    normalizer, seen = RewardNormalizer(), []
    for _ in range(5):
        rewards = rng.normal(0.5, 4.0, size=6)
        seen.append(rewards)
        scaled = normalizer(torch.from_numpy(rewards))
        expected = rewards / np.concatenate(seen).std(ddof=1)
        np.testing.assert_allclose(scaled, expected, rtol=1e-9)


def test_first_reward_is_only_clipped():
    assert RewardNormalizer()(torch.tensor([25.0])).item() == 10.0
    assert RewardNormalizer()(torch.tensor([-3.0])).item() == -3.0


def test_equal_rewards_are_not_blown_up():
    normalizer = RewardNormalizer()
    assert normalizer(torch.full((4,), -0.01)).tolist() == pytest.approx([-0.01] * 4)


def test_scaling_without_learning_and_round_trip():
    normalizer = RewardNormalizer()
    normalizer(torch.tensor([1.0, 3.0]))
    before = normalizer.state_dict()
    scaled = normalizer.normalize_only(torch.tensor([2.0]))
    assert normalizer.state_dict() == before
    assert scaled.item() == pytest.approx(2 / 2**0.5)
    other = RewardNormalizer()
    other.load_state_dict(before)
    assert other.normalize_only(torch.tensor([2.0])).item() == scaled.item()
    assert other.std == normalizer.std


def test_004_m23_ema_of_a_constant_converges_to_it():
    running = RunningMeanStd((2,), momentum=0.9)
    running.update(torch.randn(16, 2, generator=shuffle()))
    for _ in range(300):
        running.update(torch.full((8, 2), 7.0))
    np.testing.assert_allclose(running.mean, 7.0, atol=1e-9)
    np.testing.assert_allclose(running.var, 0.0, atol=1e-9)


def test_004_m23_a_shift_of_the_mean_adds_its_cross_term():
    momentum, delta = 0.9, 5.0
    running = RunningMeanStd((1,), momentum=momentum)
    running.update(torch.zeros(4, 1))
    running.update(torch.full((4, 1), delta))
    assert running.mean.item() == pytest.approx((1 - momentum) * delta)
    assert running.var.item() == pytest.approx(momentum * (1 - momentum) * delta**2)


def test_d22_a_forgetting_normaliser_does_not_saturate_at_the_start():
    running = RunningMeanStd((2,), momentum=0.99)
    rng = np.random.default_rng(0)
    for _ in range(5):
        batch = torch.from_numpy(rng.normal([1e5, -40.0], [1e3, 2.0], size=(16, 2)))
        running.update(batch)
        assert running.normalize(batch).abs().max() < 5.0


def test_normalisers_refuse_what_would_stay_for_ever():
    with pytest.raises(ValueError, match="finite"):
        RunningMeanStd((2,)).update(torch.tensor([[1.0, torch.nan]]))
    with pytest.raises(ConfigError, match="takes batches"):
        RunningMeanStd((2,)).update(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="finite"):
        RewardNormalizer()(torch.tensor([torch.inf]))
    with pytest.raises(ConfigError, match="momentum"):
        RunningMeanStd((2,), momentum=1.0)
