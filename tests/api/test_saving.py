"""Growing networks on disk, and in the checkpoints of a loop of one's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR, ReduceLROnPlateau

import esper
from architectures import MLP
from esper.growth.grown_module import GrownModule
from esper.growth.snapshot import read_tree, write_tree
from esper.leyline import ConfigError, ForgottenCallError, SeedStage
from esper.leyline.files import DamagedCheckpointError
from helpers import BLENDED, HOSTS, fitting, plant, wrap
from loop_support import Loop
from resume_support import Own, own_run


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("stage", [SeedStage.TRAINING, *BLENDED])
def test_a_growing_network_is_restored_exactly(host: str, stage: SeedStage, tmp_path: Path) -> None:
    network, x = wrap(host)
    plant(network, 0, fitting(host)[0], stage, BLENDED.get(stage, 0.0), blend=2, shake=0.3)
    plant(network, 2, "branch", SeedStage.FOSSILIZED, 1.0, shake=0.3)
    grown = esper.Grown(network, [], [], None, x)  # type: ignore[arg-type]
    folder = grown.save(tmp_path / "saved")
    other, _ = HOSTS[host]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    loaded = esper.load(folder, other)
    assert loaded.host is other
    assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in network.state_dict().items())
    for (_, slot), (_, saved) in zip(loaded.each_slot(), network.each_slot(), strict=True):
        assert (slot.stage, slot.alpha, slot.blend, slot.blueprint) == (
            (saved.stage, saved.alpha, saved.blend, saved.blueprint)
        )
    for each in (network, loaded):
        each.eval()
    assert torch.equal(network(x), loaded(x))
    assert torch.equal(loaded(x), other(x)), "calling the model itself is the same"
    assert loaded.sites == network.sites
    assert grown.save(folder) == folder, "saving again replaces it"


def test_what_grow_gives_is_in_its_folder(tmp_path: Path) -> None:
    grown = own_run(tmp_path / "run")
    loaded = esper.load(tmp_path / "run" / "grown", Own()).eval()
    x = torch.randn(4, 6)
    assert torch.equal(loaded(x), grown.model.eval()(x))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary[0]["val_score"] == grown.outcome.val_score
    assert (tmp_path / "run" / "growth.png").stat().st_size > 1000


def saved_mlp(folder: Path) -> GrownModule:
    network, x = wrap("mlp")
    plant(network, 0, "mlp_small", SeedStage.BLENDING, 0.4)
    esper.Grown(network, [], [], None, x).save(folder)  # type: ignore[arg-type]
    return network


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    saved_mlp(tmp_path / "net")
    other = MLP()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ConfigError, match="does not fit this model"):
        esper.load(tmp_path / "net", other)
    assert all(torch.equal(t, before[n]) for n, t in other.state_dict().items())
    host, _ = HOSTS["mlp"]()
    with pytest.raises(ConfigError, match="other blueprints"):
        esper.load(
            tmp_path / "net",
            host,
            esper.default_catalogue().with_blueprint(
                esper.BlueprintSpec("mine", "residual", {"mlp": nn.Linear}, "mine")
            ),
        )
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        esper.load(tmp_path / "nowhere", host)
    growing = saved_mlp(tmp_path / "other")
    with pytest.raises(ConfigError, match="growing already"):
        esper.load(tmp_path / "net", growing.host)
    file = tmp_path / "net" / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedCheckpointError, match="checksum"):
        esper.load(tmp_path / "net", host)


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="has other files"):
        saved_mlp(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_trees_come_back_as_they_were(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    parameter = nn.Parameter(torch.zeros(2))
    schedulers: list[Any] = [
        MultiStepLR(torch.optim.SGD([parameter], 0.1), [3, 3, 5]),
        ReduceLROnPlateau(torch.optim.SGD([parameter], 0.1)),
    ]
    tree = {
        "tensors": [shared, shared.clone(), shared.to(torch.bfloat16), torch.tensor(True)],
        "numbers": (1, 2.5, float("inf"), None, True, "text"),
        "keys": {0: "zero", "a": {"tensor": "a name like ours"}},
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "empty": [torch.empty(0, 3), [], {}, ()],
    }
    write_tree(tmp_path / "tree", tree, 1)
    found = read_tree(tmp_path / "tree", 1)
    assert repr(found) == repr(tree)
    assert found["tensors"][0].data_ptr() != found["tensors"][1].data_ptr()
    with pytest.raises(ConfigError, match=r"numbers\.1 is a complex"):
        write_tree(tmp_path / "bad", {"numbers": [1, 1j]}, 1)
    assert not (tmp_path / "bad").exists()


# --- loops of one's own ------------------------------------------------------------------------


def loop_at(epochs: int, scripted: str = "heuristic") -> Loop:
    loop = Loop(steps=20, controller=scripted)
    loop.model.eval()  # without dropout, so that a loop is a function of its state
    loop.body.host.user_evaluate = lambda: right(loop)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2)
    loop.body.manage(loop.optimizer)
    train_for(loop, epochs)
    return loop


def train_for(loop: Loop, epochs: int) -> None:
    for _ in range(epochs):
        loop.epoch()
        with loop.body.evaluating():
            score = right(loop)
        loop.body.step(score)


def right(loop: Loop) -> float:
    found: Tensor = loop.model(loop.x[80:]).argmax(1) == loop.y[80:]
    return 100.0 * float(found.float().mean())


@pytest.mark.parametrize("controller", ["heuristic", "scripted:early"])
@pytest.mark.parametrize("at", [1, 9, 14])
def test_a_body_goes_on_from_a_users_checkpoint(at: int, controller: str, tmp_path: Path) -> None:
    whole = loop_at(at, controller)
    torch.save(whole.body.state_dict(), tmp_path / "state.pt")
    train_for(whole, 20 - at)
    other = loop_at(0, controller)
    other.body.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train_for(other, 20 - at)
    assert other.body.history == whole.body.history
    assert other.body.recorder.events == whole.body.recorder.events
    assert other.body.finish() == whole.body.finish()
    ours, theirs = (loop.body.model.state_dict() for loop in (whole, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_states_that_do_not_fit_are_refused() -> None:
    loop = loop_at(0)
    with pytest.raises(ForgottenCallError, match="never called"):
        loop.body.state_dict()
    state = loop_at(3).body.state_dict()
    other = Loop(slots=["layer1"])
    other.body.manage(other.optimizer)
    with pytest.raises(ConfigError, match="parameter groups"):
        other.body.load_state_dict(state)
    state["groups"] = state["groups"][:2]
    with pytest.raises(ConfigError, match="layer1, layer2, but here they are layer1"):
        other.body.load_state_dict(state)
