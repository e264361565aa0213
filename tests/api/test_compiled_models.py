"""Models that the user compiles, before growth, during it or by `model.compile()`."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.optim import AdamW

import esper
from architectures import MLP
from depth_support import ADD, START, Net, net
from depth_support import Loop as DepthLoop
from depth_support import grow as grow_deep
from esper.growth.export import largest_difference
from esper.growth.grown_module import keyed
from esper.growth.hooks import without_graphs
from esper.leyline import ConfigError
from esper.tamiyo.controllers.scripted import ScriptedController
from helpers import grow_arguments


@dataclass
class Counter:
    """A backend that runs graphs as they are and counts the operations of each."""

    ops: list[int] = field(default_factory=list)

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.ops.append(sum("call" in node.op for node in graph.graph.nodes))
        return graph.forward

    @property
    def graphs(self) -> int:
        return len(self.ops)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


with keyed(0):
    Y = torch.arange(120) % 5
    X = torch.randn(120, 20) + Y[:, None]


def perceptron() -> MLP:
    with keyed(0):
        model = MLP()
    model.dropout.p = 0.0
    return model


# A seed is planted, removed and replaced; later a residual seed and a branch act together.
SCRIPT = """
    1 GERMINATE layer1 lora linear
    4 CULL layer1
    6 GERMINATE layer2 branch linear
    11 GERMINATE layer1 mlp_small gated
    auto FOSSILIZE
"""


def script() -> ScriptedController:
    return ScriptedController(SCRIPT, "own")


def grow(model: nn.Module, **settings: Any) -> esper.Grown:
    train = list(zip(X[:80].split(20), Y[:80].split(20), strict=True))
    arguments = {
        "slots": ["layer1", "layer2"],
        "optimizer": AdamW(model.parameters(), lr=3e-3),
        "controller": script(),
        "steps": 24,
    }
    arguments = grow_arguments(**{**arguments, **settings})
    return esper.grow(model, train, [(X[80:], Y[80:])], **arguments)


def compiled(counter: Any) -> Any:
    return torch.compile(perceptron(), backend=counter)


def compiled_in_place(counter: Any) -> nn.Module:
    model = perceptron()
    model.compile(backend=counter)
    return model


def assert_close(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            expected = pytest.approx(value, abs=1e-5) if isinstance(value, float) else value
            assert b[name] == expected, name


@cache
def eager_run() -> esper.Grown:
    return grow(perceptron())


# One graph without seeds, two around the first slot and three around both; trained and evaluated.
GRAPHS = 2 * (1 + 2 + 3)


@pytest.mark.parametrize("compile_", [compiled, compiled_in_place])
def test_growing_a_compiled_model_equals_eager(compile_: Callable[[Any], nn.Module]) -> None:
    counter = Counter()
    grown = grow(compile_(counter))
    assert_close(eager_run().history, grown.history)
    assert grown.topology == eager_run().topology
    assert (grown.outcome.germinated, len(grown.topology)) == (3, 2)
    assert grown.outcome.task == "MLP"
    assert counter.graphs == GRAPHS
    plain = grown.export()
    assert largest_difference(plain, grown.model, X) <= 1e-6
    assert not any("_orig_mod" in name for name in (*grown.model.state_dict(), *plain.state_dict()))
    assert counter.graphs == GRAPHS, "an export compiles nothing"


def test_growth_does_not_touch_other_compiled_models() -> None:
    counter = Counter()
    other = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), backend=counter)
    other(torch.ones(2, 3))
    grow(compiled(Counter()), steps=4)
    other(torch.ones(2, 3))
    assert counter.graphs == 1


@pytest.mark.soak
def test_a_model_compiled_by_inductor_equals_eager() -> None:
    assert_close(eager_run().history, grow(compiled("inductor")).history)


@pytest.mark.parametrize("whole", [False, True])
def test_modules_that_are_compiled_one_by_one(whole: bool) -> None:
    model = perceptron()
    model.layer1.compile(backend=Counter())
    model.layer2 = torch.compile(model.layer2, backend=Counter())  # type: ignore[assignment]
    if whole:
        model = torch.compile(model, backend=Counter())  # type: ignore[assignment]
    assert_close(eager_run().history, grow(model).history)


def test_a_compiled_model_lists_the_same_slots() -> None:
    assert esper.list_slots(compiled(Counter()), X[:2]) == esper.list_slots(perceptron(), X[:2])


@pytest.mark.parametrize("part", ["", "layer2"])
def test_a_model_compiled_without_breaks_is_refused(part: str) -> None:
    model = perceptron()
    model.get_submodule(part).compile(backend=Counter(), fullgraph=True)
    with pytest.raises(ConfigError, match="fullgraph=True"):
        grow(model)
    whole = torch.compile(perceptron(), backend=Counter(), fullgraph=True)
    with pytest.raises(ConfigError, match="fullgraph=True"):
        grow(whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("compile_", [compiled, compiled_in_place])
def test_copies_and_saved_networks(compile_: Callable[[Any], nn.Module], tmp_path: Path) -> None:
    grown = grow(compile_(Counter()))
    twin = copy.deepcopy(grown.model)
    loaded = esper.load(grown.save(tmp_path), compile_(Counter()))
    expected = grown.model.eval()(X)
    for other in (twin, loaded):
        assert torch.allclose(other.eval()(X), expected, atol=1e-6)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(grown.model(X), expected), "a copy is apart"
    assert not twin(X).any()


def test_an_insured_run_with_a_compiled_model() -> None:
    runs = [grow(model, insured=True) for model in (perceptron(), compiled(Counter()))]
    assert_close([vars(runs[0].outcome.twin)], [vars(runs[1].outcome.twin)])


class Loop:
    """A user's loop. It calls `called`, and `attached` is grown."""

    def __init__(self, order: str, counter: Any) -> None:
        self.host = self.attached = self.called = perceptron()
        self.order, self.counter = order, counter
        self.compile_("before")
        if order.endswith("has run"):
            self.accuracy()
        if order.startswith("attach to what"):
            self.attached = self.called
        self.optimizer = AdamW(self.host.parameters(), lr=3e-3)
        self.body = esper.attach(
            self.attached,
            slots=["layer1", "layer2"],
            example=X[:2],
            evaluate=self.accuracy,
            steps=24,
            controller=script(),
        )
        self.compile_("after")
        self.body.manage(self.optimizer)

    def compile_(self, when: str) -> None:
        match self.order, when:
            case ("before" | "before, has run" | "attach to what compile returned", "before") | (
                "after",
                "after",
            ):
                self.called = torch.compile(self.host, backend=self.counter)
            case ("in place before", "before") | ("in place after", "after"):
                self.host.compile(backend=self.counter)
            case ("a step of the loop", "before"):
                self.called = torch.compile(lambda x: self.host(x), backend=self.counter)
            case ("body.model", "after"):
                self.called = torch.compile(self.body.model, backend=self.counter)

    def accuracy(self) -> float:
        self.host.eval()
        with torch.no_grad():
            right = self.called(X[80:]).argmax(1) == Y[80:]
        self.host.train()
        return 100.0 * float(right.float().mean())

    def epoch(self) -> float:
        total = 0.0
        for rows in torch.arange(80).split(20):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.called(X[rows]), Y[rows])
            loss.backward()
            self.optimizer.step()
            total += float(loss)
        return total

    def run(self, epochs: int = 24) -> list[dict[str, Any]]:
        for _ in range(epochs):
            self.body.step(self.accuracy(), self.epoch())
        return self.body.history


ORDERS = (
    "before",
    "before, has run",
    "after",
    "in place before",
    "in place after",
    "attach to what compile returned",
    "a step of the loop",
    "body.model",
)


@cache
def eager_loop() -> list[dict[str, Any]]:
    return Loop("eager", None).run()


@pytest.mark.parametrize("order", ORDERS)
def test_a_loop_with_a_compiled_model_equals_eager(order: str) -> None:
    loop = Loop(order, Counter())
    assert_close(eager_loop(), loop.run())
    assert len(loop.body.finish().seeds) == 2
    assert loop.counter.graphs == GRAPHS
    with without_graphs():
        assert largest_difference(loop.body.export(), loop.host, X) <= 1e-6


@pytest.mark.parametrize("orders", [("before", "eager"), ("eager", "in place before")])
def test_a_compiled_loop_resumes_an_eager_one_and_back(orders: tuple[str, str]) -> None:
    first, second = (Loop(order, Counter()) for order in orders)
    first.run(13)
    state = first.body.state_dict()
    assert not any("_orig_mod" in name for name in first.body.model.state_dict())
    second.body.load_state_dict(state)
    assert_close(eager_loop(), second.run(11))


# --- growth in depth -------------------------------------------------------------------------


def deepened(model: nn.Module, call: Any, depth: esper.Depth) -> Any:
    loop = DepthLoop(model, depth).manage()
    loop.epochs(0, 8, call)
    assert len(loop.model.blocks) == (6 if depth.add else 4)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def stack() -> nn.Module:
    model = net()
    for block in model.blocks:
        block.dropout.p = 0.0
    return model


@pytest.mark.parametrize(("depth", "structures"), [(START, 3), (ADD, 1)], ids=["start", "frozen"])
def test_growth_in_depth_is_one_graph_for_each_depth(depth: esper.Depth, structures: int) -> None:
    expected, found, counter = stack(), stack(), Counter()
    expected = deepened(expected, expected, depth)
    found = deepened(found, torch.compile(found, backend=counter), depth)
    assert counter.graphs == structures
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.soak
def test_growth_in_depth_by_inductor_equals_eager() -> None:
    expected, found = stack(), stack()
    torch.testing.assert_close(
        deepened(found, torch.compile(found), START), deepened(expected, expected, START)
    )


def test_esper_grow_deepens_a_compiled_model() -> None:
    counter = Counter()
    eager = grow_deep(stack(), START)
    compiled_run = grow_deep(torch.compile(stack(), backend=counter), START)
    assert_close(eager.history, compiled_run.history)
    assert counter.graphs == len(set(counter.ops)) >= 6, "none is compiled again"
    assert type(compiled_run.export()) is Net
