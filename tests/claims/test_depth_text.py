"""benchmarks/claims/depth_text.py: what is counted, when the rule grows, and what the rows say."""

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import depth_text as d
from esper.tamiyo.controllers import depth as depth_rule

RATIO = 2.0


def curve(fall: float, last: float = 64.0, first: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Losses that fall by the share `fall` of 2 nats with every doubling of the compute."""
    spent = np.arange(first, last + 0.5)
    return 2.0 - 2.0 * fall * np.log2(spent / last), spent


@pytest.mark.parametrize("fall", [0.0, 0.02, 0.1, 0.13, 0.3])
def test_the_rule_grows_where_the_loss_falls_slowly(fall: float) -> None:
    losses, spent = curve(fall)
    recent = losses[spent >= spent[-1] / depth_rule.WINDOW].mean()
    due = 2.0 * fall * np.log2(RATIO) < depth_rule.FALL * recent
    assert depth_rule.grow_now(losses, spent, RATIO) == due
    assert due == (fall < 0.125)


def test_a_dearer_next_depth_must_wait_for_a_flatter_curve() -> None:
    losses, spent = curve(0.1)
    assert depth_rule.grow_now(losses, spent, 2.0)
    assert not depth_rule.grow_now(losses, spent, 4.0)


def test_the_rule_waits_until_the_compute_has_grown_and_enough_is_known() -> None:
    losses, spent = curve(0.0)
    grows = [depth_rule.grow_now(losses[:n], spent[:n], RATIO) for n in range(len(spent) + 1)]
    # The first number of epochs whose second half, with its edge, has POINTS losses.
    assert grows.index(True) == 2 * (depth_rule.POINTS - 1)
    assert all(grows[grows.index(True) :])
    # Grown after 10 epochs: not before the compute is SPAN times that.
    later = [depth_rule.grow_now(losses[9:n], spent[9:n], RATIO) for n in range(10, len(spent) + 1)]
    assert spent[9 + later.index(True)] == 10 * depth_rule.SPAN


@pytest.mark.parametrize("blocks", [1, 3])
def test_multiply_adds_are_those_of_the_matrix_products(blocks: int) -> None:
    model = d.build(blocks, key=0)
    tokens = torch.zeros((2, d.CONTEXT), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    assert d.step_macs(blocks, windows=2) == 3 * counter.get_total_flops() // 2


def test_attention_is_that_of_the_host() -> None:
    block, x = d.Block(d.WIDTH, d.HEADS, 0.0), torch.randn(2, d.CONTEXT, d.WIDTH)
    own = super(d.Block, block).attend(x)
    torch.testing.assert_close(block.attend(x), own)


def test_the_compute_that_a_static_network_needs() -> None:
    budgets, losses = (1, 4, 16), (3.0, 2.0, 1.0)
    reach = [d.compute_to_reach(loss, budgets, losses) for loss in (3.5, 3.0, 2.5, 2.0, 1.5, 0.9)]
    assert reach == pytest.approx([1.0, 1.0, 2.0, 4.0, 8.0, math.inf])


def trials(losses: dict[str, list[float]], depth: int = 4) -> dict:
    """Of one arm at its budgets, for two keys: the second is 0.1 worse."""
    return {
        (d.name_of(arm, budget), key): {"test_loss": loss + key / 10, "depth": depth}
        for arm, values in losses.items()
        for budget, loss in zip(d.ARMS[arm].budgets, values, strict=True)
        for key in (0, 1)
    }


ROWS = trials(
    {
        "grown": [2.0, 1.9, 1.8, 1.7, 1.5],
        "static 1": [2.0, 1.8, 1.75],
        "static 2": [2.0, 1.7, 1.65, 1.6],
        "static 4": [2.0, 1.8, 1.4],
        "planned": [1.6, 1.3],
    }
)


def test_savings_are_against_the_static_network_of_the_same_depth() -> None:
    assert d.saving(ROWS, "planned", 0, 8) == pytest.approx(1 - 8 / (8 * 2**0.5))
    assert d.saving(ROWS, "grown", 1, 8) == pytest.approx(1 - 8 / (8 * 2**0.25))
    assert d.saving(ROWS, "grown", 0, 16) == pytest.approx(1 - 16 / (8 * 2**0.75))
    # Not reached by the static network: at least nothing.
    assert d.saving(ROWS, "planned", 0, 16) == 0.0


def test_the_best_static_depth_is_the_best_of_each_budget() -> None:
    keys = [0, 1]
    best = [d.best_static(ROWS, keys, budget) for budget in d.BUDGETS]
    names = ["static 1", "static 1", "static 2", "static 2", "static 4"]
    assert best == [d.name_of(*each) for each in zip(names, d.BUDGETS, strict=True)]
    assert d.excess(ROWS, keys, 4) == pytest.approx([1.8 / 1.7 - 1, 1.9 / 1.8 - 1])
    found = d.verdict(ROWS)
    assert found["planned_keys"] == found["grown_keys"] == keys
    assert [row["mean"] for row in found["cost"]] == pytest.approx([1.6 - 1.65, 1.3 - 1.4])
    assert [row["depths"] for row in found["losses"]] == ["4/4"] * 5


def test_a_branch_leaves_its_trunk_as_it_was() -> None:
    data = torch.randint(0, 256, (40, d.CONTEXT + 1), dtype=torch.uint8)
    steps = d.step_macs(1) * 4
    net, alone = (d.Net("grown", 0, data) for _ in range(2))
    for each in (net, alone):
        each.run_until(steps)
        each.grow()
    branched = net.branch(steps + 3 * d.step_macs(2))
    for each in (net, alone):
        each.run_until(steps + 2 * d.step_macs(2))
        assert each.step == 6
    assert all(map(torch.equal, net.model.parameters(), alone.model.parameters()))
    assert len(branched.blocks) == net.depth == 2
    assert not torch.equal(branched.head.weight, net.model.head.weight)
