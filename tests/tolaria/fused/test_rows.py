"""The arena and its optimizer against torch's AdamW in double precision."""

import pytest
import torch
from torch import nn

from esper.tolaria.fused.rows import Arena, Kind, Row

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def test_rows_at_different_steps_are_stepped_as_by_adamw() -> None:
    kinds = [Kind(nn.Linear(3, 2)), Kind(nn.Linear(2, 2, bias=False))]
    generator = torch.Generator().manual_seed(0)
    # From zero, so that a step's own rounding shows.
    rows = [[Row(kind, torch.zeros(3, kind.size))] * 2 for kind in kinds]
    late = Row(kinds[1], torch.rand(3, kinds[1].size, generator=generator) * 1e-3, steps=7)
    rows[1] = [rows[1][0], late]
    flat = [row for bank in rows for row in bank]
    params = [nn.Parameter(row.values[0].double()) for row in flat]
    theirs = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    for row, param in zip(flat, params, strict=True):
        if row.steps:
            _, mean, square = row.values.double()
            state = {"step": torch.tensor(7.0), "exp_avg": mean, "exp_avg_sq": square}
            theirs.state[param].update(state)
    arena = Arena(rows)
    for _ in range(3):
        slopes = [torch.randn(p.shape, generator=generator, dtype=torch.double) for p in params]
        for param, slope in zip(params, slopes, strict=True):
            param.grad = slope
        theirs.step()
        loss = torch.zeros(())
        for b, (kind, leaves) in enumerate(zip(kinds, arena.leaves, strict=True)):
            for i in range(2):
                parts = slopes[2 * b + i].float().split(kind.sizes)
                for leaf, part in zip(leaves.values(), parts, strict=True):
                    loss = loss + (leaf[i].flatten() * part).sum()
        arena.step(arena.gradient(loss), SETTINGS)
    found = [row for bank in arena.rows().values() for row in bank]
    assert [row.steps for row in found] == [3, 3, 3, 10]
    for row, param in zip(found, params, strict=True):
        torch.testing.assert_close(row.values[0].double(), param.detach(), rtol=3e-6, atol=1e-9)


def test_norms_by_row_and_by_tensor() -> None:
    kinds = [Kind(nn.Linear(3, 2)), Kind(nn.Linear(2, 2, bias=False))]
    rows = [Row(kind, torch.zeros(3, kind.size)) for kind in kinds]
    arena = Arena([[rows[0]] * 2, [rows[1]]])
    # Weights of both rows, then their biases, then the other bank.
    gradient = torch.tensor([3.0] + 5 * [0.0] + 6 * [1.0] + [4.0, 0.0, 0.0, 0.0] + 4 * [2.0])
    tensors, by_row = arena.norms(gradient)
    assert tensors.tolist() == pytest.approx([3.0, 6.0**0.5, 4.0, 0.0, 4.0])
    assert by_row.tolist() == pytest.approx([5.0, 6.0**0.5, 4.0])
