"""torch.compile of networks with seeds, and of what is exported from them."""

import copy
import io
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from architectures import ARCHITECTURES
from esper.growth.export import export
from esper.growth.grown_module import GrownModule
from esper.growth.hooks import mark, unmark, without_graphs
from esper.leyline import SeedStage


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def plant(network: GrownModule, index: int, blueprint: str) -> None:
    network.germinate(index, network.catalogue.names.index(blueprint), 2, key=index)
    network.set_blend(index, SeedStage.TRAINING, 0.0)


def grown(name: str) -> tuple[GrownModule, Any]:
    torch.manual_seed(0)
    make, slots, blueprints, example = ARCHITECTURES[name]
    x = example()
    network = GrownModule.wrap(make(), slots, x)
    for index, blueprint in enumerate(blueprints):
        plant(network, index, blueprint)
        network.set_blend(index, SeedStage.BLENDING, 0.5)
    return network, x


def gradients(network: GrownModule, model: Any, x: Any) -> list[Tensor]:
    """Output and gradients, in training mode but without dropout."""
    network.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


def assert_like_eager(network: GrownModule, model: Any, x: Any) -> None:
    found = gradients(network, model, x)
    with without_graphs():
        expected = gradients(network, network, x)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_graphs_notice_growth_and_only_growth(name: str) -> None:
    make, slots, blueprints, example = ARCHITECTURES[name]
    torch.manual_seed(0)
    x, counter = example(), CompileCounter()
    model = torch.compile(make(), backend=counter)
    network = GrownModule.wrap(model, slots, x)
    network.eval()
    assert_like_eager(network, model, x)
    without_seeds = counter.frame_count
    for index, blueprint in enumerate(blueprints):
        plant(network, index, blueprint)
        # The second pass has more graphs if the first one has left an nn.Sequential to Python.
        for _ in range(2):
            assert_like_eager(network, model, x)
    planted = counter.frame_count
    for index in range(len(blueprints)):
        for alpha in (0.1, 0.2, 0.7):
            network.set_blend(index, SeedStage.BLENDING, alpha)
            assert_like_eager(network, model, x)
        network.set_blend(index, SeedStage.HOLDING, 1.0)
    with network.coalition([False] * len(network.sites)):
        assert_like_eager(network, model, x)
    assert counter.frame_count == planted, "stages, alphas and coalitions need no new graphs"
    network.release()
    assert_like_eager(network, model, x)
    assert counter.frame_count == planted, "the graphs from before are used again"
    assert without_seeds <= planted


def test_a_mark_leaves_another_forward_as_it_is() -> None:
    module = nn.Linear(2, 2)
    mark(module)
    mark(module)
    unmark(module)
    assert "forward" not in vars(module)
    own = vars(module)["forward"] = lambda x: x + 1
    mark(module)
    assert torch.equal(module(torch.zeros(1)), torch.ones(1))
    unmark(module)
    assert module.forward is own
    mark(module)
    later = vars(module)["forward"] = lambda x: x + 2
    unmark(module)
    assert module.forward is later


def whole(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="eager", fullgraph=True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_export_compiles_without_breaks_where_the_original_does(name: str) -> None:
    if name == "gru":
        pytest.skip(
            "Dynamo does not trace recurrent layers, so neither model compiles as one graph"
        )
    network, x = grown(name)
    plain = export(network, x).eval()
    with torch.no_grad():
        assert torch.allclose(whole(plain)(x), plain(x), atol=1e-5)
    plain.train()
    whole(plain)(x).sum().backward()
    plain.eval()
    plain.compile(backend="eager", fullgraph=True)
    with torch.no_grad(), without_graphs():
        expected = plain(x)
    assert torch.allclose(plain(x), expected, atol=1e-5)


Named = namedtuple("Named", "logits other")


@dataclass
class Data:
    logits: Tensor
    other: int


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda y: (y, 1),
    "list": lambda y: [y, 1],
    "namedtuple": lambda y: Named(y, 1),
    "mapping": lambda y: {"logits": y, "other": 1},
    "dataclass": lambda y: Data(y, 1),
}


class Formed(nn.Module):
    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.head, self.form = nn.Linear(4, 8), nn.Linear(8, 5), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.head(torch.relu(self.layer(x))))


def formed(form: str) -> tuple[nn.Module, Tensor]:
    x = torch.randn(3, 4)
    network = GrownModule.wrap(Formed(FORMS[form]), ["layer"], x)
    plant(network, 0, "branch")
    network.set_blend(0, SeedStage.BLENDING, 0.5)
    return export(network, x).eval(), x


def logits(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["logits"]
    return output[0] if isinstance(output, (tuple, list)) else output.logits


@pytest.mark.parametrize("form", FORMS)
def test_an_exported_branch_compiles_for_outputs_of_any_form(form: str) -> None:
    plain, x = formed(form)
    assert torch.allclose(logits(whole(plain)(x)), logits(plain(x)), atol=1e-6)


def loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, loaded])
def test_copies_of_an_exported_branch_compile_and_run_in_threads(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    network, x = grown("mlp")
    plain = export(network, x).eval()
    other = copied(plain)
    parts = list(x.split(2))
    compiled = torch.compile(other, backend="eager")
    found: dict[tuple[int, int], Tensor] = {}

    def run(thread: int) -> None:
        for i, part in enumerate(parts):
            found[thread, i] = compiled(part)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (_, i), output in found.items():
        assert torch.allclose(output, plain(parts[i]), atol=1e-6)
    assert len(found) == 4 * len(parts)
    torch._dynamo.reset()
    assert torch.allclose(whole(other)(x), plain(x), atol=1e-6)
