"""A hidden layer that a bypass can make wider, as a blueprint has to know it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Step = tuple[Any, ...]


@dataclass(frozen=True)
class LayerSpec:
    """A Linear or Conv1d, Conv2d or Conv3d of the host (`kind`), by its settings.

    module   its dotted name
    kernel, stride, padding, dilation   of a convolution; `padding` may be a word
    """

    module: str
    kind: str
    inputs: int
    outputs: int
    bias: bool
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    padding_mode: str = "zeros"


@dataclass(frozen=True)
class Widening:
    """Two layers of which the second reads what the first gives out.

    A bypass reads the first one's input and adds to the second one's output.

    steps   what the host does in between, each the name of a module and its settings
    reads, adds   shapes of that input and that output on an example of `batch`
    """

    first: LayerSpec
    second: LayerSpec
    steps: tuple[Step, ...]
    reads: tuple[int, ...]
    adds: tuple[int, ...]
    batch: int

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "Widening":
        """The inverse of `dataclasses.asdict`."""
        layers = {name: LayerSpec(**tree[name]) for name in ("first", "second")}
        return Widening(**{**tree, **layers})
