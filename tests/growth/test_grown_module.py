"""The invariants of growth, for every blueprint, slot and order."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from esper.growth.blueprints.catalogue import BlueprintSpec, default_catalogue
from esper.growth.grown_module import keyed
from esper.growth.lifecycle import scheduled_alpha
from esper.leyline import BLEND_NAMES, ConfigError, InvalidStateMachineError, SeedStage
from helpers import BLENDED, HOSTS, everywhere, fitting, grads, loss_of, nan_after, plant, wrap

TOPOLOGIES = tuple(HOSTS)
PAIRS = [(t, name) for t in TOPOLOGIES for name in fitting(t)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_wrapped_but_ungrown_is_bit_identical_and_has_no_hooks(topology: str) -> None:
    host, x = HOSTS[topology]()
    expected = host(x)
    network, _ = wrap(topology)
    assert torch.equal(network(x), expected)
    assert not any(module._forward_hooks for module in network.modules())


@pytest.mark.parametrize(("topology", "blueprint"), PAIRS)
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_while_training_output_and_host_gradients_are_those_without_seed(
    topology: str, blueprint: str, slot: int
) -> None:
    host, x = HOSTS[topology]()
    alone = host(x)
    loss_of(alone).backward()
    expected = grads(host)
    network, _ = wrap(topology)
    plant(network, slot, blueprint, SeedStage.TRAINING, 0.0, shake=0.3)
    output = network(x)
    assert torch.equal(output, alone)
    loss_of(output).backward()
    for name, gradient in grads(network.host).items():
        assert torch.equal(gradient, expected[name]), name
    for parameter in network.slot(slot).seed.parameters():  # type: ignore[union-attr]
        assert parameter.grad is not None
        assert float(parameter.grad.norm()) > 0.0


def test_a_training_seed_of_nan_cannot_touch_the_host() -> None:
    catalogue = default_catalogue().with_blueprint(everywhere("nan", nan_after(0)))
    host, x = HOSTS["cnn"]()
    alone = host(x)
    loss_of(alone).backward()
    expected = grads(host)
    network, _ = wrap("cnn", catalogue)
    plant(network, 1, "nan", SeedStage.TRAINING, 0.0)
    output = network(x)
    assert torch.equal(output, alone)
    loss_of(output).backward()
    assert all(torch.equal(g, expected[n]) for n, g in grads(network.host).items())


@pytest.mark.parametrize(("topology", "blueprint"), PAIRS)
@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("stage", list(BLENDED))
@pytest.mark.parametrize("blend", range(len(BLEND_NAMES)))
def test_once_blended_every_parameter_is_alive(
    topology: str, blueprint: str, slot: int, stage: SeedStage, blend: int
) -> None:
    network, x = wrap(topology)
    plant(network, slot, blueprint, stage, BLENDED[stage], blend)
    loss_of(network(x)).backward()
    assert_alive(network)


def assert_alive(network: nn.Module) -> None:
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        norm = float(parameter.grad.norm())
        assert np.isfinite(norm), name
        assert norm > 0.0, name


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_slots_grown_in_any_order_stay_alive(topology: str, order: tuple[int, ...]) -> None:
    network, x = wrap(topology)
    names = itertools.cycle(fitting(topology))
    optimizer = torch.optim.SGD(network.host_parameters(), lr=1e-3)
    for count, slot in enumerate(order):
        plant(network, slot, next(names), SeedStage.BLENDING, 0.2 + 0.3 * count, blend=count % 3)
        optimizer.zero_grad()
        network.zero_grad()
        loss_of(network(x)).backward()
        assert_alive(network)
        optimizer.step()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_life_leaves_a_network_whose_culled_slots_are_gone(data: st.DataObject) -> None:
    """Grow and cull at random; what is left is alive, and without seeds it is the host again."""
    topology = data.draw(st.sampled_from(TOPOLOGIES))
    network, x = wrap(topology)
    expected = network(x)
    for _ in range(data.draw(st.integers(1, 8))):
        slot = data.draw(st.integers(0, 2))
        if network.slot(slot).seed is not None:
            network.remove(slot)
            continue
        stage = data.draw(st.sampled_from([SeedStage.TRAINING, *BLENDED]))
        blend = data.draw(st.integers(0, 2))
        blueprint = data.draw(st.sampled_from(fitting(topology)))
        plant(network, slot, blueprint, stage, BLENDED.get(stage, 0.0), blend, shake=0.1)
    network.zero_grad()
    loss_of(network(x)).backward()
    isolated = [
        slot.valve
        for _, slot in network.each_slot()
        if slot.stage == SeedStage.TRAINING and slot.valve is not None
    ]
    resting = {id(p) for gate in isolated for p in gate.parameters()}
    for name, parameter in network.named_parameters():
        if id(parameter) not in resting:
            assert parameter.grad is not None, name
            assert 0.0 < float(parameter.grad.norm()) < float("inf"), name
    host = network.release()
    assert torch.equal(host(x), expected)
    assert not any(module._forward_hooks for module in host.modules())


def test_blend_is_residual_with_the_gradient_of_a_layer() -> None:
    class Double(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gain * x

    catalogue = default_catalogue().with_blueprint(everywhere("double", Double))
    network, x = wrap("mlp", catalogue)
    features = []
    network.host.get_submodule("blocks.2").register_forward_hook(
        lambda module, args, output: features.append(output)
    )
    plant(network, 2, "double", SeedStage.BLENDING, 0.3)
    head = network.host.head
    output = network(x)
    (h,) = features
    assert torch.allclose(output, head(h * 1.3), atol=1e-6)  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(output.sum(), h)
    (direct,) = torch.autograd.grad(head(h).sum(), h)  # type: ignore[operator]
    assert torch.allclose(gradient, 1.3 * direct, atol=1e-6)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("blueprint", ["norm", "branch"])
def test_alpha_reported_is_alpha_applied(topology: str, blueprint: str) -> None:
    network, x = wrap(topology)
    gated = BLEND_NAMES.index("gated")
    plant(network, 0, blueprint, SeedStage.BLENDING, 0.4, gated, shake=0.8)
    slot = network.slot(0)
    assert slot.valve is not None
    applied: list[torch.Tensor] = []
    slot.valve.register_forward_hook(lambda module, args, output: applied.append(output))
    with network.coalition([True] * 3), torch.no_grad():
        network(x)
        network(x[:2])
    reported = slot.applied_alpha()
    values = torch.cat([alpha.flatten() for alpha in applied])
    assert reported == pytest.approx(float(values.mean()), abs=1e-6)
    assert values.std() > 0
    assert abs(reported - 0.4) > 1e-4
    assert 0.4**2 <= float(values.min()) <= float(values.max()) <= 0.4 * (2 - 0.4)


@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_a_gate_starts_and_ends_where_the_ramp_does(progress: float) -> None:
    network, _ = wrap("cnn")
    plant(network, 0, "conv_light", SeedStage.BLENDING, progress, BLEND_NAMES.index("gated"), 1.0)
    gate = network.slot(0).valve
    assert gate is not None
    assert torch.allclose(gate(torch.randn(5, 4, 3, 3)), torch.full((5, 1, 1, 1), progress))


def test_a_gate_leaves_with_the_ramp() -> None:
    network, _ = wrap("cnn")
    plant(network, 0, "conv_light", SeedStage.BLENDING, 0.5, BLEND_NAMES.index("gated"))
    with_gate = len(network.seed_parameters(0))
    network.set_blend(0, SeedStage.HOLDING, 1.0)
    assert network.slot(0).valve is None
    assert len(network.seed_parameters(0)) == with_gate - 4


def test_schedules_as_tabulated() -> None:
    linear, sigmoid, gated = (np.full(6, i) for i in range(3))
    steps = np.arange(6)
    assert scheduled_alpha(linear, steps, 5).tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert scheduled_alpha(sigmoid, steps, 5).round(4).tolist() == [
        *(0.0025, 0.0266, 0.2315, 0.7685, 0.9734, 0.9975)
    ]
    assert np.array_equal(scheduled_alpha(gated, steps, 5), scheduled_alpha(linear, steps, 5))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_coalition_without_a_seed_is_the_network_without_it(topology: str) -> None:
    network, x = wrap(topology)
    names = fitting(topology)
    plant(network, 0, names[0], SeedStage.HOLDING, 1.0, shake=0.3)
    plant(network, 2, "branch", SeedStage.BLENDING, 0.5, shake=0.3)
    whole = network(x)
    with network.coalition([False, True, True]):
        without_first = network(x)
    with network.coalition([True, True, False]):
        without_branch = network(x)
    assert torch.equal(network(x), whole)
    network.remove(0)
    assert torch.equal(network(x), without_first)
    assert not torch.equal(without_branch, whole)
    assert not torch.equal(without_first, whole)


def test_a_coalition_ends_also_after_an_error() -> None:
    network, x = wrap("cnn")
    plant(network, 0, "conv_light", SeedStage.HOLDING, 1.0, shake=0.3)
    whole = network(x)
    with pytest.raises(ZeroDivisionError), network.coalition([False] * 3):
        raise ZeroDivisionError
    assert torch.equal(network(x), whole)


def test_calling_the_host_or_the_network_is_the_same() -> None:
    network, x = wrap("cnn")
    plant(network, 0, "branch", SeedStage.HOLDING, 1.0, shake=0.3)
    assert torch.equal(network(x), network.host(x))


def test_a_deep_copy_grows_on_its_own() -> None:
    network, x = wrap("cnn")
    plant(network, 0, "branch", SeedStage.HOLDING, 1.0, shake=0.3)
    plant(network, 1, "conv_light", SeedStage.BLENDING, 0.5, shake=0.3)
    twin = copy.deepcopy(network)
    before = network(x)
    assert torch.equal(twin(x), before)
    twin.remove(0)
    twin.remove(1)
    assert torch.equal(network(x), before)
    assert not torch.equal(twin(x), before)


def test_the_host_may_change_its_features_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu_())

    from esper.growth.grown_module import GrownModule

    x = torch.randn(4, 6)
    network = GrownModule.wrap(InPlace(), ["first"], x)
    stages = ((SeedStage.TRAINING, 0.0), (SeedStage.BLENDING, 0.5))
    for blueprint, (stage, alpha) in itertools.product(("mlp_small", "branch"), stages):
        plant(network, 0, blueprint, stage, alpha)
        loss_of(network(x)).backward()
        network.remove(0)


def test_germination_is_a_function_of_its_key() -> None:
    def weights(key: int) -> torch.Tensor:
        network, _ = wrap("cnn")
        torch.manual_seed(torch.randint(0, 1000, ()).item())  # type: ignore[arg-type]
        network.germinate(0, network.catalogue.index("conv_heavy"), 0, key)
        return torch.cat([p.flatten() for p in network.seed_parameters(0)])

    assert torch.equal(weights(5), weights(5))
    assert not torch.equal(weights(5), weights(6))


def test_germination_leaves_the_global_generator_alone() -> None:
    network, _ = wrap("cnn")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    network.germinate(0, network.catalogue.index("conv_heavy"), 0, 3)
    assert torch.equal(torch.rand(3), expected)


def test_what_cannot_germinate_is_refused_and_leaves_no_trace() -> None:
    wrong = BlueprintSpec("wrong", "residual", {"cnn": lambda c: nn.Conv2d(c, c + 1, 1)}, "wrong")
    network, x = wrap("cnn", default_catalogue().with_blueprint(wrong))
    expected = network(x)
    with pytest.raises(ConfigError, match=r"'wrong' must return shape \(2, 4, 4, 4\) in slot r0c0"):
        network.germinate(0, network.catalogue.index("wrong"), 0, 0)
    assert network.slot(0).seed is None
    assert torch.equal(network(x), expected)
    plant(network, 0, "norm", SeedStage.TRAINING, 0.0)
    with pytest.raises(InvalidStateMachineError, match="already holds"):
        network.germinate(0, network.catalogue.index("norm"), 0, 0)


def test_keyed_draws_what_a_seeded_generator_does_and_leaves_no_trace() -> None:
    before = torch.get_rng_state()
    with keyed(7):
        drawn = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))


def test_branches_are_added_in_the_order_of_slots_whenever_they_germinated() -> None:
    outputs = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        network, x = wrap("mlp")
        for slot in order:
            plant(network, slot, "branch", SeedStage.BLENDING, 0.3, shake=1.0)
        outputs.append(network(x))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_seeds_train_and_evaluate_with_the_host() -> None:
    """Calling `eval()` on the host alone is what users do."""
    catalogue = default_catalogue().with_blueprint(
        everywhere("noisy", lambda channels: nn.Sequential(nn.Dropout(0.5)))
    )
    network, x = wrap("mlp", catalogue)
    plant(network, 0, "noisy", SeedStage.HOLDING, 1.0)
    network.host.eval()
    assert torch.equal(network.host(x), network.host(x))
    network.host.train()
    assert not torch.equal(network.host(x), network.host(x))
