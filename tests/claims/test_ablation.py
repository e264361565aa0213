"""benchmarks/claims/ablation.py: an ablated entry is constant, all others stay."""

import numpy as np
import torch

import ablation
from recorded_hosts import SPACE, recorded


def test_every_entry_that_is_taken_away_exists():
    names = SPACE.names(["a", "b"])
    for kind, entries in ablation.GROUPS.values():
        there = {entry for block, entry in names if ablation.kind_of(block) == kind}
        assert set(entries) <= there


def test_the_blind_see_the_mean_and_all_else():
    episodes = recorded()
    names = SPACE.names(["slot 0", "slot 1"])
    blind = ablation.Blind(episodes, "without what a slot is")
    seen = torch.from_numpy(episodes.observations[:, 0])
    shown = blind.normalize(seen)
    widths = [n for n, (_, entry) in enumerate(names) if entry == "channels"]
    expected = float(episodes.observations[:, 0][:, widths].mean())
    assert expected > 0
    np.testing.assert_allclose(shown[:, widths], expected, rtol=1e-6)
    others = [n for n in range(seen.shape[1]) if n not in blind.columns]
    assert torch.equal(shown[:, others], seen[:, others])
    assert not torch.equal(shown, seen)
