"""Which population trains the hosts of a run, and why some hosts cannot be fused."""

import logging
from collections.abc import Callable

import pytest
import torch
from fused_support import recipe
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.grown_module import GrownModule
from esper.growth.hosts import CNNHost, MLPHost
from esper.leyline import ConfigError
from esper.tolaria.engine.batches import LoaderSource, TensorSource
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.fused.choice import choose_population, why_not_fused
from esper.tolaria.fused.population import FusedPopulation
from helpers import everywhere


def reason(made: HostRecipe) -> str | None:
    template = GrownModule.wrap(made.build(), made.slots, made.data.example(), made.catalogue)
    return why_not_fused(made, template)


def images(side: int) -> TensorSource:
    data = torch.randn(8, 1, side, side), torch.zeros(8, dtype=torch.long)
    return TensorSource(data, data, batch=4)


def planted(make: Callable[[int], nn.Module]) -> HostRecipe:
    return recipe(catalogue=default_catalogue().with_blueprint(everywhere("odd", make)))


class Branching(nn.Module):
    """Does something else for other values: vmap cannot run it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x.sum() > 0 else -x * self.weight


class Noisy(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.randn_like(x)


class Counting(Branching):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("seen", torch.zeros(()))


class Frozen(Branching):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.weight.requires_grad_(False)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def test_built_in_hosts_can_be_fused() -> None:
    assert reason(recipe("cnn")) is None
    assert reason(recipe("mlp")) is None


def test_images_of_any_size_can_have_1x1_kernels() -> None:
    host = {"num_classes": 10, "n_blocks": 2, "base_channels": 2, "in_channels": 1}
    made = recipe(
        build=lambda: CNNHost(kernel_size=1, **host), data=images(16), slots=("blocks.0",)
    )
    assert reason(made) is None


def loaders() -> LoaderSource:
    batches = [(torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.long))]
    return LoaderSource(batches, batches)


def augmented() -> TensorSource:
    source = images(8)
    return TensorSource(source.train, source.val, 4, augment=lambda x, generator: x)


REASONS: dict[str, tuple[Callable[[], HostRecipe], str]] = {
    "host": (lambda: recipe(build=sequential, slots=("1",)), "no fused form of Sequential"),
    "slot": (lambda: recipe(slots=("blocks.0.0",)), "slot blocks.0.0 inside a block"),
    "precision": (lambda: recipe(precision="bf16"), "precision bf16"),
    "sgd": (lambda: recipe(optimizer=lambda p: SGD(p, lr=0.1)), "optimizer SGD"),
    "amsgrad": (lambda: recipe(optimizer=lambda p: AdamW(p, amsgrad=True)), "amsgrad"),
    "loaders": (lambda: recipe(data=loaders()), "LoaderSource"),
    "augment": (lambda: recipe(data=augmented()), "augmented"),
    "large": (lambda: recipe(data=images(16)), "images of 16x16 pixels"),
    "odd": (
        lambda: recipe(
            data=images(6), build=lambda: CNNHost(10, 2, 2, in_channels=1), slots=("blocks.0",)
        ),
        "pooling of 3x3 pixels",
    ),
    "even kernel": (
        lambda: recipe(
            build=lambda: CNNHost(10, 2, 2, kernel_size=2, in_channels=1), slots=("blocks.0",)
        ),
        "even size",
    ),
    "dropout": (lambda: planted(lambda c: nn.Sequential(nn.LayerNorm(c), nn.Dropout())), "Dropout"),
    "batch norm": (lambda: planted(nn.BatchNorm2d), "'odd' has BatchNorm2d"),
    "values": (lambda: planted(Branching), "vmap"),
    "noise": (lambda: planted(Noisy), "vmap"),
    "buffers": (lambda: planted(Counting), "buffers"),
    "frozen": (lambda: planted(Frozen), "frozen"),
}


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_is_given(case: str) -> None:
    make, words = REASONS[case]
    found = reason(make())
    assert found is not None
    assert words in found
    assert "\n" not in found


def test_a_host_of_double_precision_cannot_be_fused() -> None:
    made = recipe("mlp")
    template = GrownModule.wrap(made.build(), made.slots, made.data.example())
    template.host.double()
    assert "float32" in str(why_not_fused(made, template))


def test_the_population_itself_refuses() -> None:
    with pytest.raises(ConfigError, match="cannot be fused: optimizer SGD"):
        FusedPopulation(recipe(optimizer=lambda p: SGD(p, lr=0.1)), [1])


# The choice of a run.


def wide(width: int) -> HostRecipe:
    return recipe(build=lambda: CNNHost(10, 3, width, in_channels=1))


@pytest.mark.parametrize(
    ("made", "n_envs", "kind"),
    [
        (recipe(), 3, "looped"),
        (recipe(), 4, "fused"),
        (wide(16), 64, "fused"),
        (wide(32), 64, "looped"),
        (
            recipe(build=lambda: MLPHost(64, hidden=256), slots=("blocks.0", "blocks.1")),
            64,
            "looped",
        ),
        (recipe(precision="bf16"), 64, "looped"),
    ],
)
def test_auto_goes_by_shape_and_number_only(
    made: HostRecipe, n_envs: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "esper"):
        assert choose_population(made, n_envs) == kind
    (message,) = caplog.messages
    assert message.startswith(f"hosts are {kind}: ")


def test_auto_logs_why_hosts_cannot_be_fused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = recipe(slots=("blocks.0.0",))
    with caplog.at_level(logging.INFO, "esper"):
        assert choose_population(made, 64) == "looped"
    assert caplog.messages == ["hosts are looped: slot blocks.0.0 inside a block"]
    assert choose_population(made, 64, "looped") == "looped"
    with pytest.raises(
        ConfigError, match=r"cannot be fused: slot blocks\.0\.0 inside a block; use"
    ):
        choose_population(made, 64, "fused")


def test_fused_is_possible_for_a_single_host() -> None:
    assert choose_population(recipe(), 1, "fused") == "fused"
