"""The network over sets: places mean nothing, absent slots change nothing, parameters fit all."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from agent_support import mask_tensors, random_masks
from esper.leyline import ActionMasks, ConfigError, LifecycleOp
from esper.simic.agent.network import NetworkConfig
from esper.simic.agent.set_network import SetActorCritic, new_network
from esper.simic.agent.types import MaskTensors
from esper.tamiyo.policy.set_features import FITS, PRESENT, SetLayout, pad_masks

SLOTS, BLUEPRINTS, ENVS, STEPS = 4, 6, 5, 7
CLOSE = {"rtol": 0.0, "atol": 1e-6}


def make_set_network(slots: int = SLOTS, blueprints: int = BLUEPRINTS, **more) -> SetActorCritic:
    sizes = {"feature_dim": 24, "lstm_hidden_dim": 16, "embedding_dim": 12, "actor_gain": 1.0}
    config = NetworkConfig(
        SetLayout(slots, blueprints).size, slots, blueprints, kind="set", **(sizes | more)
    )
    network = new_network(config, key=3)
    assert isinstance(network, SetActorCritic)
    return network


def join(run: torch.Tensor, slots: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """The inverse of `SetLayout.split`."""
    return torch.cat([run, slots.flatten(-2), candidates.flatten(-3)], dim=-1)


def random_parts(rng: torch.Generator, *lead: int) -> tuple[torch.Tensor, ...]:
    observations = torch.rand(*lead, SetLayout(SLOTS, BLUEPRINTS).size, generator=rng) * 4 - 2
    run, slots, candidates = SetLayout(SLOTS, BLUEPRINTS).split(observations)
    slots[..., PRESENT] = 1.0
    fits = (candidates[..., FITS] > 0).float()
    candidates[..., FITS] = 1.0
    candidates.mul_(fits.unsqueeze(-1))
    return run, slots, candidates


def random_steps(key: int = 0) -> tuple[tuple[torch.Tensor, ...], MaskTensors, torch.Tensor]:
    """Parts of observations and masks [ENVS, STEPS, ...], and legal actions."""
    parts = random_parts(torch.Generator().manual_seed(key), ENVS, STEPS)
    flat = random_masks(np.random.default_rng(key), ENVS * STEPS, SLOTS, BLUEPRINTS)
    masks = MaskTensors(*(mask.unflatten(0, (ENVS, STEPS)) for mask in mask_tensors(flat)))
    network = make_set_network()
    features, _ = network.encode(join(*parts), network.get_initial_hidden(ENVS))
    draws = torch.rand(ENVS, STEPS, 4, generator=torch.Generator().manual_seed(key + 1))
    return parts, masks, network.decide(features, masks, draws=draws)[0]


def played(network: SetActorCritic, parts, masks: MaskTensors, actions: torch.Tensor):
    """Log-probs, entropies, values, and the logits of each head."""
    hidden = network.get_initial_hidden(ENVS)
    with torch.no_grad():
        results = network.evaluate_actions(join(*parts), actions, masks, hidden)
        features, _ = network.encode(join(*parts), hidden)
        _, _, distributions, _ = network.decide(features, masks, actions=actions)
    return results, [d.logits for d in distributions]


def germinating(actions: torch.Tensor) -> torch.Tensor:
    return actions[..., 3] == LifecycleOp.GERMINATE


def test_permuting_slots_permutes_the_policy() -> None:
    network = make_set_network()
    parts, masks, actions = random_steps()
    assert germinating(actions).any()
    before, logits = played(network, parts, masks, actions)
    order = torch.tensor([2, 0, 3, 1])
    run, slots, candidates = parts
    moved = run, slots[..., order, :], candidates[..., order, :, :]
    moved_masks = MaskTensors(
        masks.op, masks.slot[..., order], masks.blueprint[..., order, :], masks.blend
    )
    moved_actions = actions.clone()
    moved_actions[..., 0] = torch.argsort(order)[actions[..., 0]]
    after, moved_logits = played(network, moved, moved_masks, moved_actions)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    acts = actions[..., 3] != LifecycleOp.WAIT
    torch.testing.assert_close(logits[0][acts][:, order], moved_logits[0][acts], **CLOSE)
    for head, where in ((1, germinating(actions)), (2, acts | ~acts), (3, acts | ~acts)):
        torch.testing.assert_close(logits[head][where], moved_logits[head][where], **CLOSE)


def test_permuting_blueprints_permutes_the_policy() -> None:
    network = make_set_network()
    parts, masks, actions = random_steps(4)
    before, logits = played(network, parts, masks, actions)
    order = torch.tensor([5, 3, 0, 1, 4, 2])
    moved_masks = masks._replace(blueprint=masks.blueprint[..., order])
    moved_actions = actions.clone()
    moved_actions[..., 1] = torch.argsort(order)[actions[..., 1]]
    moved = (*parts[:2], parts[2][..., order, :])
    after, moved_logits = played(network, moved, moved_masks, moved_actions)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    where = germinating(actions)
    torch.testing.assert_close(logits[1][where][:, order], moved_logits[1][where], **CLOSE)


def test_absent_slots_and_blueprints_change_nothing() -> None:
    network = make_set_network()
    with torch.no_grad():
        # As after learning: without biases an absent slot is 0 whether it is masked or not.
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(5)
            )
    parts, masks, actions = random_steps(8)
    wide = network.fitted(SLOTS + 3, BLUEPRINTS + 2)
    run, slots, candidates = parts
    pad = torch.nn.functional.pad
    more = run, pad(slots, (0, 0, 0, 3)), pad(candidates, (0, 0, 0, 2, 0, 3))
    numpy = ActionMasks(*(mask.flatten(0, 1).numpy() for mask in masks))
    padded = mask_tensors(pad_masks(numpy, SLOTS + 3))
    padded = MaskTensors(*(mask.unflatten(0, (ENVS, STEPS)) for mask in padded))
    padded = padded._replace(blueprint=pad(padded.blueprint, (0, 2)))
    before, _ = played(network, parts, masks, actions)
    after, _ = played(wide, more, padded, actions)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    draws = torch.rand(ENVS, STEPS, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        drawn = [
            net.decide(net.encode(join(*p), net.get_initial_hidden(ENVS))[0], m, draws=draws)[0]
            for net, p, m in ((network, parts, masks), (wide, more, padded))
        ]
    assert torch.equal(*drawn)


def test_the_blueprint_head_sees_the_slot_that_was_drawn() -> None:
    """Two slots with the same candidates: only what is known of the slots tells them apart."""
    network = make_set_network()
    run, slots, candidates = random_parts(torch.Generator().manual_seed(0), 1)
    candidates[:, 1] = candidates[:, 0]
    features, _ = network.encode(join(run, slots, candidates), network.get_initial_hidden(1))
    first, second = (
        network._logits("blueprint", features, {"slot": torch.tensor([slot])}) for slot in (0, 1)
    )
    assert (first - second).abs().max() > 1e-3
    slots[:, 1] = slots[:, 0]
    features, _ = network.encode(join(run, slots, candidates), network.get_initial_hidden(1))
    first, second = (
        network._logits("blueprint", features, {"slot": torch.tensor([slot])}) for slot in (0, 1)
    )
    torch.testing.assert_close(first, second, **CLOSE)


def test_the_slot_head_sees_the_op_that_was_drawn() -> None:
    network = make_set_network()
    parts = random_parts(torch.Generator().manual_seed(0), 1)
    features, _ = network.encode(join(*parts), network.get_initial_hidden(1))
    germinate, cull = (
        network._logits("slot", features, {"op": torch.tensor([op])})
        for op in (LifecycleOp.GERMINATE, LifecycleOp.CULL)
    )
    assert (germinate - cull).abs().max() > 1e-3


def test_every_parameter_learns() -> None:
    network = make_set_network()
    parts, masks, actions = random_steps()
    hidden = network.get_initial_hidden(ENVS)
    log_probs, entropies, values = network.evaluate_actions(join(*parts), actions, masks, hidden)
    (log_probs.sum() + entropies.sum() + values.sum()).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_parameters_do_not_depend_on_slots_or_blueprints() -> None:
    small, large = make_set_network(1, 2), make_set_network(9, 40)
    assert {n: p.shape for n, p in small.named_parameters()} == {
        n: p.shape for n, p in large.named_parameters()
    }
    fitted = small.fitted(9, 40)
    assert fitted.config == large.config
    with torch.no_grad():
        next(small.parameters()).add_(1.0)
    assert torch.equal(next(small.parameters()), next(fitted.parameters()))


def test_the_default_network_is_small_enough_to_ship() -> None:
    config = NetworkConfig(SetLayout(3, 18).size, 3, 18, kind="set")
    narrow = replace(config, feature_dim=64, lstm_hidden_dim=64)
    count = [sum(p.numel() for p in new_network(c).parameters()) for c in (narrow, config)]
    assert count[0] < 100_000
    assert count[1] < 250_000


def test_observations_of_another_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes observations of"):
        NetworkConfig(80, 3, 5, kind="set")
    with pytest.raises(ConfigError, match="flat or set"):
        NetworkConfig(80, 3, 5, kind="graph")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="embedding_dim"):
        NetworkConfig(80, 3, 5, embedding_dim=0)
