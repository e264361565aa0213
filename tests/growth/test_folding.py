"""Exports in which bypasses have become part of the layers that they widen."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from esper.growth.blueprints.catalogue import BlueprintSpec, default_catalogue
from esper.growth.export import export
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.hosts import MLPHost
from esper.growth.lifecycle import GATED
from esper.growth.slot_choice import list_slots
from esper.leyline import SeedStage
from helpers import loss_of, plant, transformer, wrap


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def no_hooks(model: nn.Module) -> bool:
    return not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Functions(nn.Module):
    """The steps between the layers are functions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, width, 3), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.silu(self.first(x)), 2)
        return self.last(x.mean(dim=(2, 3)))


class Patches(nn.Module):
    """Positions and channels change places, and are flattened together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, width, 4, 4), nn.Linear(4 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x).flatten(2).transpose(1, 2))
        return self.last(h.flatten(1))


def chain(*layers: nn.Module) -> nn.Module:
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.add_(0.3 * torch.rand_like(tensor))
    return model


IMAGES, VECTORS = (6, 2, 8, 8), (6, 7)
# Makes a model whose hidden layer has that width, which is 6 before it grows; shape of its input.
FOLDS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "nothing": (lambda w: chain(nn.Linear(7, w), nn.Linear(w, 4)), VECTORS),
    "ReLU, no bias": (
        lambda w: chain(nn.Linear(7, w, bias=False), nn.ReLU(), nn.Linear(w, 4)),
        (2, 3, 7),
    ),
    "dropout": (
        lambda w: chain(nn.Linear(7, w), nn.ELU(0.5), nn.Dropout(0.2), nn.Linear(w, 4)),
        VECTORS,
    ),
    "BatchNorm": (
        lambda w: chain(
            nn.Conv2d(2, w, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(w, momentum=0.3),
            nn.ReLU(inplace=True),
            nn.Conv2d(w, 4, 3, padding=2, dilation=2, padding_mode="reflect"),
        ),
        IMAGES,
    ),
    "BatchNorm of vectors": (
        lambda w: chain(nn.Linear(7, w), nn.BatchNorm1d(w), nn.Hardswish(), nn.Linear(w, 4)),
        VECTORS,
    ),
    "GroupNorm, pooling": (
        lambda w: chain(
            nn.Conv2d(2, w, 3), nn.GroupNorm(w // 3, w), nn.AvgPool2d(2), nn.Conv2d(w, 4, 2)
        ),
        IMAGES,
    ),
    "flattened": (
        lambda w: chain(
            nn.Conv2d(2, w, 3), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9 * w, 4)
        ),
        IMAGES,
    ),
    "flattened, then BatchNorm": (
        lambda w: chain(
            nn.Conv2d(2, w, 7), nn.Flatten(), nn.BatchNorm1d(4 * w), nn.Linear(4 * w, 4)
        ),
        IMAGES,
    ),
    "along a length": (
        lambda w: chain(
            nn.Conv1d(2, w, 3, padding="same"), nn.MaxPool1d(2), nn.Tanh(), nn.Conv1d(w, 4, 3)
        ),
        (3, 2, 9),
    ),
    "in space": (
        lambda w: chain(
            nn.Conv3d(2, w, 3), nn.BatchNorm3d(w), nn.AdaptiveAvgPool3d(2), nn.Conv3d(w, 4, 1)
        ),
        (3, 2, 4, 4, 4),
    ),
    "functions": (Functions, IMAGES),
    "flattened with positions": (Patches, IMAGES),
}


def grown(
    model: nn.Module, x: Tensor, blueprint: str = "widen_double", alpha: float = 1.0
) -> GrownModule:
    """With a bypass around the model's first layer."""
    network = GrownModule.wrap(model.eval(), [next(n for n, _ in model.named_children())], x)
    stage = SeedStage.FOSSILIZED if alpha == 1.0 else SeedStage.BLENDING
    plant(network, 0, blueprint, stage, alpha, shake=0.3)
    return network


@pytest.mark.parametrize("alpha", [1.0, 0.4])
@pytest.mark.parametrize("name", FOLDS)
def test_a_folded_export_is_the_same_model_with_a_wider_layer(name: str, alpha: float) -> None:
    make, shape = FOLDS[name]
    x = torch.randn(shape)
    network = grown(make(6), x, alpha=alpha)
    plain = export(network, x)
    assert no_hooks(plain)
    by_hand = make(12).eval()
    by_hand.load_state_dict(plain.state_dict())
    assert str(plain) == str(by_hand)
    other = torch.randn(shape)
    with torch.no_grad():
        assert_close(plain(other), network(other))
        assert_close(by_hand(other), network(other))
        assert not torch.allclose(network.release()(other), plain(other), atol=1e-3)


@pytest.mark.parametrize("name", [name for name in FOLDS if name != "dropout"])
def test_a_folded_export_learns_as_the_live_network(name: str) -> None:
    """In training mode: outputs, running statistics, gradients."""
    make, shape = FOLDS[name]
    x = torch.randn(shape)
    network = grown(make(6), x, blueprint="widen_double" if "Group" in name else "widen_half")
    plain = export(network, x).train()
    network.train()
    outputs = [model(x) for model in (plain, network)]
    assert_close(*outputs)
    for output in outputs:
        loss_of(output).backward()
    mine, live = (
        sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        for model in (plain, network)
    )
    assert mine == pytest.approx(live, rel=1e-4)
    for one, other in zip(plain.buffers(), network.host.buffers(), strict=True):
        assert torch.allclose(one[: len(other)] if one.dim() else one, other, atol=1e-6)
    plain.eval()
    network.eval()
    assert_close(plain(x), network(x))


def test_a_chain_of_layers_folds_with_what_their_other_seeds_add() -> None:
    with keyed(0):
        model = nn.Sequential(
            nn.Sequential(nn.Linear(5, 6), nn.ReLU()),
            *(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(2)),
            nn.Linear(6, 3),
        )
    x = torch.randn(4, 5)
    network = GrownModule.wrap(model, ["0.0", "0", "1", "2", "3"], x)
    for slot, blueprint in enumerate(["widen_half", "widen_double", "widen_double", "widen_half"]):
        plant(network, slot, blueprint, SeedStage.FOSSILIZED, 1.0, shake=0.4)
    plant(network, 4, "lora", SeedStage.FOSSILIZED, 1.0, shake=0.4)
    plain = export(network, x)
    sizes = [tuple(m.weight.shape) for m in plain.modules() if type(m) is nn.Linear]
    assert sizes[:4] == [(15, 5), (12, 15), (9, 12), (3, 9)]
    assert_close(plain(x), network(x))


def test_a_layer_norm_of_vectors_becomes_a_group_norm() -> None:
    network, x = wrap("mlp")
    for slot in range(3):
        plant(network, slot, "widen_double", SeedStage.FOSSILIZED, 1.0, shake=0.3)
    plain = export(network, x)
    assert no_hooks(plain)
    norms = [m for m in plain.modules() if type(m) is nn.GroupNorm]
    assert [(norm.num_groups, norm.num_channels) for norm in norms] == [(2, 24)] * 3
    assert_close(plain(x), network(x))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*blocks\.0\.1\.groups"):
        MLPHost(10, hidden=24, n_layers=3).load_state_dict(plain.state_dict())
    again = GrownModule.wrap(plain, ["blocks.1"], x)
    plant(again, 0, "widen_half", SeedStage.FOSSILIZED, 1.0, shake=0.3)
    widest = export(again, x)
    assert widest.get_submodule("blocks.1.1").num_groups == 3
    assert_close(widest(x), again(x))


@pytest.mark.parametrize("settings", [{"bias": False}, {"elementwise_affine": False}])
def test_layer_norms_with_fewer_parameters_fold(settings: dict[str, bool]) -> None:
    x = torch.randn(VECTORS)
    norm = nn.LayerNorm(6, **settings)
    network = grown(nn.Sequential(nn.Linear(7, 6), norm, nn.ReLU(), nn.Linear(6, 4)), x)
    plain = export(network, x)
    assert no_hooks(plain)
    assert_close(plain(x), network(x))
    assert {*plain.state_dict()} == {*network.release().state_dict(), "1.groups"}


def test_transformer_layers_fold() -> None:
    model, tokens = transformer()
    network = GrownModule.wrap(model, ["blocks.0", "blocks.1"], tokens)
    plant(network, 0, "widen_half", SeedStage.FOSSILIZED, 1.0, shake=0.2)
    plant(network, 1, "mlp", SeedStage.FOSSILIZED, 1.0, shake=0.2)
    plain = export(network, tokens)
    assert plain.get_submodule("blocks.0.fc").out_features == 96
    assert_close(plain(tokens), network(tokens))
    assert sum(p.numel() for p in plain.parameters()) == sum(
        p.numel() for p in network.parameters()
    )


def test_a_folded_export_is_one_graph_and_loads_from_a_file(tmp_path: Path) -> None:
    x = torch.randn(VECTORS)
    model = nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 4))
    plain = export(grown(model, x), x)
    assert not any(type(m).__module__.startswith("esper") for m in plain.modules())
    torch.save(plain, tmp_path / "plain.pt")
    loaded = torch.load(tmp_path / "plain.pt", weights_only=False)
    program = torch.export.export(plain, (x,)).module()
    compiled = torch.compile(plain, backend="eager", fullgraph=True)
    for other in (loaded, program, compiled):
        assert_close(other(x), plain(x))


# --- what stays a second path ----------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.then = nn.Linear(7, 6), nn.Linear(6, 4), then

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.then(self.first(x)))


class ReadTwice(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(torch.relu(h)) + h.mean()


class Returned(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.first(x))
        return self.last(h), h


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__(torch.relu)
        self.other = nn.Linear(7, 6)
        self.other.weight = self.first.weight


class Stored(Layers):
    """It reads the width elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)).reshape(-1, 6))


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(2, 6, 3), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).mean(1))


class Own(nn.Linear):
    pass


def two(first: nn.Module, *others: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(first, *others)


def watched() -> nn.Module:
    model = Layers(torch.relu)
    model.first.register_forward_hook(lambda *args: None)
    return model


def same_norm() -> nn.Module:
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(7, 6), norm, nn.Linear(6, 6), norm, nn.Linear(6, 4))


ROWS = (3, 5, 7)
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "layer norm": (two(nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 4)), ROWS, "LayerNorm"),
    "group norm without bias": (
        two(nn.Conv1d(2, 6, 3), nn.GroupNorm(2, 6, bias=False), nn.Conv1d(6, 4, 3)),
        (3, 2, 9),
        "GroupNorm without bias",
    ),
    "rms norm": (two(nn.Linear(7, 6), nn.RMSNorm(6), nn.Linear(6, 4)), VECTORS, "RMSNorm"),
    "prelu": (two(nn.Linear(7, 6), nn.PReLU(), nn.Linear(6, 4)), VECTORS, "PReLU"),
    "norm of the user": (
        lambda: Layers(lambda h: F.layer_norm(h, (6,))),
        VECTORS,
        "LayerNorm that is not a module of torch",
    ),
    "own function": (lambda: Layers(lambda h: h * torch.sigmoid(1.7 * h)), VECTORS, "operation "),
    "scaled": (lambda: Layers(lambda h: torch.relu(2.0 * h)), VECTORS, "operation mul"),
    "read twice": (lambda: ReadTwice(torch.relu), VECTORS, "read elsewhere, too"),
    "returned": (lambda: Returned(torch.relu), VECTORS, "read elsewhere, too"),
    "groups": (two(nn.Conv1d(2, 6, 3, groups=2), nn.Conv1d(6, 4, 3)), (3, 2, 9), "in groups"),
    "mean over channels": (Averaged, (3, 2, 9), "mean over channels"),
    "shared weight": (Tied, VECTORS, "shared parameters"),
    "shared norm": (same_norm, VECTORS, "BatchNorm1d used several times"),
    "a hook": (watched, VECTORS, "hooks on Linear"),
    "own class": (two(Own(7, 6), nn.ReLU(), nn.Linear(6, 4)), VECTORS, "Own"),
    "weight norm": (
        two(nn.Linear(7, 6), nn.ReLU(), weight_norm(nn.Linear(6, 4))),
        VECTORS,
        "ParametrizedLinear",
    ),
    "norm over all batches": (
        two(nn.Linear(7, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 4)),
        VECTORS,
        "BatchNorm over all batches",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_folded_stays_a_second_path(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, shape, reason = REFUSED[name]
    model, x = make(), torch.randn(shape)
    (found, *_) = list_slots(model, x)
    assert reason in found.second_path
    assert f"second path: {found.second_path}" in str(list_slots(model, x))
    network = grown(model, x)
    with caplog.at_level(logging.INFO, "esper"):
        plain = export(network, x)
    assert f"stays a second path: {found.second_path}" in caplog.text
    assert not no_hooks(plain)
    expected, output = network(x), plain(x)
    if isinstance(expected, tuple):
        expected, output = expected[0], output[0]
    assert_close(output, expected)


def test_the_listing_says_where_a_bypass_folds() -> None:
    model = nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 4))
    (layer, relu, _) = list_slots(model, torch.randn(VECTORS))
    assert (layer.widens, relu.widens) == ("folds", "")


def another(widening: object) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 3), nn.Softsign(), nn.Linear(3, 4, bias=False))


OWN = BlueprintSpec("own", "bypass", {"mlp": another}, "another activation")
HALF, GATE = ("widen_half", 1.0, 0), ("widen_half", 0.4, GATED)


def deep(norm: nn.Module) -> nn.Module:
    first = nn.Sequential(nn.Linear(7, 6), norm)
    return nn.Sequential(first, nn.Linear(6, 6), nn.Linear(6, 4))


# Slots, seeds, module after the first layer, is the host frozen, reason.
SEEDS: dict[str, tuple[list[str], list[tuple[str, float, int]], nn.Module, bool, str]] = {
    "gate": (["0.0"], [GATE], nn.ReLU(), False, "blended with a gate"),
    "seed in between": (["0.1", "0"], [("lora", 1.0, 0), HALF], nn.ReLU(), False, "seed at '0.1'"),
    "own blueprint": (["0.0"], [("own", 1.0, 0)], nn.Identity(), False, "not built in"),
    "frozen host": (["0.0"], [HALF], nn.ReLU(), True, "frozen"),
    "half a norm": (["0.0"], [HALF], nn.LayerNorm(6), False, "groups of another size"),
    "neighbour": (["0.0", "1"], [HALF, GATE], nn.ReLU(), False, "next to the second path of r0c1"),
}


def test_a_second_path_at_the_end_of_a_chain_keeps_the_whole_chain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = deep(nn.ReLU()), torch.randn(VECTORS)
    model.append(nn.Linear(4, 4))
    network = GrownModule.wrap(model, ["0", "1", "2"], x)
    for slot, (blueprint, alpha, blend) in enumerate([HALF, HALF, GATE]):
        stage = SeedStage.FOSSILIZED if alpha == 1.0 else SeedStage.BLENDING
        plant(network, slot, blueprint, stage, alpha, blend, shake=0.3)
    with caplog.at_level(logging.INFO, "esper"):
        plain = export(network, x)
    assert not any(record.levelno > logging.INFO for record in caplog.records)
    assert_close(plain(x), network(x))


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_that_stay_second_paths(name: str, caplog: pytest.LogCaptureFixture) -> None:
    slots, seeds, norm, frozen, reason = SEEDS[name]
    model, x = deep(norm).requires_grad_(requires_grad=not frozen), torch.randn(VECTORS)
    if name == "own blueprint":
        model[1] = nn.Linear(6, 4)
        del model[2]
    network = GrownModule.wrap(model, slots, x, default_catalogue().with_blueprint(OWN))
    for slot, (blueprint, alpha, blend) in enumerate(seeds):
        stage = SeedStage.FOSSILIZED if alpha == 1.0 else SeedStage.BLENDING
        plant(network, slot, blueprint, stage, alpha, blend, shake=0.3)
    with caplog.at_level(logging.INFO, "esper"):
        plain = export(network, x)
    assert reason in caplog.text
    assert not no_hooks(plain)
    assert_close(plain(x), network(x))


def test_a_model_that_reads_the_width_elsewhere_keeps_second_paths(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.randn(VECTORS)
    network = grown(Stored(torch.relu), x)
    plain = export(network, x)
    assert "all bypasses stay second paths; with wider layers" in caplog.text
    assert not no_hooks(plain)
    assert_close(plain(x), network(x))
