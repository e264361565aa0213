import copy
import functools
import io
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from architectures import ARCHITECTURES
from esper.growth.blueprints.catalogue import BlueprintSpec, default_catalogue
from esper.growth.export import export, largest_difference
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.hooks import hooks_of_esper
from esper.leyline import BLEND_NAMES, ConfigError, ExportError, SeedStage
from helpers import HOSTS, fitting, plant, wrap

GATED = BLEND_NAMES.index("gated")


def grown(name: str) -> tuple[GrownModule, Tensor]:
    """An architecture with every slot grown: fossils, and a gated blend half way."""
    make, slots, blueprints, example = ARCHITECTURES[name]
    with keyed(0):
        model, x = make(), example()
        model.train()
        for _ in range(3):
            model(x)
    network = GrownModule.wrap(model, slots, x)
    for slot, blueprint in enumerate(blueprints):
        stage = SeedStage.BLENDING if slot == 0 else SeedStage.FOSSILIZED
        alpha = 0.4 if slot == 0 else 1.0
        plant(network, slot, blueprint, stage, alpha, GATED if slot == 0 else 0, shake=0.2)
    return network, x


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_export_equals_live_for_public_architectures(name: str) -> None:
    network, x = grown(name)
    bare = ARCHITECTURES[name][0]()
    bare.load_state_dict(network.host.state_dict())
    plain = export(network, x)
    assert largest_difference(plain, network, x) <= 1e-5
    assert largest_difference(plain, bare, x) > 1e-3, "the seeds act"
    assert not any(type(m).__module__.startswith("esper") for m in plain.modules())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_exported_module_runs_where_esper_is_not_installed(name: str, tmp_path: Path) -> None:
    network, x = grown(name)
    plain = export(network, x).eval()
    torch.save(plain, tmp_path / "plain.pt")
    torch.save((x, plain(x)), tmp_path / "case.pt")
    code = (
        "import sys; sys.modules['esper'] = None\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import torch; torch.set_num_threads(1)\n"
        f"m = torch.load({str(tmp_path / 'plain.pt')!r}, weights_only=False)\n"
        f"x, y = torch.load({str(tmp_path / 'case.pt')!r})\n"
        "assert torch.equal(m(x), y)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_torch_export_of_an_exported_module(name: str) -> None:
    network, x = grown(name)
    plain = export(network, x).eval()
    program = torch.export.export(plain, (x,))
    assert torch.allclose(program.module()(x), plain(x), atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "resnet20", "transformer"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_onnx_of_an_exported_module(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    network, x = grown(name)
    plain = export(network, x).eval()
    path = tmp_path / "plain.onnx"
    torch.onnx.export(plain, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(output), plain(x), atol=1e-4)


@pytest.mark.parametrize("topology", HOSTS)
def test_every_blueprint_exports_at_every_stage(topology: str) -> None:
    for blueprint in fitting(topology):
        for stage, alpha, blend in (
            (SeedStage.BLENDING, 0.3, 0),
            (SeedStage.BLENDING, 0.6, GATED),
            (SeedStage.FOSSILIZED, 1.0, 0),
        ):
            network, x = wrap(topology)
            plant(network, 1, blueprint, stage, alpha, blend, shake=0.2)
            assert largest_difference(export(network, x), network, x) <= 1e-5


def test_seeds_that_do_not_act_are_left_out() -> None:
    network, x = wrap("cnn")
    names = [name for name, _ in network.host.named_parameters()]
    plant(network, 0, "conv_light", SeedStage.TRAINING, 0.0, shake=0.2)
    plain = export(network, x)
    assert [name for name, _ in plain.named_parameters()] == names
    assert torch.equal(plain(x), network.release()(x))


def test_an_exported_module_trains_on() -> None:
    network, x = grown("mlp")
    plain = export(network, x).train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    plain(x).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(p, before[n]) for n, p in plain.named_parameters())
    assert len(plain.state_dict()) > len(network.host.state_dict())


def test_exporting_changes_nothing_about_the_live_network() -> None:
    network, x = grown("resnet20")
    network.train()
    state = {n: t.clone() for n, t in network.state_dict().items()}
    plain = export(network, x)
    assert network.training
    assert all(torch.equal(t, state[n]) for n, t in network.state_dict().items())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    assert all(torch.equal(t, state[n]) for n, t in network.state_dict().items())


def test_a_seed_that_cannot_be_exported_is_named() -> None:
    class Moody(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((channels,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight if x.sum() > 0 else -x * self.weight

    moody = BlueprintSpec("moody", "residual", {"mlp": Moody}, "branches on values")
    network, x = wrap("mlp", default_catalogue().with_blueprint(moody))
    plant(network, 0, "moody", SeedStage.HOLDING, 1.0)
    with pytest.raises(ExportError, match="'moody' cannot be exported"):
        export(network, x)


def test_a_module_that_differs_from_the_live_one_is_refused() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + random.random()  # torch's seed does not apply

    x = torch.randn(3, 4)
    with pytest.raises(ExportError, match="differs from the live one"):
        export(GrownModule.wrap(Noisy(), ["layer"], x), x)


# --- nothing of Esper ------------------------------------------------------------------------


class Watcher:
    """A hook as a user would write it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: object) -> None:
        self.calls += 1


def test_hooks_of_esper_stay_behind_and_hooks_of_the_user_come_along() -> None:
    network, x = grown("mlp")
    host, heavy = network.host, Heavy()
    host.register_forward_pre_hook(Watcher())
    host.register_forward_hook(functools.partial(heavy.watch, "partial"), with_kwargs=True)
    host.get_submodule("head").register_full_backward_hook(heavy.watch)
    plain = export(network, x)
    hooks = [hook for module in plain.modules() for hook in module._forward_pre_hooks.values()]
    users = [hook for hook in hooks if not isinstance(getattr(hook, "__self__", 0), fx.GraphModule)]
    assert [type(hook) for hook in users] == [Watcher]
    assert not any(hooks_of_esper(module) for module in plain.modules())
    assert not plain._forward_hooks_with_kwargs
    assert not plain.get_submodule("head")._backward_hooks
    assert hooks_of_esper(host.get_submodule("layer1")), "the live network keeps its own"


class Heavy:
    """Stands for what Esper hooks on a model: it must not even be copied."""

    __module__ = "esper.api.somewhere"

    def watch(self, *args: object, **kwargs: object) -> None:
        pass

    def __deepcopy__(self, memo: object) -> "Heavy":
        raise AssertionError("copied")


@pytest.mark.parametrize("stage", [SeedStage.TRAINING, SeedStage.FOSSILIZED])
def test_a_model_that_grows_already_is_refused(stage: SeedStage) -> None:
    network, x = wrap("mlp")
    plant(network, 0, "branch", stage, 1.0)
    for model in (network, network.host, nn.Sequential(network.host)):
        with pytest.raises(ConfigError, match=r"is growing already.*finish\(\).*export\(\)"):
            GrownModule.wrap(model, ["blocks.0"], x)
    if stage == SeedStage.FOSSILIZED:
        GrownModule.wrap(export(network, x), ["blocks.0"], x)
    network.release()
    GrownModule.wrap(network.host, ["blocks.0"], x)


# --- functions of their input ----------------------------------------------------------------


def exports_of_every_kind() -> list[tuple[nn.Module, list[Tensor]]]:
    """For each topology: every blueprint in turn, in every slot, one of them in a gated blend."""
    exports = []
    for topology in HOSTS:
        for blueprint in fitting(topology):
            network, x = wrap(topology)
            plant(network, 0, blueprint, SeedStage.BLENDING, 0.5, GATED, shake=0.2)
            plant(network, 1, "branch", SeedStage.HOLDING, 1.0, shake=0.2)
            plant(network, 2, blueprint, SeedStage.FOSSILIZED, 1.0, shake=0.2)
            exports.append((export(network, x).eval(), list(x.split(2))))
    return exports


def differences(cases: list[tuple[nn.Module, list[Tensor]]], calls: int, threads: int = 8) -> int:
    """Calls, `calls` in each thread, whose output is not that of a call alone."""
    with torch.no_grad():
        jobs = [(model, x, model(x)) for model, inputs in cases for x in inputs]
    wrong = [0] * threads

    def work(me: int) -> None:
        for i in range(calls):
            # All threads at about the same model, with different inputs.
            model, x, expected = jobs[(i // 50 * 3 + me + i) % len(jobs)]
            with torch.no_grad():
                wrong[me] += not torch.equal(model(x), expected)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return sum(wrong)


def test_exports_are_functions_of_their_input_in_many_threads() -> None:
    assert differences(exports_of_every_kind(), calls=150) == 0


@pytest.mark.soak
def test_exports_are_functions_of_their_input_in_many_threads_for_long() -> None:
    assert differences(exports_of_every_kind(), calls=10_000) == 0


def test_live_networks_are_functions_of_their_input_in_many_threads() -> None:
    network, x = wrap("mlp")
    for slot in range(3):
        plant(network, slot, "branch", SeedStage.BLENDING, 0.4, GATED, shake=0.4)
    assert differences([(network, list(x.split(1)))], calls=300) == 0


class EarlyExit(nn.Module):
    """Leaves before the slot when the input is small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if x.abs().max() > 1.0:
            h = torch.relu(self.second(h))
        if x.abs().max() > 100.0:
            raise ZeroDivisionError
        return self.head(h)


def test_a_pass_that_does_not_come_by_the_slot_adds_nothing() -> None:
    x = torch.randn(5, 4) + 2.0
    network = GrownModule.wrap(EarlyExit(), ["second"], x)
    plant(network, 0, "branch", SeedStage.HOLDING, 1.0, shake=0.5)
    plain = export(network, x)
    with pytest.raises(ExportError, match="every slot on the example"):
        export(network, x / 100)
    bare = EarlyExit()
    bare.load_state_dict(network.host.state_dict())
    for model in (network, plain, copy.deepcopy(plain)):
        assert not torch.allclose(model(x), bare(x))
        assert torch.equal(model(x / 100), bare(x / 100))
        # An error between slot and output leaves nothing for the next pass.
        with pytest.raises(ZeroDivisionError):
            model(100 * x)
        assert torch.equal(model(x / 100), bare(x / 100))


def test_a_branch_reads_what_the_slot_gave_also_if_the_host_changes_it_in_place() -> None:
    x = torch.randn(5, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    network = GrownModule.wrap(model, ["0"], x)
    plant(network, 0, "branch", SeedStage.HOLDING, 1.0, shake=0.5)
    seed = network.slot(0).seed
    assert seed is not None
    expected = model[2](torch.relu(model[0](x))) + seed(model[0](x))
    assert torch.allclose(network(x), expected, atol=1e-6)
    assert torch.allclose(export(network, x)(x), expected, atol=1e-6)


def test_a_slot_used_outside_a_pass_leaves_nothing() -> None:
    x = torch.randn(5, 4) + 2.0
    network = GrownModule.wrap(EarlyExit(), ["second"], x)
    plant(network, 0, "branch", SeedStage.HOLDING, 1.0, shake=0.5)
    plain = export(network, x)
    for model in (network.host, plain):
        expected = model(x / 100)
        model.get_submodule("second")(torch.randn(5, 6))
        assert torch.equal(model(x / 100), expected)
    network.host.get_submodule("second")(torch.randn(5, 6))
    assert network.slot(0)._call.features is None
    stored = vars(plain.grown_tools.store)["_compiled_call_impl"]  # type: ignore[union-attr]
    assert not vars(stored), "nothing is left of the pass"


def test_an_exported_branch_under_torch_compile() -> None:
    network, x = grown("mlp")
    plain = export(network, x).eval()
    compiled = torch.compile(plain, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(x), plain(x), atol=1e-6)
    assert differences([(compiled, list(x.split(2)))], calls=20) == 0  # type: ignore[list-item]


def test_a_live_branch_under_torch_compile_and_in_inference_mode() -> None:
    network, x = grown("mlp")
    network.eval()
    expected = network(x)
    compiled = torch.compile(network, backend="eager")
    assert torch.allclose(compiled(x), expected, atol=1e-6)
    with torch.inference_mode():
        assert torch.allclose(network(x), expected, atol=1e-6)


# --- growing again and again -----------------------------------------------------------------


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
                         nn.Linear(8, 3))  # fmt: skip


def traced() -> nn.Module:
    return fx.symbolic_trace(sequential())


AGAIN = {
    "the same module": (sequential, [["2"]], ["mlp_small"]),
    "the same module, a branch": (sequential, [["2"]], ["branch"]),
    "module after module": (sequential, [["0"], ["2"], ["2.0"]], ["branch", "lora"]),
    "two at once": (sequential, [["0", "2"], ["2", "2.1"]], ["lora", "branch"]),
    "a GraphModule": (traced, [["0"], ["2.0"]], ["lora", "norm"]),
}


@pytest.mark.parametrize("case", AGAIN)
def test_growing_again_and_again(case: str) -> None:
    make, places, blueprints = AGAIN[case]
    x = torch.randn(5, 4)
    with keyed(0):
        model = make()
    for time in range(5):
        before = sum(p.numel() for p in model.parameters())
        output = model(x)
        network = GrownModule.wrap(model, places[time % len(places)], x)
        for slot in range(len(network.sites)):
            blueprint = blueprints[(time + slot) % len(blueprints)]
            plant(network, slot, blueprint, SeedStage.FOSSILIZED, 1.0, shake=0.3)
        model = export(network, x)
        live = sum(p.numel() for p in network.parameters())
        for exported in (model, copy.deepcopy(model), reloaded(model)):
            assert sum(p.numel() for p in exported.parameters()) == live > before
            assert torch.allclose(exported(x), network(x), atol=1e-6)
            assert not torch.allclose(exported(x), output)


def reloaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_grown_network_inside_another_keeps_both_branches() -> None:
    x = torch.randn(5, 4)
    inner = GrownModule.wrap(EarlyExit(), ["first"], x)
    plant(inner, 0, "branch", SeedStage.HOLDING, 1.0, shake=0.5)
    outer = nn.Sequential(export(inner, x), nn.Linear(3, 3))
    network = GrownModule.wrap(outer, ["0.first"], x)
    plant(network, 0, "branch", SeedStage.HOLDING, 1.0, shake=0.5)
    plain = export(network, x)
    assert torch.allclose(plain(x), network(x), atol=1e-6)
    without = outer[1](inner(x))
    assert not torch.allclose(plain(x), without)
    network.remove(0)
    assert torch.allclose(network(x), without)
