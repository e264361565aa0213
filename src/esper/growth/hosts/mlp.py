"""A small perceptron with a slot after every hidden layer."""

from torch import Tensor, nn


class MLPHost(nn.Module):
    """(B, ...) flattened to (B, in_features) -> (B, num_classes). One slot per hidden layer."""

    def __init__(
        self, in_features: int, num_classes: int = 10, hidden: int = 32, n_layers: int = 2
    ) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.blocks = nn.Sequential()
        width = in_features
        for _ in range(n_layers):
            self.blocks.append(
                nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU())
            )
            width = hidden
        self.head = nn.Linear(width, num_classes)
        self.slot_modules = tuple(f"blocks.{i}" for i in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.flatten(x)))
