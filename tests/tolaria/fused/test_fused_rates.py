"""Learning rates of fused hosts, row by row."""

import numpy as np
import pytest
import torch
from fused_support import adopt, largest_gap, pair, plant, recipe, shake


def test_fused_hosts_have_the_rates_of_looped_ones_each_its_own() -> None:
    def optimizer(params: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)  # type: ignore[arg-type]

    looped, fused = pair(recipe("cnn", optimizer=optimizer), [1, 2, 3])
    plant((looped, fused), 0, 1, "conv_light")
    plant((looped, fused), 2, 0, "branch", blend=2)
    shake(looped)
    running = np.ones(3, dtype=bool)
    rates = np.array([[0.0, 0.5], [1.0, 1.0], [0.7, 0.0]])
    for step in range(3):
        adopt(fused, looped)
        looped.train_epoch(running, step, rates)
        fused.train_epoch(running, step, rates)
        assert largest_gap(fused, looped) < 3e-6


@pytest.mark.parametrize("kind", [0, 1])
def test_a_factor_of_one_changes_no_bit(kind: int) -> None:
    populations = [pair(recipe("cnn"), [1, 2])[kind] for _ in range(2)]
    running = np.ones(2, dtype=bool)
    plain = populations[0].train_epoch(running, 0)
    ones = populations[1].train_epoch(running, 0, np.ones((2, 2)))
    assert np.array_equal(plain.loss, ones.loss)
    tensors = [
        [t for s in population.snapshot(np.arange(2)) for t in s.all_tensors()]
        for population in populations
    ]
    assert all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))
