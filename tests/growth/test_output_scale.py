"""The output of a network scaled in its parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.growth.export import export
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.output_scale import scale_output
from esper.leyline import SeedStage
from helpers import plant, transformer, wrap


def tensors(network: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in network.state_dict().items()}


def run(network: nn.Module, x: Any) -> Tensor:
    with torch.no_grad():
        return network(x)


@pytest.mark.parametrize("name", ["cnn", "mlp"])
@pytest.mark.parametrize("factor", [0.25, 0.1])
def test_outputs_are_scaled_and_nothing_else_changes(name: str, factor: float) -> None:
    network, x = wrap(name)
    network.eval()
    plant(network, 0, "branch", SeedStage.HOLDING, 1.0, shake=0.3)
    plant(network, 1, "branch", SeedStage.BLENDING, 0.4, shake=0.3)
    before, old = run(network, x), tensors(network)
    assert scale_output(network, x, factor) is None
    after, new = run(network, x), tensors(network)
    if factor == 0.25:
        assert torch.equal(after, factor * before)
    else:
        assert float((after - factor * before).abs().max() / before.abs().max()) < 1e-6
    changed = [key for key in old if not torch.equal(old[key], new[key])]
    assert all(torch.equal(new[key], factor * old[key]) for key in changed)
    assert 0 < len(changed) <= 6, "weight and bias of three layers at most"
    assert torch.equal(after.argmax(-1), before.argmax(-1))
    plain = export(network, x)
    assert float((run(plain, x) - after).abs().max()) < 1e-5 * float(after.abs().max())


def test_an_isolated_branch_is_scaled_with_what_it_will_add_to() -> None:
    network, x = wrap("cnn")
    plant(network, 0, "branch", SeedStage.TRAINING, 0.0, shake=0.3)
    network.eval()
    seed = network.slot(0).seed
    assert seed is not None
    features = torch.randn(2, *network.sites[0].shape)
    before = run(seed, features)
    assert scale_output(network, x, 0.5) is None
    assert torch.equal(run(seed, features), 0.5 * before)


def test_a_bypass_is_scaled_if_it_ends_at_the_output() -> None:
    with keyed(0):
        host, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)), torch.randn(4, 6)
    network = GrownModule.wrap(host, ["0"], x)
    network.eval()
    plant(network, 0, "widen_double", SeedStage.HOLDING, 1.0, shake=0.3)
    before = run(network, x)
    assert scale_output(network, x, 0.25) is None
    assert torch.equal(run(network, x), 0.25 * before)


def test_a_bypass_inside_is_left_alone() -> None:
    network, x = wrap("cnn")
    network.eval()
    plant(network, 0, "widen_half", SeedStage.HOLDING, 1.0, shake=0.3)
    before, old = run(network, x), tensors(network.slots)
    assert scale_output(network, x, 0.25) is None
    assert torch.equal(run(network, x), 0.25 * before)
    assert all(torch.equal(old[name], t) for name, t in network.slots.state_dict().items())


class Ending(nn.Module):
    """Something follows the last layer."""

    def __init__(self, end: nn.Module) -> None:
        super().__init__()
        self.body, self.head, self.end = nn.Linear(6, 8), nn.Linear(8, 5), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.head(self.body(x).relu()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)).relu())


class Twice(nn.Module):
    """The last layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.same = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.same(self.same(self.body(x)).relu())


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)))


REFUSED = {
    "transformer": (lambda: transformer()[0], "weights are tied"),
    "softmax": (lambda: Ending(nn.Softmax(-1)), "does not scale with the host's last layer head"),
    "norm": (lambda: Ending(nn.LayerNorm(5)), "does not scale"),
    "tied": (Tied, "weights are tied"),
    "twice": (Twice, "does not scale"),
    "parametrised": (normed, "no linear layer or convolution with a weight of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_scaled_is_left_alone_with_the_reason(case: str) -> None:
    make, reason = REFUSED[case]
    with keyed(0):
        host = make()  # type: ignore[operator]
        x = torch.randint(0, 12, (4, 3)) if case in ("tied", "transformer") else torch.randn(4, 6)
    slots = {"parametrised": ["0"], "transformer": ["blocks.0"]}.get(case, ["body"])
    network = GrownModule.wrap(host, slots, x)
    old = tensors(network)
    said = scale_output(network, x, 0.3)
    assert said is not None
    assert reason in said
    new = tensors(network)
    assert all(torch.equal(old[name], new[name]) for name in old)
