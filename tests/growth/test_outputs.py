"""Seeds and branches on modules and networks whose output is not one tensor."""

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from esper.growth.export import export, largest_difference
from esper.growth.grown_module import GrownModule
from esper.growth.outputs import TensorLocation, locate_in_output, locate_in_slot, tensors_in
from esper.leyline import ConfigError, SeedStage
from helpers import plant

Pair = namedtuple("Pair", ["loss", "logits"])


@dataclass(frozen=True)
class Answer:
    logits: Tensor
    note: str = "kept"


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A dictionary whose entries are attributes too, as a well-known library has it."""

    loss: Tensor
    logits: Tensor

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            super().__setitem__(name, getattr(self, name))

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        return type(self), (self.loss, self.logits)


def scalar(y: Tensor) -> Tensor:
    return y.square().mean()


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, "rest"),
    "second of a tuple": lambda y: (scalar(y), y),
    "list": lambda y: [y, None],
    "named tuple": lambda y: Pair(scalar(y), y),
    "dict": lambda y: {"loss": scalar(y), "answer": y},
    "dataclass": lambda y: Answer(y),
    "model output": lambda y: ModelOutput(scalar(y), y),
}


class Layer(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(4, 4), form

    def forward(self, x: Tensor) -> Any:
        return FORMS[self.form](self.linear(x))


class Net(nn.Module):
    """Its layer and the network itself answer in that form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer, self.head, self.form = Layer(form), nn.Linear(4, 3), form

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        location = locate_in_slot(y)
        assert location is not None
        return FORMS[self.form](self.head(torch.relu(location.get(y))))


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("blueprint", ["mlp_small", "branch"])
def test_a_seed_changes_the_tensor_and_nothing_else(form: str, blueprint: str) -> None:
    network = GrownModule.wrap(Net(form), ["layer"], X)
    alone = network(X)
    plant(network, 0, blueprint, SeedStage.HOLDING, 1.0, shake=0.5)
    grown = network(X)
    assert type(grown) is type(alone)
    location = locate_in_output(grown)
    assert location is not None
    assert not torch.allclose(location.get(grown), location.get(alone))
    # The same network with the plain tensor in location of the form.
    plain = Net("tensor")
    plain.load_state_dict(network.host.state_dict())
    reference = GrownModule.wrap(plain, ["layer"], X)
    plant(reference, 0, blueprint, SeedStage.HOLDING, 1.0)
    reference.slot(0).load_state_dict(network.slot(0).state_dict())
    assert torch.equal(location.get(grown), reference(X))
    exported = export(network, X)
    assert largest_difference(exported, network, X) <= 1e-6
    assert largest_difference(copy.deepcopy(exported), network, X) <= 1e-6
    if form == "model output":
        assert grown.logits is grown["logits"]
    if form == "dataclass":
        assert grown.note == "kept"


@pytest.mark.parametrize("form", FORMS)
def test_putting_back_leaves_the_host_s_own_output_alone(form: str) -> None:
    y = torch.ones(2, 3)
    output = FORMS[form](y)
    location = locate_in_slot(output)
    assert location is not None
    changed = location.replace(output, y + 1)
    assert torch.equal(location.get(changed), y + 1)
    assert torch.equal(location.get(output), y)
    assert len(list(tensors_in(changed))) == len(list(tensors_in(output)))


@pytest.mark.parametrize(
    ("output", "slot", "host"),
    [
        ((torch.ones(2, 3), torch.ones(2, 3)), TensorLocation("tuple", 0), None),
        ({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, None, None),
        (
            {"a": torch.ones(2, 3), "logits": torch.ones(2, 3)},
            *[TensorLocation("dict", "logits")] * 2,
        ),
        ({"loss": torch.ones(())}, None, None),
        (torch.ones(2, 3, dtype=torch.int64), None, None),
        ((pack_sequence([torch.ones(2, 3)]), torch.ones(1, 1, 3)), None, None),
        (pack_sequence([torch.ones(2, 3)]), None, None),
        ("text", None, None),
    ],
)
def test_where_it_is_clear(
    output: Any, slot: TensorLocation | None, host: TensorLocation | None
) -> None:
    assert locate_in_slot(output) == slot
    assert locate_in_output(output) == host


def test_an_output_that_is_no_longer_as_on_the_example_is_an_error() -> None:
    network = GrownModule.wrap(Net("tensor"), ["layer"], X)
    plant(network, 0, "branch", SeedStage.HOLDING, 1.0)
    network.host.form = "tuple"
    network.host.head.register_forward_hook(lambda module, args, output: output.long())
    with pytest.raises(ConfigError, match="branch from 'layer'"):
        network(X)
