"""Growth in depth: what silences a block, where blocks come, and what stays as it was."""

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import esper
from esper.growth.depth import silent_parameters
from esper.growth.export import export
from esper.growth.grown_module import GrownModule
from esper.growth.hosts import TransformerHost
from esper.growth.optimizer import sync_slot_group
from esper.growth.snapshot import restore_snapshot, take_snapshot
from esper.growth.stack_search import find_stacks
from esper.leyline import ConfigError, SeedStage
from esper.leyline.depth import Depth, DepthPlan, depths, doubled, doublings, next_places
from esper.tolaria.engine.population import add_seed_groups

TOKENS = torch.arange(16).reshape(2, 8)


def transformer(blocks: int = 4) -> TransformerHost:
    torch.manual_seed(1)
    return TransformerHost(vocab=16, n_embd=8, n_head=2, n_layer=blocks, block_size=8, dropout=0.0)


class PreNorm(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 12)
        self.proj = nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(self.inner(self.norm(x)).relu())


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.proj(self.inner(x).relu()))


class Change(PreNorm):
    """The model adds what this returns."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.proj(self.inner(self.norm(x)).relu()), None


class Scaled(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.proj(self.inner(self.norm(x)).relu())


class Residual(nn.Module):
    """As in a ResNet: the first block of a stage may change the shape."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out)
        self.short = nn.Identity() if width == out else nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.short(x) + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


class Net(nn.Module):
    def __init__(self, kind: Any, blocks: int = 4, *, adding: bool = False) -> None:
        super().__init__()
        self.adding = adding
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)[0] if self.adding else block(x)
        return self.head(x)


class ResNet(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(*(Residual(4, 4) for _ in range(blocks)))
        self.layer2 = nn.Sequential(Residual(4, 6), *(Residual(6, 6) for _ in range(blocks - 1)))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x).relu())).mean(dim=(2, 3)))


VECTORS, IMAGES = (
    torch.linspace(-1, 1, 40).reshape(5, 8),
    torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8),
)


def kept(network: GrownModule, *slots: int) -> GrownModule:
    for slot in slots:
        network.germinate(slot, 0, 0, key=slot)
        network.set_blend(slot, SeedStage.FOSSILIZED, 1.0)
    return network


@pytest.mark.parametrize(
    ("kind", "last", "adding"),
    [
        (PreNorm, {"proj.weight", "proj.bias"}, False),
        (Change, {"proj.weight", "proj.bias"}, True),
        (Scaled, {"proj.weight", "proj.bias"}, False),
        (PostNorm, None, False),
        (
            lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=True),
            {
                "self_attn.out_proj.weight",
                "self_attn.out_proj.bias",
                "linear2.weight",
                "linear2.bias",
            },
            False,
        ),
    ],
)
def test_the_parameters_that_silence_a_block(kind: Any, last: Any, adding: bool) -> None:
    torch.manual_seed(0)
    example = VECTORS[None] if kind is not PreNorm else VECTORS
    model = Net(kind, adding=adding)
    (stack,) = find_stacks(model, example)
    found = silent_parameters(stack.blocks[1], stack.calls[1], stack.adding)
    assert (None if found is None else set(found)) == last
    assert stack.adding == adding


def test_a_residual_block_of_a_resnet_is_silenced_by_its_last_norm() -> None:
    stages = find_stacks(ResNet(), IMAGES)
    assert [stage.path for stage in stages] == ["layer1", "layer2"]
    for stage in stages:
        names = silent_parameters(stage.blocks[1], stage.calls[1], stage.adding)
        assert names == ("bn2.weight", "bn2.bias")


@pytest.mark.parametrize("places", ["spread", "end"])
@pytest.mark.parametrize("birth", ["copy", "fresh"])
@pytest.mark.parametrize("asked", [{"start": 1}, {"start": 3}, {"add": 3}])
def test_the_output_does_not_change_at_birth(birth: Any, places: Any, asked: Any) -> None:
    for model, path, example in (
        (transformer(), "auto", TOKENS),
        (Net(PreNorm), "auto", VECTORS),
        (Net(Change, adding=True), "blocks", VECTORS),
        (ResNet(4), ("layer1", "layer2"), IMAGES),
    ):
        model.eval()
        size = sum(1 for name, _ in model.named_modules() if name.endswith("blocks.0"))
        network = GrownModule.wrap(model, Depth(path, birth=birth, places=places, **asked), example)
        with torch.no_grad():
            before = model(example)
            for slot in range(len(network.sites)):
                kept(network, slot)
                assert torch.equal(model(example), before), (type(model).__name__, slot, size)


def test_a_block_that_nothing_silences_is_blended_in() -> None:
    torch.manual_seed(0)
    model = Net(PostNorm).eval()
    network = GrownModule.wrap(model, Depth("auto", start=1), VECTORS)
    assert not network.sites[0].blocks.silent  # type: ignore[union-attr]
    with torch.no_grad():
        before = model(VECTORS)
        network.germinate(0, 0, 0, key=0)
        for alpha in (0.0, 0.25, 1.0):
            network.set_blend(0, SeedStage.BLENDING, alpha)
            x = model.blocks[0](model.stem(VECTORS))
            y = type(model.blocks[1]).forward(model.blocks[1], x)  # without hooks
            expected = model.head(x + alpha * (y - x))
            assert torch.allclose(model(VECTORS), expected, atol=1e-6)
            if alpha == 0.0:
                assert torch.allclose(model(VECTORS), before, atol=1e-6)
            elif alpha < 1.0:
                with pytest.raises(esper.EsperError, match="still being blended in"):
                    export(network, VECTORS)
    assert not model.blocks[1]._forward_hooks
    assert torch.allclose(export(network, VECTORS)(VECTORS), model(VECTORS))


def test_every_parameter_of_new_blocks_learns() -> None:
    for model, example in ((transformer(), TOKENS), (Net(Change, adding=True), VECTORS)):
        network = kept(GrownModule.wrap(model, Depth("blocks", start=1), example), 0, 1)
        optimizer = SGD(model.parameters(), 0.1)
        for _ in range(2):  # a silenced block has gradients in its last maps first
            optimizer.zero_grad()
            (model(example) ** 2).sum().backward()
            optimizer.step()
        for slot in range(2):
            for param in network.seed_parameters(slot):
                assert param.grad is not None
                assert torch.isfinite(param.grad).all()
                assert param.grad.any()


def test_a_grown_model_is_one_of_the_users_class() -> None:
    network = GrownModule.wrap(transformer(8), Depth("blocks", start=2), TOKENS)
    assert [site.name for site in network.sites] == ["blocks:2-4", "blocks:4-8"]
    kept(network, 0, 1)
    plain = export(network, TOKENS)
    assert type(plain) is TransformerHost
    transformer(8).load_state_dict(plain.state_dict(), strict=True)
    fewer = export(
        kept(GrownModule.wrap(transformer(8), Depth("blocks", start=2), TOKENS), 0), TOKENS
    )
    transformer(4).load_state_dict(fewer.state_dict(), strict=True)


def test_copies_come_after_the_block_that_they_copy() -> None:
    model = transformer(8)
    for number, block in enumerate(model.blocks):
        nn.init.constant_(block.get_submodule("proj").weight, number)  # silenced in copies
        nn.init.constant_(next(block.parameters()), number)
    network = GrownModule.wrap(model, Depth("blocks", start=2), TOKENS)
    kept(network, 0, 1)
    marks = [float(next(block.parameters()).flatten()[0].detach()) for block in model.blocks]
    assert marks == [0, 0, 0, 0, 4, 4, 4, 4]


def test_places_follow_each_other_without_moving_earlier_ones() -> None:
    for size in range(2, 14):
        taken: tuple[int, ...] = (0,)
        for _ in range(size - 1):
            taken = (*taken, *next_places(taken, size, 1, "spread"))
        assert sorted(taken) == list(range(size))
        half = sorted(next_places((0,), size, size // 2 - 1, "spread")) if size > 3 else []
        gaps = [b - a for a, b in pairwise([0, *half, size])]
        assert not half or max(gaps) <= 2 * min(gaps) + 1
    assert next_places((0, 1), 5, 2, "end") == (2, 3)


@pytest.mark.parametrize(("first", "last"), [(1, 8), (2, 12), (3, 20), (5, 6), (4, 4)])
def test_depths_rise_to_the_last_one(first: int, last: int) -> None:
    events = doublings(first, last)
    found = doubled(first, last, events)
    assert (found[0], found[-1]) == (first, last)
    assert all(a < b <= 2 * a for a, b in pairwise(found))
    for number in (1, 2, 3):
        steps = depths(first, last, number)
        assert (steps[0], steps[-1], len(steps)) == (first, last, number + 1)


def test_removal_and_snapshots_restore_the_model_bit_for_bit() -> None:
    network = GrownModule.wrap(transformer(), Depth("blocks", start=1), TOKENS)
    before = {name: value.clone() for name, value in network.host.state_dict().items()}
    kept(network, 0, 1)
    snapshot = take_snapshot(network, None)
    grown = {name: value.clone() for name, value in network.host.state_dict().items()}
    for slot in (0, 1):
        network.remove(slot)
    now = network.host.state_dict()
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], before[name]) for name in before)
    restore_snapshot(network, None, snapshot)
    now = network.host.state_dict()
    assert all(torch.equal(now[name], grown[name]) for name in grown)
    again = GrownModule.wrap(transformer(), Depth("blocks", start=1), TOKENS)
    restore_snapshot(again, None, snapshot)
    assert again.host.state_dict().keys() == grown.keys()


def test_a_frozen_host_does_not_change() -> None:
    model = ResNet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = Depth(("layer1", "layer2"), add=1, freeze_host=True)
    network = kept(GrownModule.wrap(model, plan, IMAGES), 0)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model.train()
    (model(IMAGES) ** 2).sum().backward()
    optimizer.step()
    assert len(model.layer1) == len(model.layer2) == 4
    network.remove(0)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_without_a_group_of_blocks_the_model_is_as_deep_as_before_it() -> None:
    model = transformer(8)
    network = kept(GrownModule.wrap(model, Depth("blocks", start=1), TOKENS), 0, 1, 2)
    with network.coalition([True, False, True]):
        assert len(model.blocks) == 6
    with network.ungrown():
        assert len(model.blocks) == 1
    assert len(model.blocks) == 8


def test_new_blocks_join_the_parameter_groups_of_the_user() -> None:
    model = transformer()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = SGD([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.5}], 0.1)
    scheduler = LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.1**step])
    network = GrownModule.wrap(model, Depth("blocks", start=1), TOKENS)
    add_seed_groups(network, optimizer, [scheduler])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(
        list(model.parameters())
    )
    kept(network, 1)
    sync_slot_group(optimizer, "r0c1", network.seed_parameters(1), network.counterparts(1))
    settings = {
        id(p): (group["weight_decay"], group["initial_lr"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for param in network.seed_parameters(1):
        assert settings[id(param)] == ((0.1, 0.1) if param.dim() > 1 else (0, 0.5))
    optimizer.step()
    scheduler.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.05, 0.05] * 3)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"start": 2, "add": 1}, "either start or add"),
        ({"start": 0}, "start of Depth"),
        ({"birth": "split"}, "birth of Depth"),
        ({"places": "front"}, "places of Depth"),
        ({"when": "later"}, "when of Depth"),
        ({"when": [0.5, 0.2]}, "when of Depth"),
        ({"when": 1.5}, "when of Depth"),
        ({"path": []}, "path of Depth"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Depth(**wrong)


@pytest.mark.parametrize(
    ("depth", "says"),
    [
        (Depth("head"), "'head' is not a list of blocks .* it has blocks"),
        (Depth("blocks", start=4), "start must be from 1 to 3"),
        (Depth("layers"), "'layers' is not a list of blocks"),
    ],
)
def test_impossible_stacks_are_refused(depth: Depth, says: str) -> None:
    model = transformer()
    with pytest.raises(ConfigError, match=says):
        GrownModule.wrap(model, depth, TOKENS)
    assert len(model.blocks) == 4


def test_a_model_with_several_stacks_asks_which() -> None:
    with pytest.raises(ConfigError, match=r"has 2 \(layer1, layer2\)"):
        GrownModule.wrap(ResNet(), Depth("auto"), IMAGES)


def test_a_model_that_does_something_between_its_blocks_is_refused() -> None:
    class Between(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = 0.9 * block(x)
            return self.head(x)

    with pytest.raises(ConfigError, match="something of its own between its blocks"):
        GrownModule.wrap(Between(PreNorm), Depth("blocks"), VECTORS)


def test_plans_are_plain_data() -> None:
    network = GrownModule.wrap(ResNet(), Depth(("layer1", "layer2")), IMAGES)
    assert network.stacks is not None
    assert DepthPlan.from_tree(asdict(network.stacks.plan)) == network.stacks.plan
