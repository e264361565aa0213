"""Which tensor of a module's output a seed extends, and how the changed one is put back.

An output is a tensor, or a tuple, list, named tuple, dict or dataclass that holds it. Nothing that
the host made is changed: what is put back is a copy.
"""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

# What libraries call the tensor that counts, where an output has several names.
MAIN_NAMES = ("logits", "last_hidden_state")

Form = Literal["tensor", "tuple", "list", "namedtuple", "mapping", "dataclass"]


@dataclass(frozen=True)
class Place:
    """Where the tensor is: the form of the output, and the tensor's index or name in it."""

    form: Form
    key: Any = None


def slot_place(output: Any) -> Place | None:
    """The tensor that a seed at a module extends; None where that is not clear.

    Of a tuple or list it is the first entry, as recurrent and attention layers have it.
    """
    if isinstance(output, Tensor):
        return Place("tensor") if output.is_floating_point() else None
    form, entries = _entries(output)
    if form in ("tuple", "list") and 0 in entries:
        return Place(form, 0)
    return _only(form, entries)


def host_place(output: Any) -> Place | None:
    """The tensor that a branch adds to; None where that is not clear."""
    if isinstance(output, Tensor):
        return Place("tensor") if output.is_floating_point() else None
    return _only(*_entries(output))


def take(output: Any, place: Place) -> Tensor:
    if place.form == "tensor":
        return output
    if place.form in ("dataclass", "namedtuple"):
        return getattr(output, place.key)
    return output[place.key]


def put(output: Any, place: Place, tensor: Tensor) -> Any:
    """`output` with another tensor in that place."""
    match place.form:
        case "tensor":
            return tensor
        case "tuple":
            return (*output[: place.key], tensor, *output[place.key + 1 :])
        case "list":
            return [*output[: place.key], tensor, *output[place.key + 1 :]]
        case "namedtuple":
            return output._replace(**{place.key: tensor})
        case "mapping":
            changed = copy.copy(output)
            changed[place.key] = tensor
            return changed
        case "dataclass":
            return dataclasses.replace(output, **{place.key: tensor})


def _entries(output: Any) -> tuple[Form, dict[Any, Tensor]]:
    """Form and top-level entries that a seed could extend: float tensors with a batch."""
    form, entries = _named(output)
    return form, {
        key: value
        for key, value in entries.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2
    }


def _named(output: Any) -> tuple[Form, dict[Any, Any]]:
    if isinstance(output, Mapping):
        return "mapping", dict(output)
    if isinstance(output, PackedSequence):
        return "tuple", {}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return "namedtuple", dict(zip(output._fields, output, strict=True))
    if isinstance(output, (tuple, list)):
        # The data of a packed sequence have neither a batch nor positions.
        if any(isinstance(entry, PackedSequence) for entry in output):
            return "tuple", {}
        return "tuple" if isinstance(output, tuple) else "list", dict(enumerate(output))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return "dataclass", dict(vars(output))
    return "tensor", {}


def _only(form: Form, entries: dict[Any, Tensor]) -> Place | None:
    named = [name for name in MAIN_NAMES if name in entries]
    keys = named or list(entries)
    return Place(form, keys[0]) if named or len(keys) == 1 else None
