import copy

import pytest
import torch

from esper.growth.grown_module import GrownModule
from esper.growth.optimizer import add_slot_groups, sync_slot_group
from esper.growth.snapshot import HostSnapshot, restore_snapshot, take_snapshot
from esper.leyline import BLEND_NAMES, SeedStage
from helpers import HOSTS, OPTIMIZERS, fitting, loss_of, plant, step, wrap


def content(snapshot: HostSnapshot) -> tuple[list[torch.Tensor], list[tuple[object, ...]]]:
    seeds = [(i, s.blueprint, s.blend, s.stage, s.alpha) for i, s in snapshot.seeds.items()]
    return snapshot.all_tensors(), seeds


def same(one: HostSnapshot, other: HostSnapshot) -> bool:
    (tensors, seeds), (other_tensors, other_seeds) = content(one), content(other)
    return seeds == other_seeds and all(
        torch.equal(a, b) for a, b in zip(tensors, other_tensors, strict=True)
    )


def grown(topology: str, name: str) -> tuple[GrownModule, torch.optim.Optimizer, torch.Tensor]:
    network, x = wrap(topology)
    optimizer = OPTIMIZERS[name](network.host_parameters())
    add_slot_groups(optimizer, network.slot_config.slot_ids)
    gated = BLEND_NAMES.index("gated")
    plant(network, 0, fitting(topology)[0], SeedStage.FOSSILIZED, 1.0)
    plant(network, 1, "branch", SeedStage.BLENDING, 0.4, gated)
    for slot in range(2):
        sync_slot_group(optimizer, network.sites[slot].slot_id, network.seed_parameters(slot))
    step(network, optimizer, x)
    step(network, optimizer, x)
    return network, optimizer, x


@pytest.mark.parametrize("topology", HOSTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restoring_is_bit_exact_whatever_happened_since(topology: str, name: str) -> None:
    network, optimizer, x = grown(topology, name)
    snapshot = take_snapshot(network, optimizer)
    output = network(x)
    # What comes next: more training, a cull, a new seed in another slot, and NaN everywhere.
    step(network, optimizer, x)
    network.remove(1)
    sync_slot_group(optimizer, "r0c1", [])
    plant(network, 2, "norm", SeedStage.TRAINING, 0.0)
    sync_slot_group(optimizer, "r0c2", network.seed_parameters(2))
    step(network, optimizer, x)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(torch.nan)
    restore_snapshot(network, optimizer, snapshot)
    assert same(take_snapshot(network, optimizer), snapshot)
    assert torch.equal(network(x), output)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_from_a_snapshot_as_it_would_have(name: str) -> None:
    network, optimizer, x = grown("cnn", name)
    snapshot = take_snapshot(network, optimizer)
    for _ in range(3):
        step(network, optimizer, x)
    expected = take_snapshot(network, optimizer)
    restore_snapshot(network, optimizer, snapshot)
    for _ in range(3):
        step(network, optimizer, x)
    assert same(take_snapshot(network, optimizer), expected)


def test_a_snapshot_is_on_the_cpu_and_shares_no_storage() -> None:
    network, optimizer, _ = grown("cnn", "adam")
    snapshot = take_snapshot(network, optimizer)
    live = {t.untyped_storage().data_ptr() for t in network.state_dict().values()}
    live |= {
        v.untyped_storage().data_ptr()
        for state in optimizer.state.values()
        for v in state.values()
        if torch.is_tensor(v)
    }
    for tensor in snapshot.all_tensors():
        assert tensor.device.type == "cpu"
        assert tensor.untyped_storage().data_ptr() not in live


def test_learning_rates_stay_as_a_scheduler_left_them() -> None:
    network, optimizer, x = grown("cnn", "sgd")
    snapshot = take_snapshot(network, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    restore_snapshot(network, optimizer, snapshot)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    loss_of(network(x)).backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_on_after_a_restore_leaves_the_snapshot_as_it_was(name: str) -> None:
    network, optimizer, x = grown("mlp", name)
    snapshot = take_snapshot(network, optimizer)
    untouched = copy.deepcopy(snapshot)
    restore_snapshot(network, optimizer, snapshot)
    step(network, optimizer, x)
    assert not same(take_snapshot(network, optimizer), untouched)
    assert same(snapshot, untouched)
