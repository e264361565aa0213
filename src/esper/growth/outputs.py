"""Which tensor of a module's output a seed extends, and how the changed one is put back.

An output is a tensor, or a tuple, list, named tuple, dict or dataclass that holds it. The host's
own objects are never changed: what is put back is a copy.
"""

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with every tensor replaced; anything that holds none stays the same object."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [map_tensors(function, entry) for entry in value]
        # A named tuple takes its fields one by one.
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {name: map_tensors(function, entry) for name, entry in vars(value).items()}
        return dataclasses.replace(value, **own)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(vars(value))


# Of the largest value of a tensor, absolute if that is below 1.
TOLERANCE = 1e-5


def compare_tensors(some: list[Tensor], others: list[Tensor]) -> tuple[float, bool]:
    """The largest difference, and whether all are within TOLERANCE."""
    if [a.shape for a in some] != [b.shape for b in others]:
        return math.inf, False
    gaps = torch.stack([(a - b).abs().max() for a, b in zip(some, others, strict=True)])
    sizes = torch.stack([a.abs().max() for a in some]).clamp(min=1.0)
    return float(gaps.max()), bool((gaps <= TOLERANCE * sizes).all())


# What libraries call the main tensor of an output with several names.
MAIN_NAMES = ("logits", "last_hidden_state")

Form = Literal["tensor", "tuple", "list", "namedtuple", "dict", "mapping", "dataclass"]

# Functions that exported code cannot call by name (see `export.py`).
TOOLS = SimpleNamespace(
    get=getattr, copy=copy.copy, replace=dataclasses.replace, setitem=operator.setitem
)


@dataclass(frozen=True)
class TensorLocation:
    """The form of an output, and the index or name of the tensor in it.

    `export` traces both methods with torch.fx: they must not branch on `output`.
    """

    form: Form
    key: Any = None

    def get(self, output: Any, tools: Any = None) -> Any:
        tools = TOOLS if tools is None else tools
        match self.form:
            case "tensor":
                return output
            case "dataclass":
                return tools.get(output, self.key)
            case "namedtuple":
                return getattr(output, self.key)
        return output[self.key]

    def replace(self, output: Any, tensor: Any, tools: Any = None) -> Any:
        """A copy of `output` with another tensor at this location."""
        tools = TOOLS if tools is None else tools
        match self.form:
            case "tensor":
                return tensor
            case "namedtuple":
                return output._replace(**{self.key: tensor})
            case "dataclass":
                return tools.replace(output, **{self.key: tensor})
            case "dict":
                return output | {self.key: tensor}
            case "mapping":
                changed = tools.copy(output)
                tools.setitem(changed, self.key, tensor)
                return changed
        middle = (tensor,) if self.form == "tuple" else [tensor]
        return output[: self.key] + middle + output[self.key + 1 :]


WHOLE = TensorLocation("tensor")


def locate_in_slot(output: Any) -> TensorLocation | None:
    """The tensor that a seed at a module extends; None where that is ambiguous.

    In a tuple or list it is the first entry, as recurrent and attention layers return it.
    """
    if isinstance(output, Tensor) and output.is_floating_point():
        return WHOLE  # by far the most frequent case
    form, entries = _float_tensors(output)
    if form in ("tuple", "list") and 0 in entries:
        return TensorLocation(form, 0)
    return _unique(form, entries)


def main_argument(given: Iterable[Any], result: Tensor) -> Tensor | None:
    """The tensor that a module changes: the first of its arguments that is like its result."""
    like = (result.shape, result.dtype)
    tensors = (each for each in given if isinstance(each, Tensor))
    return next((each for each in tensors if (each.shape, each.dtype) == like), None)


def locate_in_output(output: Any) -> TensorLocation | None:
    """The tensor of the network's output that a branch adds to; None where that is ambiguous."""
    return _unique(*_float_tensors(output))


def _unique(form: Form, entries: dict[Any, Tensor]) -> TensorLocation | None:
    named = [name for name in MAIN_NAMES if name in entries]
    keys = named or list(entries)
    return TensorLocation(form, keys[0]) if named or len(keys) == 1 else None


def _float_tensors(output: Any) -> tuple[Form, dict[Any, Tensor]]:
    """Form and top-level entries that a seed could extend: float tensors with a batch."""
    if isinstance(output, Tensor):
        return "tensor", {None: output} if output.is_floating_point() else {}
    form, entries = _entries(output)
    return form, {
        key: value
        for key, value in entries.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2
    }


def _entries(output: Any) -> tuple[Form, dict[Any, Any]]:
    own = dataclasses.is_dataclass(output) and not isinstance(output, type)
    if isinstance(output, Mapping):
        # Outputs of transformers are both; Dynamo can trace `replace`, but no copy of a mapping.
        form: Form = "dataclass" if own else "dict" if type(output) is dict else "mapping"
        return form, dict(output)
    if isinstance(output, (tuple, list)):
        # The data of a packed sequence has neither a batch dimension nor positions.
        if any(isinstance(each, PackedSequence) for each in (output, *output)):
            return "tuple", {}
        if hasattr(output, "_fields"):
            return "namedtuple", dict(zip(output._fields, output, strict=True))
        return "tuple" if isinstance(output, tuple) else "list", dict(enumerate(output))
    if own:
        return "dataclass", dict(vars(output))
    return "tensor", {}
