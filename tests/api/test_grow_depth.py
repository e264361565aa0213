"""Growth in depth by `grow` and `attach`: resuming, frozen hosts, rollbacks, bad input."""

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import esper
from depth_support import ADD, EPOCHS, START, Block, Loop, Named, Net, Post, grow, net, rows
from esper.growth.optimizer import SLOT_KEY
from esper.leyline import ConfigError
from esper.leyline.events import GovernorRollback, SeedFossilized, SeedGerminated
from resume_support import killing, start_child, was_killed

BIRTHS = {
    "start": START,
    "fresh": esper.Depth("blocks", start=1, birth="fresh", when=[0.2, 0.5]),
    "add": esper.Depth("blocks", add=2, when=0.3),
    "frozen": ADD,
}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def grown_blocks(grown: esper.Grown) -> list[str]:
    return [event.module for event in grown.events if isinstance(event, SeedGerminated)]


# --- resuming --------------------------------------------------------------------------------


def killed_run(out: Path, epoch: int, model: Any, depth: esper.Depth) -> None:
    def run() -> None:
        callback = esper.Callback()
        callback.on_epoch = killing(epoch, callback.on_epoch)  # type: ignore[method-assign]
        grow(model(), depth, out, callbacks=[callback])

    assert was_killed(start_child(run))


@pytest.mark.parametrize(
    ("birth", "block"), [("start", Block), ("fresh", Post), ("add", Post), ("frozen", Block)]
)
def test_a_killed_run_ends_like_one_that_was_not(
    birth: str, block: type[nn.Module], tmp_path: Path
) -> None:
    depth, model = BIRTHS[birth], partial(net, block=block)
    whole = grow(model(), depth, tmp_path / "whole")
    assert len(grown_blocks(whole)) == len(whole.model.sites)
    killed_run(tmp_path / "cut", 2 if birth == "start" else 7, model, depth)
    # The blocks that were to come had other weights in a model that was made again.
    again = model()
    for later in list(again.blocks)[1:] if depth.add is None and birth != "fresh" else ():
        nn.init.normal_(later.inner.weight)
    cut = grow(again, depth, tmp_path / "cut")
    assert_equal(whole.model.state_dict(), cut.model.state_dict())
    assert (whole.outcome, whole.history, whole.events) == (cut.outcome, cut.history, cut.events)
    plain = whole.export()
    assert type(plain) is Net
    assert plain.n_layers == len(plain.blocks)
    Net(plain.n_layers, block).load_state_dict(plain.state_dict())


@pytest.mark.parametrize("birth", BIRTHS)
@pytest.mark.parametrize("epoch", [1, 6])
def test_attach_goes_on_from_a_checkpoint(birth: str, epoch: int) -> None:
    depth = BIRTHS[birth]
    whole = Loop(net(), depth).manage().epochs(0, EPOCHS)
    first = Loop(net(), depth).manage().epochs(0, epoch)
    assert (first.model.n_layers > len(first.body.model.stacks.stacks[0].first)) == (
        epoch == 6 or depth.freeze_host
    )
    saved = io.BytesIO()
    torch.save(first.body.state_dict(), saved)
    saved.seek(0)
    rest = Loop(net(key=4), depth).manage()
    rest.body.load_state_dict(torch.load(saved, weights_only=True))
    rest.epochs(epoch, EPOCHS)
    assert_equal(state(whole.model), state(rest.model))
    assert whole.body.history == rest.body.history
    one, other = (each.optimizer.state_dict() for each in (whole, rest))
    assert one["param_groups"] == other["param_groups"]
    assert_equal(_moments(one), _moments(other))


def _moments(saved: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{i}.{k}": v for i, own in saved["state"].items() for k, v in own.items()}


def test_states_of_present_blocks_are_kept_and_new_ones_join_their_group() -> None:
    loop = Loop(net()).manage()
    first = loop.model.blocks[0].inner.weight
    assert not loop.optimizer.state
    absent = loop.body.model.stacks.spare_parameters()
    held = {id(p) for group in loop.optimizer.param_groups for p in group["params"]}
    assert absent
    assert not held & {id(p) for p in absent}
    loop.epochs(0, EPOCHS)
    assert loop.optimizer.state[first]["step"] == 3 * EPOCHS
    for group in loop.optimizer.param_groups:
        assert all((p.dim() > 1) == (group["weight_decay"] == 0.1) for p in group["params"])
    slots = [group for group in loop.optimizer.param_groups if SLOT_KEY in group]
    assert [len(group["params"]) for group in slots] == [2, 4, 4, 8]
    trained = {id(p) for group in loop.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in loop.model.parameters()}


# --- frozen hosts ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["grow", "attach"])
def test_a_frozen_host_is_as_before_without_its_new_blocks(how: str) -> None:
    model = net(2)
    for param in model.parameters():  # old gradients must not be applied
        param.grad = torch.ones_like(param)
    before, was_training = state(model), [module.training for module in model.modules()]
    if how == "grow":
        network = grow(model, ADD, start="trained").model
    else:
        network = Loop(model, ADD).manage().epochs(0, EPOCHS).body.model
    assert model.n_layers == 4
    grown = state(model)
    assert not torch.equal(grown["blocks.1.outer.weight"], grown["blocks.0.outer.weight"])
    assert network.release() is model
    assert_equal(before, state(model))
    model.train()
    assert was_training == [module.training for module in model.modules()]
    assert all(p.requires_grad for p in model.parameters())


def test_the_export_of_a_frozen_host_can_be_trained() -> None:
    loop = Loop(net(2), ADD).manage().epochs(0, 4)
    plain = loop.body.export()
    assert all(p.requires_grad for p in plain.parameters())
    assert not all(p.requires_grad for p in loop.model.parameters())


def test_a_frozen_host_of_silent_blocks_keeps_its_first_ones_from_the_start() -> None:
    loop = Loop(net(2), ADD)
    expected = loop.score()
    loop.manage()
    assert (loop.model.n_layers, loop.score()) == (4, expected + 2)
    loop.epochs(0, EPOCHS)
    outcome = loop.body.finish()
    assert (outcome.germinated, outcome.culled, len(outcome.seeds)) == (1, 0, 1)
    assert outcome.host_params == sum(p.numel() for p in net(2).parameters())


def test_a_budget_too_small_for_the_only_blocks_that_learn() -> None:
    model, budget = net(2), esper.Budget(params=1.5)
    depth = esper.Depth("blocks", add=4, freeze_host=True)
    with pytest.raises(ConfigError, match="budget is too small"):
        Loop(model, depth, budget=budget)
    assert (model.n_layers, len(model.blocks)) == (2, 2)


# --- rollbacks -------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [START, BIRTHS["add"]], ids=["start", "add"])
def test_a_rollback_restores_the_healthy_network(depth: esper.Depth) -> None:
    loop = Loop(net(), depth).manage()
    number, before = 0, loop.model.n_layers
    while loop.model.n_layers == before:
        loop.epochs(number, number + 1)
        number += 1
    with loop.body.model.ungrown():
        healthy = state(loop.model)
    without = {id(b) for b in loop.body.model.slot(0).seed.children()}
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.fill_(float("nan"))
    loop.optimizer.zero_grad()
    loop.body.optimizer_steps = 1
    loop.body.step(float("nan"))
    events = [e for e in loop.body.recorder.events if isinstance(e, GovernorRollback)]
    assert len(events) == 1
    assert loop.model.n_layers == before
    assert not without & {id(b) for b in loop.model.blocks}
    assert_equal(healthy, state(loop.model))
    loop.epochs(number, number + 2)
    assert loop.body.history[-1]["val_score"] is not None


# --- saving ----------------------------------------------------------------------------------


@pytest.mark.parametrize("birth", BIRTHS)
def test_a_saved_network_is_loaded_into_a_model_made_anew(birth: str, tmp_path: Path) -> None:
    x, _ = rows()
    grown = grow(net(), BIRTHS[birth])
    grown.save(tmp_path / "net")
    loaded = esper.load(tmp_path / "net", net(key=7))
    assert type(loaded.host) is Net
    assert_equal(grown.model.state_dict(), loaded.state_dict())
    for each in (grown.model, loaded):
        each.eval()
    assert torch.equal(grown.model(x), loaded(x))
    with pytest.raises(ConfigError, match="blocks"):
        esper.load(tmp_path / "net", net(2))


@pytest.mark.parametrize("block", [Block, Post])
def test_an_export_is_pickled_and_exported_like_any_model(
    block: type[nn.Module], tmp_path: Path
) -> None:
    x, _ = rows()
    plain = Loop(net(block=block)).manage().epochs(0, EPOCHS).body.export().eval()
    assert plain.n_layers == 4
    torch.save(plain, tmp_path / "plain.pt")
    again = torch.load(tmp_path / "plain.pt", weights_only=False)
    assert torch.equal(plain(x), again(x))
    program = torch.export.export(plain, (x[:4],))
    torch.testing.assert_close(program.module()(x[:4]), plain(x[:4]))


def test_onnx_of_an_export(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    x, _ = rows()
    plain = grow(net()).export().eval()
    path = str(tmp_path / "plain.onnx")
    torch.onnx.export(plain, (x[:4],), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    (found,) = session.run(None, {session.get_inputs()[0].name: x[:4].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), plain(x[:4]), rtol=1e-4, atol=1e-5)


def test_an_average_cannot_follow() -> None:
    loop = Loop(net())
    with pytest.raises(ConfigError, match="cannot follow growth in depth"):
        loop.body.follow(AveragedModel(loop.model))


# --- bad input -------------------------------------------------------------------------------


class Scaled(Block):
    def forward(self, x: Tensor, scale: Any) -> Tensor:
        return super().forward(scale * x)


class Zipped(Net):
    """Each block reads an entry of another list."""

    strict = False

    def __init__(self) -> None:
        super().__init__(4, Scaled)
        self.register_buffer("scales", torch.arange(1.0, 5.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, scale in zip(self.blocks, self.scales, strict=self.strict):
            x = block(x, scale)
        return self.head(x)


class Strict(Zipped):
    strict = True


class Numbered(Zipped):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x, self.scales[number])
        return self.head(x)


class Between(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(2.0 * x)
        return self.head(x)


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


class Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)


class Hook:
    def __call__(self, *args: Any) -> None:
        pass


def hooked() -> Net:
    model = net()
    model.blocks[1].inner.register_forward_hook(Hook())
    return model


def at_end(path: str) -> esper.Depth:
    return esper.Depth(path, add=2, places="end")


BAD = {
    "unknown path": (net, esper.Depth("blokcs"), {}, "'blokcs' is not a list.*it has blocks"),
    "no list": (net, esper.Depth("stem"), {}, "'stem' is not a list of blocks"),
    "start too large": (net, esper.Depth("blocks", start=4), {}, "must be from 1 to 3"),
    "one block": (lambda: net(1), "blocks", {}, "none of its 1 can be left out; give add"),
    "no stack": (lambda: nn.Sequential(nn.Linear(6, 3)), "auto", {}, "exactly one stack"),
    "slots and depth": (net, "blocks", {"slots": ["stem"]}, "either slots or depth"),
    "controller": (net, "blocks", {"controller": "each"}, "'each' chooses seeds"),
    "no controller": (net, "blocks", {"controller": "nonsense"}, "no controller"),
    "small budget": (net, "blocks", {"budget": esper.Budget(params=1.01)}, "too small"),
    "zip": (Zipped, esper.Depth("blocks", start=2), {}, "something else with the blocks"),
    "zip and more": (Zipped, at_end("blocks"), {}, "does not call all blocks of 'blocks'"),
    "strict zip": (Strict, esper.Depth("blocks", start=2), {}, "with fewer blocks Strict"),
    "strict zip and more": (Strict, at_end("blocks"), {}, "Strict fails when more blocks come"),
    "numbers": (Numbered, esper.Depth("blocks", start=2), {}, "something else with the blocks"),
    "numbers and more": (Numbered, at_end("blocks"), {}, "Numbered fails when more blocks come"),
    "between": (Between, "blocks", {}, "something of its own between its blocks; move"),
    "twice": (Twice, "blocks", {}, r"calls the block 'blocks.0' 2 times"),
    "shared": (Shared, at_end("blocks"), {}, "a block several times"),
    "hook": (hooked, "blocks", {}, r"'blocks.1.inner' has a hook of Hook"),
    "frozen": (lambda: net(2, Post), ADD, {}, "leave out freeze_host"),
    "names": (Named, at_end("blocks"), {}, r"names its blocks \(one, two, three\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_changes_nothing(name: str) -> None:
    build, depth, changes, message = BAD[name]
    model = build()
    mode = [module.training for module in model.modules()]
    modules, before, numbers = list(model.named_modules()), state(model), _numbers(model)
    with pytest.raises(ConfigError, match=message):
        Loop(model, depth, **changes)
    with pytest.raises(ConfigError, match=message):
        grow(model, depth, **changes)
    assert list(model.named_modules()) == modules
    assert [module.training for module in model.modules()] == mode
    assert _numbers(model) == numbers
    assert_equal(before, state(model))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()) or (
        name == "hook"
    )


def _numbers(model: nn.Module) -> dict[str, int]:
    return {name: value for name, value in vars(model).items() if type(value) is int}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"start": 1, "add": 1}, "either start or add"),
        ({"start": 0}, "start of Depth must be"),
        ({"add": 1.5}, "add of Depth must be"),
        ({"freeze_host": True}, "give add"),
        ({"add": 1, "freeze_host": True, "when": 0.3}, "begin `when` with 0"),
        ({"when": [0.5, 0.2]}, "in order"),
        ({"when": "now"}, "when of Depth"),
        ({"path": []}, "path of Depth"),
        ({"path": 3}, "path of Depth"),
        ({"birth": "twin"}, "copy or fresh"),
        ({"places": "start"}, "spread or end"),
    ],
)
def test_values_that_cannot_work(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        esper.Depth(**{"path": "blocks", **values})


def test_a_trained_model_does_not_start_with_fewer_blocks() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"contradict each other.*give esper.Depth"):
        grow(model, START, start="trained")
    assert len(model.blocks) == 4


# --- other models ----------------------------------------------------------------------------


def test_a_named_sequential_gets_its_names_back() -> None:
    class Chain(Named):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(self.stem(x)))

    model = Chain()
    names = list(model.state_dict())
    loop = Loop(model, esper.Depth("blocks", start=1, when=[0.2])).manage()
    assert list(model.blocks._modules) == ["one"]
    loop.epochs(0, 4)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    """Blocks that are blended in are recomputed with the same share."""

    class Saving(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    class NoBatch(Post):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.dropout.p = nn.LayerNorm(8), 0.0  # type: ignore[assignment]

    found = []
    for kind in (Net, Saving):
        torch.manual_seed(0)
        found.append(Loop(kind(4, NoBatch)).manage().epochs(0, 8))
    assert any(isinstance(e, SeedFossilized) for e in found[0].body.recorder.events)
    assert_equal(*(state(loop.model) for loop in found))


def test_hooks_of_functions_are_copied() -> None:
    model = net()
    calls: list[int] = []

    def note(*args: Any) -> None:
        calls.append(1)

    for block in model.blocks:
        block.register_forward_hook(note)
    loop = Loop(model).manage().epochs(0, EPOCHS)
    calls.clear()
    loop.model(loop.x[:4])
    assert len(calls) == 4


def test_a_copy_of_a_growing_model_is_plain() -> None:
    loop = Loop(net(2), ADD).manage().epochs(0, 2)
    plain = copy.deepcopy(loop.body.export())
    assert not any(module._forward_pre_hooks for module in plain.modules())
