"""The metrics of an update: what they mean, and that one is one edit."""

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_support import (
    filled_buffer,
    make_agent,
    parameters_of,
    shuffle,
)
from esper.leyline import HEAD_NAMES, OP, RELEVANT_HEADS, LifecycleOp
from esper.simic.agent.advantages import compute_per_head_advantages
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.metrics import METRICS, Minibatch, PPOUpdateMetrics
from esper.simic.telemetry.health import GradientThresholds
from telemetry_support import collect_gradients
from training_support import analytic_state, play


def test_000_l3_metrics_are_scalars_in_the_result():
    agent = make_agent()
    row = agent.update(filled_buffer(agent), shuffle()).flat()
    for name, value in row.items():
        assert value is None or isinstance(value, int | float | str), name
    assert [name for name, value in row.items() if value is None] == ["skipped", "early_stop_epoch"]


def test_an_update_that_learns_nothing_has_the_same_columns():
    agent = make_agent()
    nothing = agent.update(agent.new_buffer(6, 10), shuffle()).flat()
    assert list(nothing) == list(agent.update(filled_buffer(agent), shuffle()).flat())
    assert {name for name, value in nothing.items() if value is not None} == {
        "steps",
        "optimizer_steps",
        "skipped",
    }


def test_a_metric_is_one_entry_of_the_table_and_shows_in_the_row_of_a_round(monkeypatch):
    monkeypatch.setitem(METRICS, "steps_learnt", (np.sum, lambda m: torch.tensor(len(m.values))))
    monkeypatch.setitem(METRICS, "op_moved", (np.max, lambda m: m.log_ratio.abs().amax(dim=0)[OP]))
    config, state = analytic_state(rounds=1, **{"ppo.target_kl": 1e6})
    (row,) = play(config, state).of("round")
    assert row["steps_learnt"] == config.ppo.epochs * row["env_steps"]
    assert 0 < row["op_moved"] <= max(np.log(row["ratio_max"]), -np.log(row["ratio_min"])) + 1e-6


def test_the_page_on_ppo_describes_exactly_the_metrics_there_are():
    text = (Path(__file__).parents[3] / "docs" / "ppo.md").read_text(encoding="utf-8")
    table = text.split("## Metrics")[1].split("##")[0]
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    described = [name for row in rows for name in re.findall(r"`([\w<>]+)`", row)]
    heads = "|".join((*HEAD_NAMES, "value"))
    names = [
        re.sub(rf"^({heads})_(?=entropy|grad_norm)", "<head>_", n)
        for n in PPOUpdateMetrics(0).flat()
    ]
    assert sorted(described) == sorted(set(names))


def test_000_a1_one_order_of_heads_everywhere():
    agent = make_agent()
    metrics = agent.update(filled_buffer(agent), shuffle())
    for kind, expected in (("entropy", HEAD_NAMES), ("grad_norm", (*HEAD_NAMES, "value"))):
        names = [name.removesuffix(f"_{kind}") for name in metrics.values if f"_{kind}" in name]
        assert tuple(name for name in names if name != "grad_norm_max") == expected
    ops = torch.arange(4)
    assert tuple(compute_per_head_advantages(torch.ones(4), ops)) == HEAD_NAMES


def reads(monkeypatch, **config):
    """How often an update with these settings reads tensors back, by method."""
    agent = make_agent(target_kl=None, **config)
    buffer = filled_buffer(agent)
    counts: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        for name in ("item", "tolist"):
            original = getattr(torch.Tensor, name)

            def counted(self, name=name, original=original):
                counts[name] += 1
                return original(self)

            patch.setattr(torch.Tensor, name, counted)
        agent.update(buffer, shuffle())
    return counts


def test_001_m1_a_minibatch_reads_back_once_before_and_once_after_its_gradient(monkeypatch):
    few = reads(monkeypatch, epochs=1, minibatches=1)
    many = reads(monkeypatch, epochs=6, minibatches=1)
    assert many - few == Counter(tolist=2 * 5)


def test_001_h1_head_gradient_norms_are_those_of_the_plain_module():
    agent = make_agent(epochs=1, minibatches=1, max_grad_norm=1e9)
    metrics = agent.update(filled_buffer(agent), shuffle())
    for name in (*HEAD_NAMES, "value"):
        gradients = [p.grad.flatten() for p in agent.network.head(name).parameters()]
        norm = torch.cat(gradients).norm().item()
        assert metrics.values[f"{name}_grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_001_l4_the_worst_ratio_names_its_head():
    agent = make_agent(epochs=1, minibatches=1)
    for name in ("slot", "blend", "op"):
        buffer = filled_buffer(agent)
        index = HEAD_NAMES.index(name)
        relevant = buffer.log_probs[..., index] != 0
        buffer.log_probs[..., index] -= 9e-5 * relevant
        assert agent.update(buffer, shuffle()).values["ratio_worst_head"] == name
        agent = make_agent(epochs=1, minibatches=1)


def test_004_m11_entropy_is_a_number_between_zero_and_one():
    agent = make_agent(network={"actor_gain": 1e-3})
    metrics = agent.update(filled_buffer(agent, envs=20), shuffle())
    assert 0.5 < metrics.values["entropy"] <= 1.0
    assert all(0.0 <= metrics.values[f"{head}_entropy"] <= 1.0 for head in HEAD_NAMES)


def test_004_m12_metrics_carry_advantage_statistics_before_normalisation():
    agent = make_agent(gamma=0.0, gae_lambda=0.0)
    buffer = filled_buffer(agent)
    expected = (buffer.rewards - buffer.values).numpy()
    metrics = agent.update(buffer, shuffle())
    assert metrics.values["advantage_mean"] == pytest.approx(expected.mean(), rel=1e-4)
    assert metrics.values["advantage_std"] == pytest.approx(expected.std(), rel=1e-4)
    assert metrics.values["advantage_min"] == pytest.approx(expected.min(), rel=1e-4)
    assert metrics.values["advantage_max"] == pytest.approx(expected.max(), rel=1e-4)
    assert metrics.values["ratio_std"] > 0


def test_004_m13_the_gradient_norm_is_that_before_clipping():
    norms = []
    for limit in (1e6, 1e-3):
        agent = make_agent(max_grad_norm=limit, epochs=1, minibatches=1)
        norms.append(agent.update(filled_buffer(agent), shuffle()).values["grad_norm"])
    assert norms[0] == norms[1] > 1e-2


def test_metrics_are_means_over_minibatches_or_true_extremes():
    """An extreme is the largest of the update, wherever in it it was, and not the last."""
    agent, losses_seen, steps_seen = make_agent(target_kl=None, learning_rate=1e-2), [], []
    losses, step = agent._losses, agent._step
    agent._losses = lambda *args: losses_seen.append(losses(*args)) or losses_seen[-1]
    agent._step = lambda: steps_seen.append(step()) or steps_seen[-1]
    values = agent.update(filled_buffer(agent, key=3, ends=0.1), shuffle(3)).values
    seen = {
        name: [torch.as_tensor(shown[name]).item() for shown in rows]
        for rows in (losses_seen, steps_seen)
        for name in rows[0]
        if np.ndim(rows[0][name]) == 0
    }
    largest = {"approx_kl_max": "approx_kl", "grad_norm_max": "grad_norm"}
    largest |= {name: name for name in ("vanishing_tensors", "exploding_tensors")}
    for name, source in largest.items():
        assert values[name] == max(seen[source]) > seen[source][-1], name
    means = {
        name: s for name, (reduce, s, *_) in METRICS.items() if reduce is np.mean and s in seen
    }
    assert len(means) == 10
    for name, source in means.items():
        assert values[name] == pytest.approx(np.mean(seen[source]), rel=1e-6), name
        assert len(set(seen[source])) > 1, name


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_a_ratio_is_clipped_on_both_sides(side):
    """Log-ratios of four drawn heads, two of them outside 1 ± 0.2 on one side."""
    log_ratio = side * torch.tensor([[0.0], [0.1], [0.3], [0.9]])
    drawn = torch.ones_like(log_ratio, dtype=torch.bool)
    unused = torch.zeros(4)
    minibatch = Minibatch(
        PPOConfig(clip_ratio=0.2), log_ratio, drawn, log_ratio, unused, unused, unused
    )
    _, clip_fraction = METRICS["clip_fraction"]
    assert clip_fraction(minibatch).item() == 0.5


def test_004_h14_the_health_of_gradients_is_measured_against_the_clip_norm_before_clipping():
    """The gradient of one step is still there after it, as long as clipping did nothing to it."""
    agent = make_agent(epochs=1, minibatches=1, max_grad_norm=20.0)
    metrics = agent.update(filled_buffer(agent), shuffle())
    assert metrics.values["grad_norm"] < 20.0
    thresholds = GradientThresholds.for_clip_norm(20.0)
    expected = collect_gradients(agent.network.parameters(), thresholds)
    assert metrics.values["gradient_health"] == expected.health
    assert metrics.values["vanishing_tensors"] == expected.vanishing
    assert metrics.values["exploding_tensors"] == expected.exploding
    assert metrics.values["zero_gradient_fraction"] == expected.zero_fraction
    tight = make_agent(epochs=1, minibatches=1, max_grad_norm=1e-4)
    row = tight.update(filled_buffer(tight), shuffle()).flat()
    clipped = collect_gradients(tight.network.parameters(), GradientThresholds.for_clip_norm(1e-4))
    assert row["exploding_tensors"] > 10 > clipped.exploding == 0
    assert row["gradient_health"] < 0.6 < clipped.health


def test_heads_that_are_never_drawn_show_as_vanishing_gradients():
    agent = make_agent(epochs=1, minibatches=1)
    with torch.no_grad():
        agent.network.op_head[2].bias[LifecycleOp.WAIT] = 1e3
    row = agent.update(filled_buffer(agent), shuffle()).flat()
    idle = [
        p for name in ("slot", "blueprint", "blend") for p in agent.network.head(name).parameters()
    ]
    share = sum(p.numel() for p in idle) / sum(p.numel() for p in agent.network.parameters())
    assert row["vanishing_tensors"] >= len(idle)
    assert row["zero_gradient_fraction"] >= share
    assert row["gradient_health"] < 0.8


def test_health_counts_only_what_learns():
    agent = make_agent(critic_first=1)
    metrics = agent.update(filled_buffer(agent), shuffle(), detailed=True)
    assert metrics.values["vanishing_tensors"] == 0
    assert metrics.values["gradient_health"] > 0.9
    assert {layer.layer_name.split(".")[0] for layer in metrics.layers} == {"value_head"}
    assert metrics.ratios.worst_ratio == pytest.approx(1.0, abs=1e-5)


def test_detailed_telemetry_changes_nothing():
    usual, close = make_agent(), make_agent()
    metrics = [
        agent.update(filled_buffer(agent, ends=0.1), shuffle(), detailed=agent is close)
        for agent in (usual, close)
    ]
    assert metrics[0].flat() == metrics[1].flat()
    assert (metrics[0].layers, metrics[0].ratios) == ([], None)
    for name, parameter in parameters_of(usual).items():
        assert torch.equal(parameter, parameters_of(close)[name]), name


def test_a_close_look_shows_every_layer_of_the_last_minibatch_before_clipping():
    agent, norms = make_agent(max_grad_norm=1e-3, target_kl=None), []
    step = agent._step
    agent._step = lambda: norms.append(step()) or norms[-1]
    layers = agent.update(filled_buffer(agent), shuffle(), detailed=True).layers
    assert [x.layer_name for x in layers] == [n for n, _ in agent.network.named_parameters()]
    total = sum(layer.grad_norm**2 for layer in layers) ** 0.5
    assert total == pytest.approx(norms[-1]["grad_norm"], rel=1e-5)
    assert total != pytest.approx(norms[0]["grad_norm"], rel=1e-3)


def test_a_close_look_at_a_gradient_that_is_not_finite_names_its_layers(monkeypatch):
    agent = make_agent()
    losses = agent._losses

    def poisoned(*args):
        terms = losses(*args)
        zero = agent.network.op_head[2].bias.sum() * 0.0
        return terms | {"policy_loss": terms["policy_loss"] + torch.sqrt(zero)}

    monkeypatch.setattr(agent, "_losses", poisoned)
    metrics = agent.update(filled_buffer(agent), shuffle(), detailed=True)
    assert metrics.skipped == "grad_norm is nan"
    assert [x.layer_name for x in metrics.layers if x.nan_count] == ["op_head.2.bias"]


def test_004_gap1_a_close_look_compares_the_new_policy_with_what_was_acted():
    """By hand: every valid step of every episode, every head that its op made relevant."""
    agent = make_agent(learning_rate=1e-2, target_kl=None, ratio_explosion=1.2, ratio_collapse=0.9)
    buffer = filled_buffer(agent, ends=0.1)
    ratios = agent.update(buffer, shuffle(), detailed=True).ratios
    batch, found = buffer.sequences(), []
    with torch.no_grad():
        new, _, _ = agent.network.evaluate_actions(
            batch.observations, batch.actions, batch.masks, batch.hidden
        )
    for step, (row, time) in enumerate(batch.valid.nonzero().tolist()):
        op = LifecycleOp(batch.actions[row, time, OP].item())
        for index, head in enumerate(HEAD_NAMES):
            if head in RELEVANT_HEADS[op]:
                change = (new - batch.log_probs)[row, time, index].item()
                found.append((abs(change), math.exp(change), step, head))
    _, ratio, _, head = max(found)
    assert (ratios.worst_ratio, ratios.worst_head) == (pytest.approx(ratio, rel=1e-5), head)
    outside = [(step, head) for _, ratio, step, head in found if not 0.9 <= ratio <= 1.2]
    assert sum(ratios.outliers.values()) == len(outside) > 0
    assert {(row["index"], row["head"]) for row in ratios.examples} <= set(outside)
    assert ratios.log_prob_change_mean == pytest.approx(np.mean([f[0] for f in found]), rel=1e-4)


@pytest.mark.parametrize(("explosion", "found"), [(1e9, False), (1.0 + 1e-6, True)])
def test_004_m21_ratio_thresholds_are_settings(explosion, found):
    agent = make_agent(ratio_explosion=explosion, ratio_collapse=0.0, learning_rate=1e-2)
    metrics = agent.update(filled_buffer(agent), shuffle())
    assert (metrics.values["ratio_outliers"] > 0) is found


def agent_relevance():
    """The causal table, written out."""
    return torch.tensor(
        [
            [False, False, False, True],
            [True, True, True, True],
            [True, False, False, True],
            [True, False, False, True],
        ]
    )


def test_d16_entropy_is_a_mean_not_a_sum_over_heads():
    agent = make_agent(network={"actor_gain": 1e-6})
    batch = filled_buffer(agent, envs=40).sequences()
    _, entropies, _ = agent.network.evaluate_actions(
        batch.observations, batch.actions, batch.masks, batch.hidden
    )
    relevant = torch.zeros_like(entropies, dtype=torch.bool)
    for op, row in enumerate(agent_relevance()):
        relevant[batch.actions[..., OP] == op] = row
    expected = (entropies.sum() / relevant.sum()).item()
    metrics = agent.update(filled_buffer(agent, envs=40), shuffle())
    assert metrics.values["entropy"] == pytest.approx(expected, abs=0.02)
    assert metrics.values["entropy"] <= 1.0


def test_d17_entropy_of_a_head_is_over_its_steps_and_extremes_are_true_ones():
    agent = make_agent(epochs=4, minibatches=1, target_kl=None, learning_rate=1e-2)
    buffer = filled_buffer(agent)
    seen, losses = [], agent._losses
    agent._losses = lambda *args: seen.append(losses(*args)) or seen[-1]
    metrics = agent.update(buffer, shuffle())
    assert metrics.values["ratio_max"] == max(s[METRICS["ratio_max"][1]].max().item() for s in seen)
    assert metrics.values["ratio_min"] == min(s[METRICS["ratio_min"][1]].min().item() for s in seen)
    assert metrics.values["approx_kl_max"] == max(s["approx_kl"].item() for s in seen)
    germinate = (buffer.actions[..., OP] == LifecycleOp.GERMINATE).sum().item()
    assert all(s["head_counts"][1].item() == germinate for s in seen)
    means = [s["head_entropies"][1].item() for s in seen]
    assert metrics.values["blueprint_entropy"] == pytest.approx(np.mean(means), rel=1e-5)


def test_d17_a_head_that_was_never_drawn_has_no_entropy():
    agent = make_agent()
    with torch.no_grad():
        agent.network.op_head[2].bias[LifecycleOp.WAIT] = 1e3
    metrics = agent.update(filled_buffer(agent), shuffle())
    assert metrics.values["slot_entropy"] is None
    assert metrics.values["op_entropy"] == pytest.approx(0.0, abs=1e-6)
