"""Bypasses: every hidden layer of every architecture can be made wider, nothing else changes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from architectures import ARCHITECTURES
from esper.growth.blueprints.catalogue import count_params, seed_costs
from esper.growth.export import export
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.lifecycle import GATED
from esper.growth.seed_slot import valve_params
from esper.growth.slot_choice import list_slots
from esper.growth.snapshot import restore_snapshot, take_snapshot
from esper.leyline import ConfigError, SeedStage
from helpers import HOSTS, grads, loss_of, plant

WIDEN = ("widen_half", "widen_double")


def models() -> dict[str, Callable[[], tuple[nn.Module, Tensor]]]:
    def made(name: str) -> tuple[nn.Module, Tensor]:
        make, _, _, example = ARCHITECTURES[name]
        with keyed(0):
            return make(), example()

    public = {name: lambda name=name: made(name) for name in ARCHITECTURES}  # type: ignore[misc]
    return {**public, **{f"host {name}": make for name, make in HOSTS.items()}}


MODELS = models()


def pairs(name: str) -> list[str]:
    """The layers of a model that another one follows."""
    model, x = MODELS[name]()
    return [
        slot.name
        for slot in list_slots(model, x)
        if slot.widening is not None and slot.widening.first.module == slot.name
    ]


CASES = [(name, layer) for name in MODELS for layer in pairs(name)]


def wrapped(name: str, layer: str) -> tuple[GrownModule, Tensor]:
    model, x = MODELS[name]()
    model.eval()
    return GrownModule.wrap(model, [layer], x), x


def second(network: GrownModule, slot: int = 0) -> nn.Module:
    widening = network.sites[slot].widening
    assert widening is not None
    return network.host.get_submodule(widening.second.module)


def test_the_pairs_that_a_reader_of_the_code_would_name() -> None:
    found = {}
    for name in MODELS:
        model, x = MODELS[name]()
        widenings = {slot.name: slot.widening for slot in list_slots(model, x)}
        found[name] = {n: w and (w.first.module, w.second.module) for n, w in widenings.items()}
    assert [pairs(name) for name in ("mlp", "lenet", "gru")] == [
        ["layer1", "layer2"],
        ["conv1", "conv2", "fc1"],
        [],
    ]
    blocks = [f"layer{i}.{j}" for i in (1, 2, 3) for j in range(3)]
    assert pairs("resnet20") == ["stem.0", *(f"{block}.conv1" for block in blocks)]
    for block in blocks:
        assert found["resnet20"][block] == (f"{block}.conv1", f"{block}.conv2")
    assert found["resnet20"]["layer2"] == ("layer2.2.conv1", "layer2.2.conv2")
    assert found["mobilenet"]["4"] == ("4.layers.6", "7")
    assert pairs("transformer") == [f"encoder.layers.{i}.linear1" for i in range(2)]
    for i in range(3):
        following = "head" if i == 2 else f"blocks.{i + 1}.0"
        for host in ("host cnn", "host mlp"):
            assert found[host][f"blocks.{i}"] == (f"blocks.{i}.0", following)
        block = f"blocks.{i}"
        assert found["host transformer"][block] == (f"{block}.fc", f"{block}.out")


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_next_to_nothing_at_birth_alive_and_counted(name: str, layer: str) -> None:
    network, x = wrapped(name, layer)
    seen: list[Tensor] = []
    for blueprint in WIDEN:
        plant(network, 0, blueprint, SeedStage.HOLDING, 1.0)
        outputs: list[Tensor] = []

        def note(module: nn.Module, args: object, y: Tensor, kept: list[Tensor] = outputs) -> None:
            kept.append(y)

        handle = second(network).register_forward_hook(note)
        with torch.no_grad():
            network(x)
            network.set_blend(0, SeedStage.GERMINATED, 0.0)
            network(x)
        handle.remove()
        network.set_blend(0, SeedStage.HOLDING, 1.0)
        change = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
        assert 0.0 < change < 1e-3, "a hook of the user sees what the wider layer gives out"
        with keyed(0):
            loss_of(network.train()(x)).backward()
        for parameter in network.seed_parameters(0):
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
            assert parameter.grad.norm() > 0
        _, params, macs = seed_costs(network.catalogue, network.sites, network.output)
        index = network.catalogue.index(blueprint)
        assert params[0, index] == sum(p.numel() for p in network.seed_parameters(0))
        assert macs[0, index] > 0
        seen.append(params[0, index])
        network.eval().zero_grad()
        network.remove(0)
    assert seen[1] >= seen[0]


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_isolation_is_exact_and_what_is_removed_is_gone(name: str, layer: str) -> None:
    network, x = wrapped(name, layer)
    x = x.requires_grad_() if x.is_floating_point() else x
    loss_of(network(x)).backward()
    bare, gradients = network(x), grads(network.host)
    network.zero_grad()
    plant(network, 0, "widen_double", SeedStage.TRAINING, 0.0, shake=0.5)
    output = network(x)
    loss_of(output).backward()
    assert torch.equal(output, bare)
    own = grads(network.host)
    assert own.keys() == gradients.keys()
    assert all(torch.equal(own[key], value) for key, value in gradients.items())
    assert all(p.grad is not None and p.grad.norm() > 0 for p in network.seed_parameters(0))
    network.set_blend(0, SeedStage.HOLDING, 1.0)
    assert not torch.allclose(network(x), bare)
    with network.coalition([False]):
        assert torch.equal(network(x), bare)
    network.remove(0)
    assert torch.equal(network(x), bare)
    assert not any(
        hooks for m in network.host.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)
    )


@pytest.mark.parametrize("stage", [(SeedStage.BLENDING, 0.4, GATED), (SeedStage.HOLDING, 1.0, 0)])
@pytest.mark.parametrize(("name", "layer"), CASES)
def test_export_of_a_second_path(
    name: str, layer: str, stage: tuple[SeedStage, float, int]
) -> None:
    network, x = wrapped(name, layer)
    plant(network, 0, "widen_half", *stage, shake=0.5)
    plain = export(network, x, fold=False)
    other = x.flip(0)[:3]
    with torch.no_grad():
        assert torch.allclose(plain(other), network(other), atol=1e-5)
    # Trained on, it stays what the live network is: the same gradients for host and seed.
    for model in (plain, network):
        loss_of(model(x)).backward()
    mine = sorted(float(p.grad.norm()) for p in plain.parameters() if p.grad is not None)
    live = sorted(float(p.grad.norm()) for p in network.parameters() if p.grad is not None)
    assert mine == pytest.approx(live, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_a_snapshot_brings_everything_back(name: str, layer: str) -> None:
    network, x = wrapped(name, layer)
    plant(network, 0, "widen_half", SeedStage.BLENDING, 0.5, GATED, shake=0.3)
    optimizer = torch.optim.SGD([*network.parameters()], lr=0.1)
    before, saved = network(x), take_snapshot(network, None)
    network.train()
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(network(x)).backward()
        optimizer.step()
    network.eval()
    assert not torch.equal(network(x), before)
    network.remove(0)
    restore_snapshot(network, None, saved)
    assert torch.equal(network(x), before)


def test_a_valve_is_counted_as_it_is() -> None:
    for name, layer in CASES:
        network, _ = wrapped(name, layer)
        catalogue = network.catalogue
        for blueprint in (*WIDEN, "branch"):
            index = catalogue.index(blueprint)
            if not seed_costs(catalogue, network.sites, network.output)[0][0, index]:
                continue
            _, valve = network.new_seed(0, index, GATED, key=1)
            assert valve is not None
            assert valve_params(catalogue, network.sites)[0, index] == count_params(valve)


# --- the same as a wider layer ---------------------------------------------------------------


class Chain(nn.Module):
    """Two layers with something in between, as modules."""

    def __init__(self, first: nn.Module, between: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.last = first, nn.Sequential(*between), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


class Functional(Chain):
    """The same with functions: activation, pooling, global mean."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.silu(self.first(x)), 2)
        return self.last(x.mean(dim=(2, 3)))


def images() -> Tensor:
    return torch.randn(3, 2, 8, 8)


# A chain, and the modules that stand between its layers for the newcomers, at width w of 4.
CHAINS: dict[str, tuple[Callable[[], Chain], Callable[[int], list[nn.Module]], Tensor]] = {
    "batch norm": (
        lambda: Chain(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
            [nn.BatchNorm2d(4), nn.ReLU(inplace=True)],
            nn.Conv2d(4, 5, 3),
        ),
        lambda w: [nn.BatchNorm2d(w), nn.ReLU()],
        images(),
    ),
    "group norm, pooling, strides": (
        lambda: Chain(
            nn.Conv2d(2, 4, 5, padding=2, dilation=2),
            [nn.GroupNorm(2, 4), nn.AvgPool2d(2, padding=1), nn.GELU("tanh")],
            nn.Conv2d(4, 5, 2, stride=2),
        ),
        lambda w: [nn.GroupNorm(w // 2, w), nn.AvgPool2d(2, padding=1), nn.GELU("tanh")],
        images(),
    ),
    "layer norm": (
        lambda: Chain(nn.Linear(6, 8), [nn.LayerNorm(8), nn.ELU(0.5)], nn.Linear(8, 5)),
        lambda w: [nn.LayerNorm(w), nn.ELU(0.5)],
        torch.randn(3, 4, 6),
    ),
    "rms norm": (
        lambda: Chain(nn.Linear(6, 8), [nn.RMSNorm(8), nn.SiLU()], nn.Linear(8, 5)),
        lambda w: [nn.RMSNorm(w), nn.SiLU()],
        torch.randn(3, 6),
    ),
    "flattened": (
        lambda: Chain(
            nn.Conv2d(2, 4, 3), [nn.LeakyReLU(0.2), nn.MaxPool2d(2), nn.Flatten()], nn.Linear(36, 5)
        ),
        lambda w: [nn.LeakyReLU(0.2), nn.MaxPool2d(2), nn.Flatten()],
        images(),
    ),
    "adaptive pooling": (
        lambda: Chain(
            nn.Conv2d(2, 4, 3), [nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten()], nn.Linear(8, 5)
        ),
        lambda w: [nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten()],
        images(),
    ),
    "along a length": (
        lambda: Chain(
            nn.Conv1d(2, 4, 3, padding="same"), [nn.MaxPool1d(2), nn.Tanh()], nn.Conv1d(4, 5, 3)
        ),
        lambda w: [nn.MaxPool1d(2), nn.Tanh()],
        torch.randn(3, 2, 9),
    ),
    "in space": (
        lambda: Chain(
            nn.Conv3d(2, 4, 3, padding=1), [nn.BatchNorm3d(4), nn.MaxPool3d(2)], nn.Conv3d(4, 5, 1)
        ),
        lambda w: [nn.BatchNorm3d(w), nn.MaxPool3d(2)],
        torch.randn(3, 2, 4, 4, 4),
    ),
    "functions": (
        lambda: Functional(nn.Conv2d(2, 4, 3), [], nn.Linear(4, 5)),
        lambda w: [nn.SiLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
        images(),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_bypass_in_a_chain_is_a_wider_layer(name: str) -> None:
    """Against layers of which weights are joined, with old and new channels normed apart."""
    make, between, x = CHAINS[name]
    model = make().eval()
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d | nn.BatchNorm3d)):
            norm.running_mean.normal_()  # type: ignore[union-attr]
    network = GrownModule.wrap(model, ["first"], x)
    bare = [m for m in (model.between if type(model) is Chain else between(0)) if m is not None]
    plant(network, 0, "widen_double", SeedStage.FOSSILIZED, 1.0, shake=0.3)
    seed = network.slot(0).seed
    assert isinstance(seed, nn.Sequential)
    first, last = seed[0], seed[-1]
    width = first.weight.shape[0]  # type: ignore[union-attr,index]
    new = between(width)
    new_norms = [m for m in new if list(m.parameters())]
    old_norms = [m for m in seed[1:-1] if list(m.parameters())]
    for mine, theirs in zip(new_norms, old_norms, strict=True):
        mine.load_state_dict(theirs.state_dict())

    def joined(one: Tensor | None, two: Tensor | None, dim: int) -> Tensor:
        assert one is not None
        assert two is not None
        return torch.cat([one, two], dim)

    def layer(like: nn.Module, weight: Tensor, bias: Tensor | None, h: Tensor) -> Tensor:
        if isinstance(like, nn.Linear):
            return F.linear(h, weight, bias)
        apply = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.dim()]
        return apply(h, weight, bias, like.stride, like.padding, like.dilation)  # type: ignore

    weight = joined(model.first.weight, first.weight, 0)  # type: ignore[arg-type,union-attr]
    bias = None
    if model.first.bias is not None:
        bias = joined(model.first.bias, first.bias, 0)  # type: ignore[arg-type,union-attr]
    wide = layer(model.first, weight, bias, x)
    dim = -1 if isinstance(model.first, nn.Linear) else 1
    old, added = wide.split([wide.shape[dim] - width, width], dim)
    # Not in place: the two halves are views of one tensor.
    halves = ((bare, old), (new, added))
    old, added = (nn.Sequential(*parts).eval()(h.clone()) for parts, h in halves)
    h = torch.cat([old, added], -1 if isinstance(model.last, nn.Linear) else 1)
    weight = joined(model.last.weight, last.weight, 1)  # type: ignore[arg-type,union-attr]
    expected = layer(model.last, weight, model.last.bias, h)  # type: ignore[arg-type]
    assert torch.allclose(network(x), expected, atol=1e-5)


# --- what fits, and what does not ------------------------------------------------------------


class Plain(nn.Module):
    """Two layers; subclasses say how they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)


class TwiceFirst(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(torch.relu(self.first(x)))))


class TwiceLast(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.last(torch.relu(self.first(x)))))


class Residual(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + torch.relu(self.first(x)))


class Gated(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h * torch.sigmoid(1.7 * h))


class Summed(Plain):
    """Channels are gone before the second layer reads."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).softmax(-1))


class Checkpointed(Plain):
    """Both layers in one checkpoint, or one in each."""

    def __init__(self, *, apart: bool, reentrant: bool) -> None:
        super().__init__()
        self.apart, self.reentrant = apart, reentrant

    def forward(self, x: Tensor) -> Tensor:
        def both(h: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(h)))

        x = x.requires_grad_()
        if not self.apart:
            return checkpoint(both, x, use_reentrant=self.reentrant)
        h = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return checkpoint(self.last, torch.relu(h), use_reentrant=self.reentrant)


class Together(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


@pytest.mark.parametrize(
    ("make", "fits"),
    [(TwiceFirst, False), (TwiceLast, False), (Residual, False), (Summed, False), (Gated, True)],
)
def test_what_cannot_be_made_wider_is_masked(make: type[Plain], fits: bool) -> None:
    x = torch.randn(4, 6)
    network = GrownModule.wrap(make(), ["first"], x)
    for blueprint in WIDEN:
        index = network.catalogue.index(blueprint)
        assert seed_costs(network.catalogue, network.sites, network.output)[0][0, index] == fits
        if not fits:
            with pytest.raises(ConfigError, match=rf"{blueprint}.*no layer in 'first'"):
                network.germinate(0, index, 0, key=1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(reentrant: bool) -> None:
    """Both layers in one, or in two: it is as without."""
    x = torch.randn(4, 6)
    gradients = []
    weights = Together().state_dict()
    checkpoints = [Checkpointed(apart=apart, reentrant=reentrant) for apart in (False, True)]
    for model in (Together(), *checkpoints):
        model.load_state_dict(weights)
        network = GrownModule.wrap(model, ["first"], x)
        plant(network, 0, "widen_half", SeedStage.HOLDING, 1.0, shake=0.5)
        for _ in range(2):
            network.zero_grad()
            loss_of(network(x.clone())).backward()
        gradients.append(grads(network))
    assert len(gradients[0]) == len(list(network.parameters()))
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            assert torch.allclose(other[name], gradient, atol=1e-6), name


def test_sums_do_not_depend_on_who_germinated_first() -> None:
    """Bypasses of two slots that add to one layer, which has a seed of its own."""
    x = torch.randn(4, 2, 8, 8)
    outputs = []
    with keyed(5):
        model = nn.Sequential(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()), nn.Conv2d(3, 4, 3))
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        network = GrownModule.wrap(model, ["0.0", "0", "1"], x)
        for slot in order:
            name = "conv_light" if slot == 2 else WIDEN[slot]
            plant(network, slot, name, SeedStage.HOLDING, 1.0, shake=0.4)
        outputs.append(network(x))
        assert torch.allclose(export(network, x)(x), outputs[-1], atol=1e-6)
        network.release()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_a_pass_that_an_error_ended_leaves_nothing() -> None:
    class Choosy(Plain):
        def forward(self, x: Tensor, mode: str = "") -> Tensor:
            h = torch.relu(self.first(x)) if mode != "last" else x
            if mode == "fail":
                raise ValueError
            return self.last(h)

    x = torch.randn(4, 6)
    network = GrownModule.wrap(Choosy(), ["first"], x)
    bare = network(x, mode="last")
    plant(network, 0, "widen_half", SeedStage.HOLDING, 1.0, shake=0.5)
    for model in (network, export(network, x, fold=False)):
        for _ in range(2):
            with pytest.raises(ValueError):  # noqa: PT011
                model(x, mode="fail")
            assert torch.equal(model(x, mode="last"), bare)
