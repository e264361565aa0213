"""Which dimension is the batch and which the channels, from modules and what feeds them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import pack_padded_sequence

from esper.growth.export import export, largest_difference
from esper.growth.grown_module import GrownModule
from esper.growth.slot_choice import list_slots
from esper.leyline import ConfigError, InjectionSpec, SeedStage
from helpers import plant

B = 6


class Through(nn.Module):
    """A body between permutations, then a mean over everything but batch and channels."""

    def __init__(self, body: nn.Module, *order: int, mean: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.body, self.order, self.mean = body, order, mean
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(self.order) if self.order else x
        y = self.body(x)
        y = y[0] if isinstance(y, tuple) else y
        return self.head(y.mean(dim=self.mean) if self.mean else y)


class Norm(nn.Module):
    """A block of a user's own: nothing in it says more than what it calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x)) * 2.0 + x


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).transpose(1, 2)


class Grid(nn.Module):
    """Places of an image in a row, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).permute(0, 2, 3, 1).flatten(1, 2)


IMAGE, VOLUME = torch.randn(B, 3, 4, 4), torch.randn(B, 3, 4, 4, 4)
SQUARE = torch.randn(B, B, 8)  # as many positions as examples: sizes tell nothing
SERIES = torch.randn(B, 8, 5)
encoder = nn.TransformerEncoderLayer

# name -> (model, example, layout of its module "body")
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "conv1d": (lambda: Through(nn.Conv1d(8, 4, 3), mean=(2,)), SERIES, "BCL"),
    "conv2d": (lambda: Through(nn.Conv2d(3, 4, 3), mean=(2, 3)), IMAGE, "BCHW"),
    "conv3d": (lambda: Through(nn.Conv3d(3, 4, 3), mean=(2, 3, 4)), VOLUME, "BCDHW"),
    "deconvolution": (lambda: Through(nn.ConvTranspose1d(8, 4, 3), mean=(2,)), SERIES, "BCL"),
    "batch norm": (lambda: Through(nn.BatchNorm1d(8), mean=(2,)), SERIES, "BCL"),
    "group norm": (lambda: Through(nn.GroupNorm(2, 8), mean=(2,)), SERIES, "BCL"),
    "instance norm": (lambda: Through(nn.InstanceNorm3d(3), mean=(2, 3, 4)), VOLUME, "BCDHW"),
    "pooling": (lambda: Through(nn.MaxPool1d(2), mean=(2,)), SERIES, "BCL"),
    "adaptive pooling": (lambda: Through(nn.AdaptiveAvgPool3d(1), mean=(2, 3, 4)), VOLUME, "BCDHW"),
    "lstm": (lambda: Through(nn.LSTM(8, 4, batch_first=True)), SQUARE, "BTC"),
    "time-first lstm": (lambda: Through(nn.LSTM(8, 4), 1, 0, 2, mean=(0,)), SQUARE, "TBC"),
    "gru": (lambda: Through(nn.GRU(8, 4), 1, 0, 2, mean=(0,)), torch.randn(B, 5, 8), "TBC"),
    "encoder": (lambda: Through(encoder(8, 2, batch_first=True)), SQUARE, "BTC"),
    "time-first encoder": (lambda: Through(encoder(8, 2), 1, 0, 2, mean=(0,)), SQUARE, "TBC"),
    "layer norm": (lambda: Through(nn.LayerNorm(8)), SQUARE, "BTC"),
    "time-first linear": (lambda: Through(nn.Linear(8, 4), 1, 0, 2, mean=(0,)), SQUARE, "TBC"),
    "embedding": (lambda: Through(nn.Embedding(9, 4)), torch.randint(0, 9, (B, B)), "BTC"),
    "time-first embedding": (
        lambda: Through(nn.Embedding(9, 4), 1, 0, mean=(0,)),
        torch.randint(0, 9, (B, B)),
        "TBC",
    ),
    "linear over images": (
        lambda: Through(nn.Linear(3, 4), 0, 2, 3, 1, mean=(1, 2)),
        IMAGE,
        "BHWC",
    ),
    "permuted images": (
        lambda: Through(Norm(nn.LayerNorm(3)), 0, 2, 3, 1, mean=(1, 2)),
        IMAGE,
        "BHWC",
    ),
    "container": (
        lambda: Through(nn.Sequential(nn.Conv1d(8, 8, 1), nn.ReLU(), nn.Dropout()), mean=(2,)),
        SERIES,
        "BCL",
    ),
    "own block": (lambda: Through(Norm(nn.Conv1d(8, 8, 3, padding=1)), mean=(2,)), SERIES, "BCL"),
    "patches": (lambda: Through(Patches()), IMAGE, "BTC"),
    "grid": (lambda: Through(Grid()), IMAGE, "BTC"),
    "vectors": (lambda: Through(nn.Linear(8, 4), mean=()), torch.randn(B, 8), "BC"),
    "own vectors": (lambda: Through(nn.Sigmoid(), mean=()), torch.randn(B, 8), "BC"),
}


def made(make: Callable[[], nn.Module], x: Any) -> nn.Module:
    """The model with its lazy layers made."""
    model = make()
    model(x)
    return model


@pytest.mark.parametrize("case", CASES)
def test_layouts_are_found(case: str) -> None:
    make, x, layout = CASES[case]
    (slot,) = (s for s in list_slots(made(make, x), x) if s.name == "body")
    assert slot.layout == layout


@pytest.mark.parametrize("case", CASES)
def test_seeds_keep_examples_apart_and_read_channels(case: str) -> None:
    make, x, layout = CASES[case]
    network = GrownModule.wrap(made(make, x).eval(), ["body"], x)
    (site,) = network.sites
    seen: list[Tensor] = []
    network.host.get_submodule("body").register_forward_hook(
        lambda module, args, output: seen.append(output[0] if type(output) is tuple else output)
    )
    alone = network(x)
    assert site.channels == seen[0].shape[layout.index("C")]
    blueprint = "conv_light" if site.topology.startswith("cnn") else "mlp_small"
    plant(network, 0, blueprint, SeedStage.BLENDING, 0.5, blend=2, shake=0.5)
    whole = network(x)
    assert not torch.allclose(whole, alone)
    for part in (x[:2], x[2:3]):
        start = 0 if len(part) == 2 else 2
        assert torch.allclose(network(part), whole[start : start + len(part)], atol=1e-5)
    assert largest_difference(export(network, x), network, x) <= 1e-5


def test_the_permutations_lead_there_and_back() -> None:
    for layout, topology in (("BHWC", "cnn"), ("TBC", "transformer"), ("BCL", "transformer")):
        site = InjectionSpec("r0c0", 2, 1.0, "", topology, (2, 2, 2), layout=layout)
        x = torch.randn(*range(2, 2 + len(layout)))
        read = x.permute(site.reading)
        assert torch.equal(read.permute(site.writing), x)
        assert read.shape[0] == x.shape[layout.index("B")]
        channels = {"cnn": 1, "transformer": 2}[topology]
        assert read.shape[channels] == x.shape[layout.index("C")]


class Own(nn.Module):
    """A product with a matrix: nothing says what its dimensions are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_what_is_not_clear_is_refused_until_it_is_said() -> None:
    x = torch.randn(B, 5, 8)
    model = made(lambda: Through(Own()), x)
    (slot,) = (s for s in list_slots(model, x) if s.name == "body")
    assert (slot.layout, slot.topology) == ("?", "?")
    with pytest.raises(ConfigError, match=r"'body' \(Own\) cannot be a slot yet.*layout=\{'body'"):
        GrownModule.wrap(model, ["body"], x)
    for layout, topology, channels in (("BTC", "transformer", 8), ("BCL", "cnn1d", 5)):
        (slot,) = (s for s in list_slots(model, x, {"body": layout}) if s.name == "body")
        assert (slot.layout, slot.topology) == (layout, topology)
        network = GrownModule.wrap(model, ["body"], x, layout={"body": layout})
        assert network.sites[0].channels == channels


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"body": "BXC"}, "'BXC' of 'body' must be one of BCHW, BTC"),
        ({"nobody": "BTC"}, "layout names 'nobody'"),
        ({"body": "BCHW"}, "has 4 dimensions, its output has 3"),
        ({"body": "TBC"}, "has a batch of 5"),
    ],
)
def test_layouts_that_cannot_be_are_refused(layout: dict[str, str], message: str) -> None:
    x = torch.randn(B, 5, 8)
    with pytest.raises(ConfigError, match=message):
        GrownModule.wrap(made(lambda: Through(Own()), x), ["body"], x, layout=layout)


def test_a_time_first_layer_that_is_fed_batch_first_is_refused_whatever_the_sizes() -> None:
    for x in (SQUARE, torch.randn(B, 5, 8)):
        for body in (nn.LSTM(8, 4), nn.GRU(8, 4), encoder(8, 2)):
            model = made(lambda body=body: Through(body), x)  # type: ignore[misc]
            with pytest.raises(ConfigError, match=r"'body' .* cannot be a slot yet"):
                GrownModule.wrap(model, ["body"], x)


def test_packed_sequences_and_graph_modules_cannot_be_slots() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(8, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((len(x),), x.shape[1])
            return self.rnn(pack_padded_sequence(x, lengths, batch_first=True))[1][0]

    inner = nn.Sequential(fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8))), nn.Linear(8, 3))
    for model, name, x in (
        (Packed(), "rnn", torch.randn(B, 5, 8)),
        (inner, "0", torch.randn(B, 8)),
    ):
        with pytest.raises(ConfigError, match=f"module '{name}' cannot be a slot.*packed.*Graph"):
            GrownModule.wrap(model, [name], x)


class OwnAttention(nn.Module):
    """Attention without a layer of torch."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=mask is not None)


class Tokens(nn.Module):
    """An encoder that may be causal: by a mask of torch's layers, or in its own attention."""

    def __init__(self, *, causal: bool, own: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        layer = encoder(8, 2, 16, batch_first=True)
        self.encoder = (
            OwnAttention() if own else nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        )
        self.head = nn.Linear(8, 9)
        self.mask = nn.Transformer.generate_square_subsequent_mask(5) if causal else None

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens), self.mask))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("told", "causal"), [(None, True), (None, False), (True, False)])
def test_seeds_do_not_look_ahead_where_the_host_does_not(
    told: bool | None, causal: bool, own: bool
) -> None:
    tokens = torch.randint(0, 9, (B, 5), generator=torch.Generator().manual_seed(0))
    model = Tokens(causal=causal, own=own)
    network = GrownModule.wrap(model, ["embed"], tokens, causal=told)
    assert network.sites[0].causal == (causal or told is True)
    plant(network, 0, "attention", SeedStage.HOLDING, 1.0, shake=0.5)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 9
    seen: list[Tensor] = []
    model.encoder.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    network(tokens)
    network(changed)
    early = [features[:, :-1] for features in seen]
    assert torch.equal(*early) == network.sites[0].causal


def test_a_causal_series_gets_seeds_for_sequences() -> None:
    network = GrownModule.wrap(
        made(lambda: Through(nn.Conv1d(8, 4, 1), mean=(2,)), SERIES), ["body"], SERIES, causal=True
    )
    (site,) = network.sites
    assert (site.topology, site.layout, site.shape) == ("transformer", "BCL", (5, 4))
    plant(network, 0, "attention", SeedStage.HOLDING, 1.0, shake=0.5)
    assert largest_difference(export(network, SERIES), network, SERIES) <= 1e-6
