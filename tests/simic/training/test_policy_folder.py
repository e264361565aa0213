"""A policy that is given to others: exported, shipped, used by name or folder."""

import hashlib
import json
import shutil
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from command_support import esper_here
from esper.api import export_policy, find_controller
from esper.leyline import ConfigError, policy_card
from esper.leyline.policy_card import CARD, WEIGHTS, find_policy, read_card, shipped_policies
from esper.simic.training.checkpoint import load_state, write_policy
from esper.simic.training.policy_controller import LearnedController
from esper.simic.training.state import TrainState
from training_support import tiny_run

ROOT = Path(__file__).parents[3]
MOST_BYTES = 1_000_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given") / "run"
    tiny_run(folder, rounds=2)
    return folder


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    return export_policy(run, "made", run.parent)[0]


@pytest.fixture(scope="module")
def for_any(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy over sets with a card that is written: what may ship."""
    out = tmp_path_factory.mktemp("given")
    tiny_run(out / "run", rounds=1, **{"envs": 2, "network.kind": "set"})
    folder, card = export_policy(out / "run", "any", out)
    written = replace(card, worth="none", evaluated="in tests", fails="always", default=True)
    (folder / CARD).write_text(written.as_toml())
    return folder


def network_of(state: TrainState) -> dict[str, torch.Tensor]:
    return state.agent.network.state_dict()


def test_the_policy_comes_back_and_nothing_else(run: Path, exported: Path) -> None:
    before, after = load_state(run), load_state(exported)
    assert before.space == after.space
    for name, tensor in network_of(before).items():
        assert torch.equal(tensor, network_of(after)[name]), name
    assert torch.equal(before.observations.mean, after.observations.mean)
    assert before.agent.optimizer.state
    assert not after.agent.optimizer.state
    with safe_open(exported / WEIGHTS, framework="pt") as file:
        assert not [name for name in file.keys() if "optimizer" in name]  # noqa: SIM118


def test_the_card_says_what_the_run_knows(exported: Path) -> None:
    card = read_card(exported)
    assert card.trained_on == "task digits: 8 episodes in 2 rounds, key 5"
    assert card.unmeasured == ("worth", "evaluated", "fails")
    assert card.parameters == sum(t.numel() for t in network_of(load_state(exported)).values())
    assert card.settings["network.lstm_hidden_dim"] == 16


def test_no_folder_of_this_machine_is_told(run: Path, tmp_path: Path) -> None:
    state = load_state(run)
    state.settings["warm_start"] = str(tmp_path / "teacher")
    folder = export_policy(run, "plain", tmp_path)[0]
    write_policy(tmp_path / "warm", state, replace(read_card(folder), name="warm"))
    told = (tmp_path / "warm" / WEIGHTS).read_bytes()
    assert b"teacher" in told
    assert str(tmp_path).encode() not in told


def test_what_is_there_is_not_overwritten(run: Path, exported: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        export_policy(run, "made", exported.parent)
    with pytest.raises(ConfigError, match="the name of a policy is"):
        export_policy(run, "../made", exported.parent)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        export_policy(exported.parent / "nothing", "other", exported.parent)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "is damaged, or not a policy"),
        (lambda data: b"", "is damaged, or not a policy"),
        (
            lambda data: data.replace(b'\\"format\\": 4', b'\\"format\\": 9'),
            "not a policy that this version",
        ),
        (lambda data: data.replace(b"lstm_hidden_dim", b"lstm_hidden_dom"), "cannot be used"),
    ],
)
def test_a_damaged_one_is_refused_in_a_sentence(
    exported: Path, tmp_path: Path, damage: object, message: str
) -> None:
    data = (exported / WEIGHTS).read_bytes()
    changed = damage(data)  # type: ignore[operator]
    assert changed != data
    with pytest.raises(ConfigError, match=message):
        load_state(with_weights(tmp_path / "bad", exported, changed))


def with_weights(folder: Path, exported: Path, data: bytes, *, checksum: bool = True) -> Path:
    """A copy of a policy with other weights, and with their checksum unless told otherwise."""
    shutil.copytree(exported, folder)
    (folder / WEIGHTS).write_bytes(data)
    if checksum:
        card = replace(read_card(folder), sha256=hashlib.sha256(data).hexdigest())
        (folder / CARD).write_text(card.as_toml())
    return folder


@pytest.mark.parametrize("place", range(10))
def test_no_flipped_bit_is_loaded(
    place: int,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = bytearray((exported / WEIGHTS).read_bytes())
    data[(place * len(data)) // 10 + place] ^= 1 << (place % 8)
    with_weights(tmp_path / "bad", exported, bytes(data), checksum=False)
    words = ("grow", "--controller", "bad", "--steps", "1", "--out", "run")
    assert esper_here(monkeypatch, *words, cwd=tmp_path) == 2
    said = capsys.readouterr().err
    assert "checksum" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_finite_are_refused(exported: Path, tmp_path: Path) -> None:
    data = (exported / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    # The file begins with the tensors of the normaliser, and ends with those of the network.
    first = data[:header] + struct.pack("<d", float("nan")) + data[header + 8 :]
    last = data[:-4] + struct.pack("<f", float("inf"))
    for i, changed in enumerate((first, last)):
        with pytest.raises(ConfigError, match="not finite"):
            load_state(with_weights(tmp_path / str(i), exported, changed))


def test_the_checksum_is_that_of_the_weights(exported: Path, tmp_path: Path) -> None:
    data = (exported / WEIGHTS).read_bytes()
    assert read_card(exported).sha256 == hashlib.sha256(data).hexdigest()
    bare = tmp_path / "bare"
    shutil.copytree(exported, bare)
    (bare / CARD).unlink()
    with pytest.raises(ConfigError, match=r"no card\.toml"):
        load_state(bare)


def test_it_is_a_controller_by_folder_and_by_name(
    run: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(find_controller(str(exported)), LearnedController)
    assert esper.load_policy(exported).task == "digits"
    monkeypatch.setattr(policy_card, "SHIPPED", exported.parent)
    for name in ("pretrained", "pretrained:made"):
        policy = find_controller(name)
        assert isinstance(policy, LearnedController)
        assert policy.name == name
    with pytest.raises(ConfigError, match="no policy 'other' comes with Esper; there are made"):
        find_controller("pretrained:other")


def test_one_over_sets_grows_a_model_with_other_slots(
    for_any: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_card, "SHIPPED", for_any.parent)
    x, y = torch.randn(64, 12), torch.randint(0, 3, (64,))
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    for slots in (["0"], ["0", "2", "4"]):
        with pytest.warns(esper.EsperWarning, match="pretrained was trained on the task 'digits'"):
            grown = esper.grow(model, loader, loader, slots=slots, controller="pretrained", steps=2)
        assert grown.outcome.controller == "pretrained"


def test_the_command_lists_shows_and_exports(
    run: Path,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(*words: str) -> str:
        assert esper_here(monkeypatch, "policies", *words, cwd=tmp_path) == 0
        return capsys.readouterr().out

    monkeypatch.setattr(policy_card, "SHIPPED", tmp_path)
    assert "No policy comes with this version of Esper; esper train ppo" in said()
    assert json.loads(said("--json")) == []
    monkeypatch.setattr(policy_card, "SHIPPED", exported.parent)
    assert "made" in said()
    (told,) = json.loads(said("--json"))
    assert told["parameters"] > 0
    assert "Where it fails\n  unmeasured" in said("show", "made")
    assert json.loads(said("show", "made", "--json"))["settings"]["task"] == "digits"
    assert "worth, evaluated, fails" in said("export", str(run), "--name", "again")
    assert (tmp_path / "policies" / "again" / CARD).is_file()
    assert esper_here(monkeypatch, "policies", "show", "none", cwd=tmp_path) == 2


def faults_of(folder: Path) -> list[str]:
    """What keeps a policy from being shipped."""
    card, faults = read_card(folder), []
    if card.unmeasured:
        faults.append(f"unmeasured: {', '.join(card.unmeasured)}")
    if (folder / WEIGHTS).stat().st_size >= MOST_BYTES:
        faults.append("too large")
    if card.settings.get("network.kind") != "set":
        faults.append("for one number of slots only")
    settings = load_state(folder).settings
    # Settings that are newer than the policy are not in its card.
    if not card.settings or any(settings.get(n) != value for n, value in card.settings.items()):
        faults.append("the card has other settings than the weights")
    if card.name != folder.name:
        faults.append("of another name than its folder")
    return faults


def test_what_ships_is_fit_to_ship(exported: Path, for_any: Path) -> None:
    for folder in (for_any, *(folder for folder, _ in shipped_policies())):
        assert faults_of(folder) == []
    assert [card.default for _, card in shipped_policies()][:1] in ([], [True])
    assert sum(card.default for _, card in shipped_policies()) <= 1
    # One that is not: the check can fail.
    assert faults_of(exported) == [
        "unmeasured: worth, evaluated, fails",
        "for one number of slots only",
    ]


def test_the_wheel_contains_them(exported: Path, tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    source = tmp_path / "project"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(exported, source / "src" / "esper" / "policies" / "made")
    (wheel,) = WheelBuilder(str(source)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(wheel).namelist()
    policies = ["made", *(card.name for _, card in shipped_policies())]
    for name in policies:
        assert {f"esper/policies/{name}/{WEIGHTS}", f"esper/policies/{name}/{CARD}"} <= set(names)


def test_the_default_is_found_if_there_is_one() -> None:
    if not shipped_policies():
        with pytest.raises(ConfigError, match="no policy comes with this version"):
            find_policy()
    else:
        assert find_policy()[1].default


def test_a_policy_that_saw_other_columns_is_refused(
    for_any: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_state(for_any).space.kind == "set"
    monkeypatch.setattr("esper.simic.training.env_specs.SET_COLUMNS", "those of another version")
    with pytest.raises(ConfigError, match="other columns than this version"):
        load_state(for_any)
