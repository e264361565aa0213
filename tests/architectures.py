"""Six public architectures, as a user would bring them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(20, 16)
        self.layer2 = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.relu(self.layer1(x)))
        return self.head(torch.relu(self.layer2(x)))


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 4, 32)
        self.fc2 = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.relu(self.conv2(x))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class ResidualBlock(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.skip = (
            nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride > 1 or width != out
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.skip(x))


class ResNet20(nn.Module):
    """Three stages of three blocks, as for small images; narrow, to be quick."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.layer1 = self._stage(width, width, 1)
        self.layer2 = self._stage(width, 2 * width, 2)
        self.layer3 = self._stage(2 * width, 4 * width, 2)
        self.fc = nn.Linear(4 * width, 5)

    @staticmethod
    def _stage(width: int, out: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            ResidualBlock(width, out, stride), *(ResidualBlock(out, out, 1) for _ in range(2))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.fc(x.mean(dim=(2, 3)))


class InvertedResidual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        inner = 4 * width
        self.add = stride == 1 and width == out
        self.layers = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(inplace=True),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.add else self.layers(x)


def mobilenet() -> nn.Sequential:
    """A Sequential at the top, as many public models are."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 1, 1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU6(inplace=True),
        InvertedResidual(6, 6, 1),
        InvertedResidual(6, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


class GRUClassifier(nn.Module):
    """Its slot returns a tuple (outputs, last hidden state)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.gru(self.embed(tokens))
        return self.head(outputs.mean(dim=1))


class TinyTransformer(nn.Module):
    """An encoder that is called with a keyword: a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embed(tokens), mask=mask, is_causal=True).mean(dim=1))


# name -> (model, slots, blueprints to grow there, example)
ARCHITECTURES = {
    "mlp": (MLP, ["layer1", "layer2"], ["mlp_small", "branch"], lambda: torch.randn(6, 20)),
    "lenet": (
        LeNet,
        ["conv1", "conv2", "fc1"],
        ["conv_light", "branch", "lora"],
        lambda: torch.randn(6, 1, 12, 12),
    ),
    "resnet20": (
        ResNet20,
        ["layer1", "layer2", "layer3.1.bn1"],
        ["conv_heavy", "branch", "attention"],
        lambda: torch.randn(6, 3, 8, 8),
    ),
    "mobilenet": (
        mobilenet,
        ["2", "3", "4"],
        ["depthwise", "branch", "bottleneck"],
        lambda: torch.randn(6, 3, 8, 8),
    ),
    "gru": (
        GRUClassifier,
        ["embed", "gru"],
        ["attention", "mlp"],
        lambda: torch.randint(0, 12, (6, 7)),
    ),
    "transformer": (
        TinyTransformer,
        ["encoder.layers.0", "encoder"],
        ["flex_attention", "branch"],
        lambda: torch.randint(0, 12, (6, 7)),
    ),
}
