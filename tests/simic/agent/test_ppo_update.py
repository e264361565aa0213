"""One update: minibatches, KL, entropy, the value loss, credit."""

import math
import time

import pytest
import torch
from torch import nn

from agent_support import (
    filled_buffer,
    make_agent,
    parameters_of,
    shuffle,
)
from esper.leyline import HEAD_NAMES, OP, LifecycleOp
from esper.simic.agent.advantages import compute_gae, head_relevance
from esper.simic.agent.ppo import entropy_floor_scale
from esper.simic.agent.types import MaskTensors


def returns_of(agent, batch):
    _, returns = compute_gae(
        batch.rewards,
        batch.values,
        batch.bootstrap_values,
        batch.terminated,
        batch.truncated,
        agent.config.gamma,
        agent.config.gae_lambda,
    )
    return returns


def one_step_batch(agent, envs=60):
    """Episodes of one step, so that rows can be repeated and left out at will."""
    batch = filled_buffer(agent, envs=envs, steps=1).sequences()
    return batch, batch.actions[:, 0, OP]


def losses_of(agent, batch, rows):
    part = batch.rows(rows)
    advantages = torch.linspace(-1, 1, len(batch.valid))[:, None]
    return agent._losses(part, advantages[rows], torch.zeros(len(rows), 1))


def spy_on_evaluate(agent, monkeypatch):
    calls, evaluate = [], agent._evaluate

    def recorded(observations, actions, masks, hidden):
        calls.append((observations, hidden, torch.is_grad_enabled()))
        return evaluate(observations, actions, masks, hidden)

    monkeypatch.setattr(agent, "_evaluate", recorded)
    return calls


def test_004_c3_minibatches_are_whole_environments_in_time_order(monkeypatch):
    agent = make_agent(epochs=3, minibatches=2, target_kl=None)
    buffer = filled_buffer(agent, envs=6)
    buffer.hidden[0].normal_(generator=shuffle())
    calls = spy_on_evaluate(agent, monkeypatch)
    monkeypatch.setattr(agent, "_check_replay", lambda batch: 0.0)
    agent.update(buffer, shuffle(1))
    assert len(calls) == 3 * 2
    orders = []
    for observations, hidden, _ in calls:
        same = (observations[:, None] == buffer.observations[None]).all(dim=-1).all(dim=-1)
        assert (same.sum(dim=1) == 1).all()
        rows = same.int().argmax(dim=1)
        assert torch.equal(hidden[0], buffer.hidden[0][:, rows])
        orders.append(rows.tolist())
    epochs = [orders[i] + orders[i + 1] for i in range(0, 6, 2)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(("envs", "steps"), [(1, 1), (7, 1), (8, 2), (16, 4), (64, 4)])
def test_minibatches_have_at_least_four_environments(envs, steps):
    agent = make_agent(epochs=1, minibatches=None, target_kl=None)
    metrics = agent.update(filled_buffer(agent, envs=envs), shuffle())
    assert metrics.optimizer_steps == steps


def test_003_buffers_m2_one_permutation_per_epoch(monkeypatch):
    agent = make_agent(epochs=3, minibatches=2, target_kl=None)
    buffer = filled_buffer(agent)
    drawn, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *a, **k: drawn.append(a) or randperm(*a, **k))
    agent.update(buffer, shuffle())
    assert drawn == [(6,)] * 3


def test_003_ppo_m1_the_batch_is_fetched_once_and_never_moved_again(monkeypatch):
    agent = make_agent(epochs=5, minibatches=3, target_kl=None)
    buffer = filled_buffer(agent, envs=6, steps=10)
    fetched, sequences = [], buffer.sequences
    moved, to = [0], torch.Tensor.to

    def spy(self, target):
        if isinstance(target, torch.device):
            moved.append(self.numel())
        return to(self, target)

    monkeypatch.setattr(buffer, "sequences", lambda: fetched.append(1) or sequences())
    monkeypatch.setattr(torch.Tensor, "to", spy)
    agent.update(buffer, shuffle())
    assert len(fetched) == 1
    # Orders of environments and the table of relevant heads; anything about steps has 60 or more.
    assert max(moved) <= 16


def test_004_c4_values_at_the_start_of_an_update_are_the_stored_ones():
    agent = make_agent(value_clip=0.2)
    batch = filled_buffer(agent, steps=30).sequences()
    _, _, values = agent._evaluate(batch.observations, batch.actions, batch.masks, batch.hidden)
    torch.testing.assert_close(values, batch.values, rtol=0, atol=1e-5)


def test_004_h5_later_epochs_recompute_hidden_states_with_the_new_parameters():
    agent = make_agent(epochs=3, minibatches=1, target_kl=None, learning_rate=1e-2)
    buffer = filled_buffer(agent, envs=3)
    agent.update(buffer, shuffle())
    batch = buffer.sequences()
    with torch.no_grad():
        replayed, _, _ = agent._evaluate(
            batch.observations, batch.actions, batch.masks, batch.hidden
        )
        hidden, stepped = batch.hidden, []
        for t in range(batch.valid.shape[1]):
            features, hidden = agent.network.encode(batch.observations[:, t], hidden)
            _, log_probs, _, _ = agent.network.decide(
                features,
                MaskTensors(*(mask[:, t] for mask in batch.masks)),
                actions=batch.actions[:, t],
            )
            stepped.append(log_probs)
    torch.testing.assert_close(replayed, torch.stack(stepped, 1), rtol=1e-4, atol=1e-5)
    assert (replayed - batch.log_probs).abs().max() > 1e-3


def test_001_l5_updates_are_counted_once_each_even_when_kl_stops_them():
    agent = make_agent(target_kl=1e-9, learning_rate=1e-2)
    for count in (1, 2, 3):
        metrics = agent.update(filled_buffer(agent), shuffle())
        assert agent.update_count == count
    assert metrics.early_stop_epoch is not None


def test_000_ppo_kl_stops_before_the_step():
    agent = make_agent(target_kl=1e-9, epochs=4, minibatches=1, learning_rate=1e-2)
    metrics = agent.update(filled_buffer(agent), shuffle())
    # The first pass has KL 0 and steps; the second exceeds the target and must not step.
    assert metrics.optimizer_steps == 1
    assert metrics.early_stop_epoch == 1
    assert metrics.values["approx_kl_max"] > 1.5e-9


def test_kl_stops_an_update_within_its_first_epoch():
    agent = make_agent(target_kl=1e-9, epochs=1, minibatches=3, learning_rate=1e-2)
    metrics = agent.update(filled_buffer(agent), shuffle())
    assert (metrics.optimizer_steps, metrics.early_stop_epoch) == (1, 0)


def test_001_l3_several_epochs_are_allowed_and_kl_is_watched_between_them():
    agent = make_agent(epochs=20, minibatches=2, learning_rate=3e-2, target_kl=0.01)
    metrics = agent.update(filled_buffer(agent), shuffle())
    assert metrics.early_stop_epoch is not None
    assert 0 < metrics.optimizer_steps < 40
    assert metrics.values["approx_kl_max"] > 0.015


def spy_on_kl(agent, monkeypatch):
    """The KL of every minibatch, in their order."""
    kls, losses = [], agent._losses

    def recorded(*args):
        terms = losses(*args)
        kls.append(terms["approx_kl"].item())
        return terms

    monkeypatch.setattr(agent, "_losses", recorded)
    return kls


def test_003_ppo_r4_the_update_stops_at_one_and_a_half_times_the_target(monkeypatch):
    """A KL above the target, but not above 1.5 times the target, is gone past."""
    settings = {"epochs": 12, "minibatches": 1, "learning_rate": 3e-3}
    free = make_agent(target_kl=None, **settings)
    kls = spy_on_kl(free, monkeypatch)
    free.update(filled_buffer(free), shuffle())
    target = kls[4] / 1.25
    stop = next(epoch for epoch, kl in enumerate(kls) if kl > 1.5 * target)
    assert stop > 4
    held = make_agent(target_kl=target, **settings)
    metrics = held.update(filled_buffer(held), shuffle())
    assert metrics.early_stop_epoch == metrics.optimizer_steps == stop


@pytest.mark.parametrize(
    ("changed", "ignoring"),
    [
        (("slot", "blueprint", "blend"), (LifecycleOp.WAIT,)),
        (("blueprint", "blend"), (LifecycleOp.WAIT, LifecycleOp.CULL, LifecycleOp.FOSSILIZE)),
    ],
)
def test_004_h6_heads_that_were_not_drawn_add_no_kl(changed, ignoring):
    agent = make_agent()
    batch, ops = one_step_batch(agent)
    with torch.no_grad():
        for name in changed:
            bias = agent.network.head(name)[2].bias
            bias.copy_(torch.linspace(-3, 3, len(bias)))
    ignored = torch.isin(ops, torch.tensor([int(op) for op in ignoring]))
    for rows, kl in ((ignored, pytest.approx(0.0, abs=1e-9)), (~ignored, None)):
        found = losses_of(agent, batch, rows.nonzero().squeeze(1))["approx_kl"].item()
        assert found == kl if kl is not None else found > 0.01


def blueprint_entropy_gradient(agent, batch, rows):
    agent.network.zero_grad()
    part = batch.rows(rows)
    terms = agent._losses(part, torch.zeros(len(rows), 1), torch.zeros(len(rows), 1))
    terms["entropy_bonus"].backward()
    return torch.cat([p.grad.flatten() for p in agent.network.blueprint_head.parameters()])


def test_000_h2_entropy_gradient_of_a_rare_head_does_not_depend_on_how_rare_it_is():
    agent = make_agent()
    batch = filled_buffer(agent, envs=60, steps=1).sequences()
    ops = batch.actions[:, 0, OP]
    rows = torch.arange(len(ops))
    wait = (ops == LifecycleOp.WAIT).nonzero().squeeze(1)
    rare = blueprint_entropy_gradient(agent, batch, torch.cat([rows, wait, wait, wait]))
    usual = blueprint_entropy_gradient(agent, batch, rows)
    assert usual.norm() > 0
    torch.testing.assert_close(rare, usual, rtol=1e-4, atol=1e-7)


def test_a_head_counts_as_much_as_another_however_rare_it_is():
    agent = make_agent(entropy_coef_per_head={"slot": 0.5})
    batch = filled_buffer(agent, envs=5, steps=7, ends=0.1).sequences()
    advantages = torch.randn(batch.valid.shape, generator=shuffle(2))
    losses = agent._losses(batch, advantages, torch.zeros_like(advantages))
    _, entropies, _ = agent.network.evaluate_actions(
        batch.observations, batch.actions, batch.masks, batch.hidden
    )
    relevant = head_relevance(batch.actions[..., OP]) & batch.valid[..., None]
    policy = bonus = 0.0
    for index, name in enumerate(HEAD_NAMES):
        own = relevant[..., index]
        policy -= advantages[own].mean().item()
        coef = 0.5 if name == "slot" else 1.0
        bonus += coef * entropies[..., index][own].mean().item()
    assert losses["policy_loss"].item() == pytest.approx(policy, abs=1e-5)
    assert losses["entropy_bonus"].item() == pytest.approx(bonus, abs=1e-5)


def test_000_h2_a_coefficient_per_head_scales_exactly_its_own_term():
    plain = make_agent()
    doubled = make_agent(entropy_coef_per_head={"blueprint": 2.0})
    batch = filled_buffer(plain, envs=60, steps=1).sequences()
    rows = torch.arange(60)
    once, twice = (blueprint_entropy_gradient(a, batch, rows) for a in (plain, doubled))
    torch.testing.assert_close(twice, 2 * once)


def test_002_high3_the_coefficient_of_a_head_is_the_product_of_both():
    """entropy_coef 0.2 with 3 for the slot head acts as 0.6 on it and 0.2 on the others."""
    weighted = make_agent(
        entropy_coef=0.2, entropy_coef_per_head={"slot": 3.0}, epochs=1, minibatches=1
    )
    batch = filled_buffer(weighted, envs=40, steps=1).sequences()
    zeros = torch.zeros(40, 1)
    terms = weighted._losses(batch, zeros, zeros)
    by_hand = sum(
        (3.0 if name == "slot" else 1.0) * entropy
        for name, entropy in zip(HEAD_NAMES, terms["head_entropies"].tolist(), strict=True)
    )
    assert terms["entropy_bonus"].item() == pytest.approx(by_hand, rel=1e-5)
    assert weighted.get_entropy_coef() == 0.2


def test_004_h3_entropy_is_averaged_over_relevant_steps():
    agent = make_agent()
    batch, ops = one_step_batch(agent)
    wait = (ops == LifecycleOp.WAIT).nonzero().squeeze(1)
    everything = torch.arange(len(ops))
    once = losses_of(agent, batch, everything)["head_entropies"]
    twice = losses_of(agent, batch, torch.cat([everything, wait, wait]))["head_entropies"]
    for head in range(OP):
        assert twice[head].item() == pytest.approx(once[head].item(), rel=1e-5)
    assert twice[OP].item() != pytest.approx(once[OP].item(), rel=1e-5)
    only_wait = losses_of(agent, batch, wait)["head_entropies"]
    assert only_wait[:OP].tolist() == [0.0, 0.0, 0.0]
    assert all(math.isfinite(x) for x in only_wait.tolist())


def test_004_gap7_per_head_entropy_masking_gives_no_gradient_to_ignored_heads():
    agent = make_agent()
    batch, ops = one_step_batch(agent)
    wait = (ops == LifecycleOp.WAIT).nonzero().squeeze(1)
    losses_of(agent, batch, wait)["entropy_bonus"].backward()
    for name in ("slot", "blueprint", "blend"):
        gradients = [p.grad for p in agent.network.head(name).parameters()]
        assert all(g is None or (g == 0).all() for g in gradients)
    assert any((p.grad != 0).any() for p in agent.network.op_head.parameters())


def test_000_ppo_entropy_rises_when_its_coefficient_dominates():
    agent = make_agent(entropy_coef=100.0, learning_rate=3e-3, target_kl=None)
    first = agent.update(filled_buffer(agent), shuffle()).values["entropy"]
    for round_ in range(10):
        last = agent.update(filled_buffer(agent, key=round_), shuffle()).values["entropy"]
    assert last > first + 0.05
    assert all(p.isfinite().all() for p in parameters_of(agent).values())


def test_001_h2_the_adaptive_floor_receives_the_masks_of_the_batch():
    """Those of steps that were made: beyond the end of a shorter episode everything is legal."""
    settings = {"entropy_coef": 0.01, "entropy_coef_min": 0.01}
    plain = make_agent(**settings)
    adaptive = make_agent(**settings, adaptive_entropy_floor=True)
    batch = filled_buffer(plain, ends=0.2).sequences()
    legal, padded = (
        ops.float().sum(-1).mean().item() for ops in (batch.masks.op[batch.valid], batch.masks.op)
    )
    assert padded > legal + 0.2
    assert plain.update(filled_buffer(plain, ends=0.2), shuffle()).values["entropy_coef"] == 0.01
    coef = adaptive.update(filled_buffer(adaptive, ends=0.2), shuffle()).values["entropy_coef"]
    assert coef == pytest.approx(0.01 * math.log(4) / math.log(legal), rel=1e-6)
    assert coef > 0.01


@pytest.mark.parametrize(
    ("legal", "scale"), [(1, 1.0), (2, 2.0), (3, math.log(4) / math.log(3)), (4, 1.0)]
)
def test_001_h2_the_floor_rises_as_fewer_ops_are_legal(legal, scale):
    masks = (torch.arange(4) < legal).expand(7, 4)
    assert entropy_floor_scale(masks) == pytest.approx(scale, rel=1e-6)


def test_001_h2_the_floor_rises_threefold_at_most():
    masks = torch.ones(100, 4, dtype=torch.bool)
    masks[:, 1:] = False
    masks[:5, 1] = True
    assert entropy_floor_scale(masks) == 3.0


def test_001_h2_the_coefficient_anneals_linearly():
    agent = make_agent(entropy_coef=0.3, entropy_coef_end=0.1, entropy_anneal_updates=4)
    coefs = [agent.update(filled_buffer(agent), shuffle()).values["entropy_coef"] for _ in range(6)]
    assert coefs == pytest.approx([0.3, 0.25, 0.2, 0.15, 0.1, 0.1])


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_000_m1_the_value_loss_is_a_setting_of_the_update(loss):
    agent = make_agent(value_loss=loss, huber_delta=0.5, epochs=1, minibatches=1)
    buffer = filled_buffer(agent)
    batch = buffer.sequences()
    returns = returns_of(agent, batch)
    expected = {
        "mse": nn.functional.mse_loss(batch.values, returns),
        "huber": nn.functional.huber_loss(batch.values, returns, delta=0.5),
    }[loss]
    metrics = agent.update(buffer, shuffle())
    assert metrics.values["value_loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_000_ppo_pessimistic_value_clip_holds_the_critic_back():
    free = make_agent(epochs=8, minibatches=1, target_kl=None, learning_rate=1e-2)
    held = make_agent(epochs=8, minibatches=1, target_kl=None, learning_rate=1e-2, value_clip=0.01)
    moved = []
    for agent in (free, held):
        buffer = filled_buffer(agent)
        batch = buffer.sequences()
        agent.update(buffer, shuffle())
        with torch.no_grad():
            _, _, values = agent.network.evaluate_actions(
                batch.observations, batch.actions, batch.masks, batch.hidden
            )
        moved.append((values - batch.values).abs().mean().item())
    assert moved[1] < 0.7 * moved[0]


def test_001_m3_the_policy_loss_is_a_tensor_on_the_device():
    agent = make_agent()
    batch = filled_buffer(agent).sequences()
    losses = agent._losses(batch, torch.zeros(6, 10), torch.zeros(6, 10))
    assert isinstance(losses["policy_loss"], torch.Tensor)
    assert losses["policy_loss"].device == agent.device


def test_001_kept_policy_loss_is_a_mean_over_relevant_steps():
    """Steps that ignore a head do not dilute what it learns from the others."""
    agent = make_agent()
    batch = filled_buffer(agent, envs=60, steps=1).sequences()
    ops = batch.actions[:, 0, 3]
    wait = (ops == LifecycleOp.WAIT).nonzero().squeeze(1)
    rows = torch.arange(60)
    gradients = []
    for chosen in (rows, torch.cat([rows, wait, wait])):
        agent.network.zero_grad()
        advantages = torch.ones(len(chosen), 1)
        agent._losses(batch.rows(chosen), advantages, torch.zeros_like(advantages))[
            "policy_loss"
        ].backward()
        gradients.append(agent.network.blueprint_head[2].weight.grad.clone())
    assert gradients[0].norm() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)


def test_002_crit1_an_update_on_one_step_stays_finite():
    agent = make_agent()
    metrics = agent.update(filled_buffer(agent, envs=1, steps=1), shuffle())
    assert metrics.skipped is None
    assert all(p.isfinite().all() for p in agent.network.parameters())


def test_d14_the_policy_acts_and_learns_in_single_precision():
    agent = make_agent()
    buffer = filled_buffer(agent)
    agent.update(buffer, shuffle())
    assert buffer.log_probs.dtype == buffer.values.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in agent.network.parameters())


def test_002_high1_nothing_in_the_agent_reads_a_clock(monkeypatch):
    agent = make_agent()
    for name in ("time", "perf_counter", "monotonic", "process_time"):
        for clock in (name, f"{name}_ns"):
            monkeypatch.setattr(time, clock, lambda: pytest.fail("read a clock"))
    metrics = agent.update(filled_buffer(agent), shuffle(), detailed=True)
    assert metrics.optimizer_steps > 0


def test_explained_variance_is_the_share_of_the_returns_that_the_values_knew():
    agent = make_agent()
    buffer = filled_buffer(agent, ends=0.1)
    batch = buffer.sequences()
    returns = returns_of(agent, batch)
    values, returns = batch.values[batch.valid].numpy(), returns[batch.valid].numpy()
    expected = 1.0 - (returns - values).var() / returns.var()
    found = agent.update(buffer, shuffle()).values["explained_variance"]
    assert found == pytest.approx(expected, rel=1e-4)
    assert found != pytest.approx(1.0 - (values - returns).var() / values.var(), rel=1e-2)
