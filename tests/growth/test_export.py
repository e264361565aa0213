import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from architectures import ARCHITECTURES
from esper.growth import (
    BlueprintSpec,
    GrownModule,
    default_catalogue,
    export,
    keyed,
    largest_difference,
)
from esper.leyline import BLEND_NAMES, ExportError, SeedStage
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
            return self.layer(x) + torch.randn(())

    x = torch.randn(3, 4)
    with pytest.raises(ExportError, match="differs from the live one"):
        export(GrownModule.wrap(Noisy(), ["layer"], x), x)
