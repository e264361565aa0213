"""Models as users bring them, each small. Nothing here knows Esper: exports of them are loaded in a
process that has only this file and torch."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

BATCH = 4


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.join, self.head = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.down1(x))
        second = torch.relu(self.down2(F.max_pool2d(first, 2)))
        return self.head(torch.relu(self.join(torch.cat([first, self.up(second)], dim=1))))


class TiedLM(nn.Module):
    """A causal language model that says so, with one weight for embedding and head."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.block(self.embed(tokens), src_mask=mask))


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encode(x)), self.encode.weight.t(), self.bias)


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A dictionary whose entries are attributes too, as a well-known library has it."""

    logits: Tensor
    hidden: Tensor

    def __post_init__(self) -> None:
        for name in ("logits", "hidden"):
            super().__setitem__(name, getattr(self, name))

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        return type(self), (self.logits, self.hidden)


@dataclass(frozen=True)
class Encoded:
    last_hidden_state: Tensor
    length: int


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Encoded:
        return Encoded(torch.tanh(self.layer(x)), x.shape[1])


class OutputModel(nn.Module):
    """A module that returns a dataclass, a network that returns a ModelOutput."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(8, 3)

    def forward(self, x: Tensor, flag: bool = True) -> ModelOutput:
        hidden = self.encoder(x).last_hidden_state
        return ModelOutput(self.head(hidden.mean(dim=1)), hidden)


class PackedRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        padded, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(padded.mean(dim=1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool, both_ways: bool = False):
        super().__init__()
        self.rnn = kind(5, 8, batch_first=batch_first, bidirectional=both_ways)
        self.batch_first, self.head = batch_first, nn.Linear(16 if both_ways else 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rnn(x if self.batch_first else x.transpose(0, 1))[0]
        return self.head(y.mean(dim=1 if self.batch_first else 0))


class CellLoop(nn.Module):
    """One cell, called at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 8)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 8, 3, padding=1)
        self.block = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.conv(x)).mean(dim=2))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True)
        self.pool, self.head = nn.AdaptiveAvgPool3d(2), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(torch.relu(self.norm(self.conv(x)))).flatten(1))


class ConvNeXtBlock(nn.Module):
    """Channels last inside, as that family has it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.LayerNorm(4)
        self.wide, self.narrow = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        return x + self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(1, 4, 2, 2), ConvNeXtBlock(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)).mean(dim=(2, 3)))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, 4)
        self.token, self.places = (nn.Parameter(torch.randn(1, n, 8) * 0.02) for n in (1, 5))
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.drop(torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.tokens, self.channels, self.head = nn.Linear(6, 6), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.channels(x)).mean(dim=1))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twin, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(self.twin(left) * self.twin(right))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.reentrant = nn.Linear(8, 8), reentrant
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        if self.training:
            h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        else:
            h = self.block(h)
        return self.head(h)


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        if h.abs().max() < 1e-6:
            return self.head(h)
        return self.head(torch.relu(self.second(h)))


class Normed(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = wrap(nn.Linear(8, 8)), wrap(nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))


class Keywords(nn.Module):
    """Takes a dict, gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.mix(self.embed(input_ids)) * attention_mask[..., None]
        return {"logits": self.head(x.mean(dim=1)), "hidden": x}


class TwoHeads(nn.Module):
    """Two answers of equal rank: where a branch should go is not clear."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.trunk(x))
        return self.one(h), self.two(h)


class Dense(nn.Module):
    """Every layer sees all before it; activations work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(4 * i, 4, 3, padding=1) for i in (1, 2))
        self.norm, self.relu, self.head = (
            nn.GroupNorm(2, 12),
            nn.ReLU(inplace=True),
            nn.Linear(12, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.stem(x)]
        for layer in self.layers:
            parts.append(self.relu(layer(torch.cat(parts, dim=1))))
        return self.head(self.relu(self.norm(torch.cat(parts, dim=1))).mean(dim=(2, 3)))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(1, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1)
        self.gate, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        h = h * torch.sigmoid(self.gate(self.pool(h)))
        return self.head(h.mean(dim=(2, 3)))


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 9)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.decoder(self.embed(target), self.encoder(self.embed(source))))


class Attention(nn.Module):
    """Time first throughout, as torch's layers are by default."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.head(self.attend(x, x, x)[0].mean(dim=0))


class OwnProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btc,cd->btd", x, self.weight)


class OwnLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.head = OwnProduct(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.own(x).mean(dim=1))


class Windows(nn.Module):
    """Its layer sees windows of several examples as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.reshape(-1, 3, 8))
        return self.head(y.reshape(len(x), -1, 8).mean(dim=1))


class ChildrenLoop(nn.Module):
    """Calls whatever children it has, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


class BagModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bag(tokens))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU())
        self.decode = nn.Sequential(nn.ConvTranspose2d(4, 4, 2, 2), nn.ReLU(), nn.Conv2d(4, 1, 1))

    def forward(self, x: Tensor) -> list[Tensor]:
        code = self.encode(x)
        return [self.decode(code)]


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def images(*, last: bool = False) -> Tensor:
    x = torch.randn(BATCH, 1, 8, 8)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def tokens(length: int = 6) -> Tensor:
    return torch.randint(0, 9, (BATCH, length))


def vectors(*shape: int) -> Tensor:
    return torch.randn(BATCH, *(shape or (8,)))


@dataclass(frozen=True)
class ModelCase:
    """`slots` gives the blueprint to grow at each; with `refused`, what the refusal says."""

    make: Callable[[], nn.Module]
    example: Callable[[], Any]
    slots: dict[str, str]
    refused: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


def case(
    make: Callable[[], nn.Module],
    example: Callable[[], Any],
    slots: dict[str, str],
    refused: str = "",
    **settings: Any,
) -> ModelCase:
    return ModelCase(make, example, slots, refused, settings)


MODELS: dict[str, ModelCase] = {
    "u-net": case(UNet, images, {"down1": "conv_light", "up": "depthwise", "join": "attention"}),
    "u-net, branch": case(UNet, images, {"down2": "branch"}, "needs a host whose output"),
    "tied language model": case(TiedLM, tokens, {"embed": "attention", "block": "branch"}),
    "tied autoencoder": case(TiedAutoencoder, vectors, {"encode": "branch"}),
    "model output": case(OutputModel, lambda: vectors(6, 8), {"encoder": "branch"}),
    "model output, residual": case(OutputModel, lambda: vectors(6, 8), {"encoder": "attention"}),
    "packed rnn": case(
        PackedRNN, lambda: (tokens(), torch.tensor([6, 4, 5, 2])), {"embed": "mlp_small"}
    ),
    "packed rnn, packed slot": case(
        PackedRNN,
        lambda: (tokens(), torch.tensor([6, 4, 5, 2])),
        {"rnn": "lora"},
        "'rnn' cannot be a slot.*packed",
    ),
    "time-first lstm": case(
        lambda: Recurrent(nn.LSTM, batch_first=False), lambda: vectors(BATCH, 5), {"rnn": "branch"}
    ),
    "bidirectional gru": case(
        lambda: Recurrent(nn.GRU, batch_first=True, both_ways=True),
        lambda: vectors(7, 5),
        {"rnn": "attention"},
    ),
    "time-first lstm fed wrongly": case(
        lambda: nn.Sequential(nn.LSTM(5, 8)),
        lambda: vectors(BATCH, 5),
        {"0": "lora"},
        "'0' .LSTM. cannot be a slot yet",
    ),
    "cell in a loop": case(CellLoop, lambda: vectors(6, 5), {"cell": "mlp_small"}),
    "1-d convolutions": case(
        Waves, lambda: vectors(2, 9), {"conv": "conv_light", "block": "branch"}
    ),
    "1-d convolutions, causal": case(
        Waves, lambda: vectors(2, 9), {"conv": "attention"}, causal=True
    ),
    "3-d convolutions": case(
        Volumes, lambda: vectors(1, 4, 4, 4), {"conv": "bottleneck", "norm": "branch"}
    ),
    "nhwc": case(ConvNeXt, images, {"block.norm": "conv_light", "block.narrow": "branch"}),
    "vit": case(ViT, images, {"drop": "flex_attention", "blocks.0": "mlp_small", "norm": "branch"}),
    "mixer": case(Mixer, lambda: vectors(6, 5), {"stem": "lora", "tokens": "lora", "norm": "norm"}),
    "siamese": case(Siamese, lambda: (vectors(), vectors()), {"twin": "mlp_small"}),
    "checkpointed": case(
        lambda: Checkpointed(reentrant=False), vectors, {"stem": "branch", "block": "branch"}
    ),
    "checkpointed, reentrant": case(
        lambda: Checkpointed(reentrant=True), vectors, {"stem": "branch", "block": "mlp_small"}
    ),
    "early exit": case(EarlyExit, vectors, {"second": "branch", "first": "mlp"}),
    "weight norm": case(
        lambda: Normed(parametrizations.weight_norm), vectors, {"first": "lora", "second": "branch"}
    ),
    "spectral norm": case(lambda: Normed(spectral_norm), vectors, {"first": "lora"}),
    "orthogonal": case(
        lambda: Normed(parametrizations.orthogonal), vectors, {"second": "lora_large"}
    ),
    "dict in, dict out": case(
        Keywords,
        lambda: {"input_ids": tokens(), "attention_mask": torch.ones(BATCH, 6)},
        {"embed": "attention", "mix": "branch"},
    ),
    "two heads": case(TwoHeads, vectors, {"trunk": "mlp_small"}),
    "two heads, branch": case(TwoHeads, vectors, {"trunk": "branch"}, "needs a host whose output"),
    "dense, in place": case(Dense, images, {"layers.0": "branch", "norm": "conv_small"}),
    "squeeze and excite": case(SqueezeExcite, images, {"conv": "conv_heavy", "gate": "attention"}),
    "sequence to sequence": case(
        Seq2Seq, lambda: (tokens(7), tokens(6)), {"encoder": "attention", "decoder": "branch"}
    ),
    "sequence to sequence, other length": case(
        Seq2Seq,
        lambda: (tokens(7), tokens(6)),
        {"encoder": "branch"},
        "has 7 positions and the host's output has 6",
    ),
    "time-first attention": case(Attention, lambda: vectors(BATCH, 8), {"attend": "attention"}),
    "own layer": case(
        OwnLayer, lambda: vectors(6, 8), {"own": "lora"}, r"layout=\{'own': \.\.\.\}"
    ),
    "own layer, told": case(
        OwnLayer, lambda: vectors(6, 8), {"own": "attention"}, layout={"own": "BTC"}
    ),
    "windows": case(Windows, lambda: vectors(6, 8), {"layer": "lora"}, "'layer' cannot be a slot"),
    "children in a loop": case(ChildrenLoop, vectors, {"a": "branch"}),
    "embedding bag": case(BagModel, tokens, {"bag": "mlp"}),
    "autoencoder": case(Autoencoder, images, {"encode": "conv_light", "decode.0": "norm"}),
    "channels last": case(
        lambda: Dense().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        lambda: images(last=True),
        {"stem": "conv_light", "layers.1": "branch"},
    ),
    "double precision": case(
        lambda: perceptron().double(), lambda: vectors().double(), {"0": "branch", "2": "mlp"}
    ),
    "bfloat16": case(
        lambda: perceptron().bfloat16(), lambda: vectors().bfloat16(), {"0": "branch", "2": "lora"}
    ),
    "traced": case(lambda: fx.symbolic_trace(perceptron()), vectors, {"0": "lora", "2": "mlp"}),
    "traced, branch": case(
        lambda: fx.symbolic_trace(perceptron()), vectors, {"0": "branch"}, "needs a host whose"
    ),
    "one channel": case(
        lambda: nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 3)), vectors, {"0": "mlp"}
    ),
}
