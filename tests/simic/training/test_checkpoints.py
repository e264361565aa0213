"""Checkpoints are whole or absent, intact or refused, and never run anything."""

import ast
import errno
import hashlib
import json
import pickle
import shutil
from pathlib import Path

import pytest

import esper.simic.training as training
from esper.api.training import resume_ppo
from esper.leyline import ConfigError, files
from esper.observatory.run_directory import RunDirectory
from esper.simic.training.checkpoint import (
    MANIFEST,
    OLDEST,
    STATE,
    TENSORS,
    VERSION,
    DamagedCheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from esper.simic.training.env_specs import space_of
from esper.simic.training.loop import Hooks
from esper.simic.training.state import new_state
from training_support import same_run, tiny_config, tiny_run, tiny_task


@pytest.fixture
def run(tmp_path) -> Path:
    """Checkpoints before rounds 3 and 4, without playing."""
    state = new_state(tiny_config(), space_of(tiny_task()))
    for state.round in (3, 4):
        save_checkpoint(tmp_path, state, {"metrics.jsonl": 7})
    return tmp_path


def newest(run: Path) -> Path:
    return run / "checkpoints" / "round-000004"


def fix_checksums(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["sha256"]:
        manifest["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_the_newest_one_is_read(run):
    found = load_checkpoint(run)
    assert (found.state.round, found.files) == (4, {"metrics.jsonl": 7})


def test_two_are_kept(run):
    state = load_checkpoint(run).state
    state.round = 5
    save_checkpoint(run, state, {})
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["round-000004", "round-000005"]


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "gone"])
def test_a_damaged_one_is_refused_and_the_one_before_is_used(run, name, damage, caplog):
    file = newest(run) / name
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    assert load_checkpoint(run).state.round == 3
    assert "round-000004" in caplog.text
    assert "the one before it is used" in caplog.text


def test_nothing_intact_is_one_sentence(run):
    for path in (run / "checkpoints").iterdir():
        (path / "state.json").write_text("{")
    with pytest.raises(DamagedCheckpointError, match=r"no checkpoint of .* is intact"):
        load_checkpoint(run)


@pytest.mark.parametrize(("change", "age"), [(1, "a newer"), (OLDEST - 1 - VERSION, "an older")])
def test_another_format_is_refused(run, change, age):
    manifest = json.loads((newest(run) / "manifest.json").read_text())
    manifest["format"] += change
    (newest(run) / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=f"use {age} version of esper"):
        load_checkpoint(run)


def test_what_is_still_being_written_is_not_seen(run):
    shutil.copytree(newest(run), run / "checkpoints" / "unfinished-round-000009")
    assert load_checkpoint(run).state.round == 4


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_full_disk_is_reported_and_the_last_good_one_survives(run, monkeypatch, nth):
    state = load_checkpoint(run).state
    state.round, calls, write = 5, [], files._write

    def full(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == nth:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(files, "_write", full)
    with pytest.raises(ConfigError, match=r"No space left.*round-000004 is intact"):
        save_checkpoint(run, state, {})
    assert load_checkpoint(run).state.round == 4
    assert not list((run / "checkpoints").glob("unfinished*"))


def test_a_run_ends_with_the_report_when_the_disk_is_full_and_goes_on_later(tmp_path, monkeypatch):
    write = files._write

    def full(path: Path, data: bytes) -> None:
        if "round-000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write", full)
        with pytest.raises(ConfigError, match="round-000001 is intact"):
            tiny_run(tmp_path / "run")
    assert resume_ppo(tmp_path / "run", task=tiny_task()).round == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_while_rows_are_written_is_one_sentence_and_the_run_goes_on_later(tmp_path):
    def fill(step: int) -> None:
        if step == 3:
            records[0]._files["metrics.jsonl"] = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115

    records, make = [], RunDirectory.__init__

    def remember(self, path, **options) -> None:
        make(self, path, **options)
        records.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "__init__", remember)
        with pytest.raises(ConfigError, match=r"metrics\.jsonl could not be written: No space"):
            tiny_run(tmp_path / "cut", rounds=2, hooks=Hooks(on_step=fill))
    resume_ppo(tmp_path / "cut", task=tiny_task())
    tiny_run(tmp_path / "whole", rounds=2)
    same_run(tmp_path / "whole", tmp_path / "cut")


class Malicious:
    """Unpickling this would leave a file behind."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_a_malicious_file_is_not_run_even_with_a_checksum_that_fits(run, tmp_path, name):
    target = tmp_path / "executed"
    (newest(run) / name).write_bytes(pickle.dumps(Malicious(target)))
    fix_checksums(newest(run))
    assert load_checkpoint(run).state.round == 3
    assert not target.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"agent": None},
        {"settings": None},
        {"round": "many"},
        {"space": {"observation_dim": 3}},
        {"rewards": [1, 2]},
        {"files": {"metrics.jsonl": "all"}},
        {"files": None},
    ],
)
def test_nonsense_with_a_checksum_that_fits_is_refused(run, change):
    meta = json.loads((newest(run) / "state.json").read_text()) | change
    (newest(run) / "state.json").write_text(json.dumps(meta))
    fix_checksums(newest(run))
    assert load_checkpoint(run).state.round == 3


def test_a_link_out_of_the_run_is_refused(run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "state.json"
    shutil.move(newest(run) / "state.json", elsewhere)
    (newest(run) / "state.json").symlink_to(elsewhere)
    assert load_checkpoint(run).state.round == 3


def test_files_named_in_a_checkpoint_are_never_opened(run, tmp_path_factory):
    """Only the files of the run are cut back, whatever names a checkpoint holds."""
    victim = tmp_path_factory.mktemp("elsewhere") / "victim.txt"
    victim.write_text("precious")
    tiny_run(run / "own", rounds=1)
    folder = run / "own" / "checkpoints" / "round-000001"
    meta = json.loads((folder / "state.json").read_text())
    meta["files"] |= {str(victim): 0, "../../victim.txt": 0}
    (folder / "state.json").write_text(json.dumps(meta))
    fix_checksums(folder)
    resume_ppo(run / "own", task=tiny_task(), rounds=2)
    assert victim.read_text() == "precious"


def test_no_module_of_training_can_unpickle_or_evaluate():
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in Path(training.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not forbidden & {alias.name for alias in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert node.module not in forbidden, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "__import__"), path


def test_004_m6_resuming_reads_every_file_of_a_checkpoint_once(tmp_path, monkeypatch):
    tiny_run(tmp_path / "run", rounds=1)
    read, names = files.read_bytes, []

    def spy(path, most):
        names.append(path.name)
        return read(path, most)

    monkeypatch.setattr(files, "read_bytes", spy)
    resume_ppo(tmp_path / "run", task=tiny_task())
    assert sorted(n for n in names if n in (MANIFEST, STATE, TENSORS)) == [MANIFEST, STATE, TENSORS]
