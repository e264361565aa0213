"""Which recipes can be fused, and the reasons for those that cannot."""

from collections.abc import Callable

import pytest
import torch
from fused_support import recipe
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.grown_module import GrownModule
from esper.growth.hosts.cnn import CNNHost
from esper.leyline import ConfigError
from esper.tolaria.engine.batches import LoaderSource, TensorSource
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.fused.choice import why_not_fused
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


def test_the_hosts_of_tasks_fit() -> None:
    assert reason(recipe("cnn")) is None
    assert reason(recipe("mlp")) is None


def test_kernels_of_one_pixel_fit_images_of_any_size() -> None:
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
    "sgd": (lambda: recipe(optimizer=lambda p: SGD(p, lr=0.1)), "optimiser SGD"),
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


def test_a_host_of_double_precision_does_not_fit() -> None:
    made = recipe("mlp")
    template = GrownModule.wrap(made.build(), made.slots, made.data.example())
    template.host.double()
    assert "float32" in str(why_not_fused(made, template))


def test_the_population_itself_refuses() -> None:
    with pytest.raises(ConfigError, match="cannot be fused: optimiser SGD"):
        FusedPopulation(recipe(optimizer=lambda p: SGD(p, lr=0.1)), [1])
