"""The learning rate over a run, against closed forms and torch's own scheduler."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from esper.growth.grown_module import keyed
from esper.growth.hosts import CNNHost
from esper.leyline import ConfigError, draw_key
from esper.leyline.growth_settings import GrowthSettings, RateSchedule
from esper.tamiyo.controllers.simple import StaticController
from esper.tolaria.engine.batches import LoaderSource, batch_factors
from esper.tolaria.engine.run import make_env, play
from helpers import small_digits


def by_hand(warmup: float, decay: float, at: float) -> float:
    if at < warmup:
        return at / warmup
    return (1.0 - at) / decay if at > 1.0 - decay else 1.0


def test_rates_rise_stay_and_fall() -> None:
    draws = np.random.default_rng(0)
    for _ in range(200):
        warmup = draws.uniform(0.0, 0.6)
        decay = draws.uniform(0.0, 1.0 - warmup)
        at = draws.uniform(size=(3, 4))
        expected = [[by_hand(warmup, decay, each) for each in row] for row in at.tolist()]
        np.testing.assert_allclose(RateSchedule(warmup, decay).factor(at), expected, rtol=1e-12)
    ends = RateSchedule(0.25, 0.5).factor(np.array([0.0, 0.125, 0.25, 0.5, 0.75, 1.0]))
    assert ends.tolist() == [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    assert RateSchedule().factor([0.0, 1.0]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("shares", "culprit"),
    [((-0.1, 0.0), "warmup must be"), ((0.0, 1.2), "decay must be"), ((0.6, 0.5), "longer than")],
)
def test_shares_that_are_none_are_refused(shares: tuple[float, float], culprit: str) -> None:
    with pytest.raises(ConfigError, match=culprit):
        RateSchedule(*shares)


def test_a_batch_has_the_rate_of_its_middle() -> None:
    rates = np.array([[0.0, 1.0], [1.0, 1.0], [1.0, 0.2]])
    np.testing.assert_allclose(batch_factors(rates, 0, 4), [0.125, 1.0, 0.9])
    np.testing.assert_allclose(batch_factors(rates, 3, 4), [0.875, 1.0, 0.3])
    np.testing.assert_allclose(batch_factors(rates, 7, None), [0.5, 1.0, 0.6])
    np.testing.assert_allclose(batch_factors(rates, 9, 4), rates[:, 1])


def test_a_scheduled_run_is_a_loop_with_torch_s_scheduler() -> None:
    task, data = small_digits()
    rules = GrowthSettings(4, schedule=RateSchedule(warmup=0.2, decay=0.4))
    env = make_env(task.recipe(data), [5], rules)
    play(env, StaticController())
    with keyed(draw_key(5, "host")):
        host = CNNHost(num_classes=10, n_blocks=3, base_channels=2, in_channels=1)
    optimizer = torch.optim.AdamW(host.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    batches, epochs = 2, 5

    def factor(step: int) -> float:
        epoch, batch = divmod(step, batches)
        begin, end = (by_hand(0.2, 0.4, each / epochs) for each in (epoch, epoch + 1))
        return begin + (end - begin) * ((batch + 0.5) / batches)

    scheduler = LambdaLR(optimizer, factor)
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(draw_key(5, "shuffle", epoch))
        for rows in torch.randperm(128, generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(host(data.train_x[rows]), data.train_y[rows]).backward()
            optimizer.step()
            scheduler.step()
    ours = env.population.networks[0].host.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(ours[name], other) for name, other in host.state_dict().items())
    assert env.population.optimizers[0].param_groups[0]["lr"] == 1e-2  # type: ignore[attr-defined]


def test_the_rate_of_every_batch_is_what_the_schedule_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, data = small_digits()
    env = make_env(task.recipe(data), [5], GrowthSettings(3, schedule=RateSchedule(0.25, 0.5)))
    (optimizer,) = env.population.optimizers  # type: ignore[attr-defined]
    groups, seen, step = optimizer.param_groups, [], optimizer.step
    # Groups without parameters take no part in training.
    groups[2] |= {"lr": 3e-2, "params": [groups[0]["params"].pop()]}

    def noted() -> None:
        seen.append(tuple(group["lr"] for group in optimizer.param_groups))
        step()

    monkeypatch.setattr(optimizer, "step", noted)
    play(env, StaticController())
    factors = [0.25, 0.75, 1.0, 1.0, 0.875, 0.625, 0.375, 0.125]
    assert seen == [(1e-2 * f, 3e-2 * f) for f in factors]
    assert (groups[0]["lr"], groups[2]["lr"]) == (1e-2, 3e-2)


def test_the_size_of_loaders_is_told_where_it_can_be_known() -> None:
    batches = [(torch.zeros(4, 1), torch.zeros(4))] * 3

    class Endless:
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(batches)

    size = LoaderSource(batches, batches[:2]).size()
    assert (size.batches, size.train, size.val) == (3, 12, 8)
    size = LoaderSource(batches, batches, batches_per_epoch=2).size()
    assert (size.batches, size.train) == (2, 8)
    size = LoaderSource(Endless(), Endless()).size()
    assert (size.batches, size.train, size.val) == (None, None, None)
    size = LoaderSource(Endless(), batches, batches_per_epoch=7).size()
    assert (size.batches, size.train, size.val) == (7, 28, 12)
