"""Malformed commands: one sentence, exit code 2, no traceback, and nothing left behind."""

import hashlib
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from command_support import ESPER, SURROUNDINGS, esper_here
from esper.api import load_policy
from esper.cli.evaluate_command import EvaluateSettings
from esper.cli.grow_command import GrowSettings
from esper.cli.learn_commands import ImitateSettings, OfflineSettings, RecordSettings
from esper.cli.train_command import PPOSettings
from esper.leyline import ConfigError, EsperError
from esper.observatory.query import query
from esper.observatory.run_directory import RunDirectory
from esper.observatory.summaries import compare_runs
from esper.simic.training.checkpoint import save_checkpoint
from esper.simic.training.config import TrainingConfig, load_config
from esper.simic.training.env_specs import space_of
from esper.simic.training.state import new_state
from esper.tamiyo.controllers.scripted import parse_script
from esper.tolaria.tasks import find_task
from view_support import outcome, write_run

LONG = "a" * 300
SURROGATE = "run\udcff"  # how Python reads a byte that is no text
FAST = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with runs that are broken in different ways."""
    folder = tmp_path_factory.mktemp("work")
    for name, text in OUTCOMES.items():
        run = write_run(folder / name, [outcome()])
        (run / "outcomes.jsonl").write_text(text)
    for name, text in SUMMARIES.items():
        run = write_run(folder / name, [outcome()])
        (run / "summary.json").write_text(text)
    (folder / "mine").mkdir()
    (folder / "mine" / "config.toml").write_text("mine = true\n")
    (folder / "file").write_text("not a folder")
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
    (folder / "latin.txt").write_bytes("1 WAIT # né".encode("latin-1"))
    (folder / "loop").symlink_to("loop")
    with (folder / "sparse").open("wb") as file:
        file.truncate(5 << 30)
    policy = new_state(TrainingConfig(), space_of(find_task("digits")))
    for name, text in TIMINGS.items():
        with RunDirectory.create(folder / name, TrainingConfig().flat()) as record:
            save_checkpoint(record.path, policy, record.sync())
        (folder / name / "timings.jsonl").write_text(text)
    for name, (path, value) in POLICIES.items():
        write_policy(folder / name, policy, path, value)
    return folder


OUTCOMES = {
    "no-json": "{]\n",
    "a-list": "[1, 2]\n",
    "a-number": "17\n",
    "nothing": "",
    "null": "null\n",
    "words": '{"val_score": "high"}\n',
    "nested": '{"params": {"a": 1}}\n',
    "a-truth": '{"culled": true}\n',
    "binary": "\x00\x01\n",
}
SUMMARIES = {
    "summary-no-json": "[",
    "summary-number": "3",
    "summary-rows": "[1]",
    "summary-words": '[{"arm": "grown", "test_score": "high"}]',
}
CONFIGS = {
    "no.toml": "rounds = ",
    "unknown.toml": "epochs = 3",
    "text.toml": 'rounds = "many"',
    "truth.toml": "envs = true",
    "huge.toml": f"rounds = {10**30}",
    "wide.toml": "[network]\nlstm_hidden_dim = 1000000000",
    "deep.toml": "[network]\nlstm_layers = 1000000000",
    "crowd.toml": "envs = 1000000000",
    "table.toml": "ppo = 3",
    "zero.toml": "[ppo]\nlearning_rate = 0",
    "reward.toml": 'reward_mode = "fame"',
}
SCRIPTS = {
    "words.txt": "grow something",
    "step.txt": "0 WAIT",
    "blend.txt": "1 GERMINATE r0c0 norm soft",
    "twice.txt": "1 WAIT\n1 WAIT",
    "slot.txt": "1 GERMINATE r9c9 norm linear",
    "seed.txt": "1 GERMINATE r0c0 oak linear",
    "long.txt": f"{'9' * 5000} WAIT",
    "bytes.txt": "\0" * 5000,
}
TIMINGS = {
    "timings-half": '{"round": 0}\n{"rou\n',
    "timings-list": "[1]\n",
    "timings-none": '{"seconds": 1}\n',
    "timings-words": '{"round": "first"}\n',
    "timings-long": f'{{"round": {"9" * 5000}}}\n',
}
POLICIES: dict[str, tuple[tuple[str, ...], Any]] = {
    "policy-wide": (("agent", "network", "lstm_hidden_dim"), 10**12),
    "policy-deep": (("agent", "network", "lstm_layers"), 10**12),
    "policy-head": (("agent", "network", "head_width"), 10**12),
    "policy-slots": (("agent", "network", "num_slots"), 10**12),
    "policy-view": (("agent", "network", "observation_dim"), 10**12),
    "policy-space": (("space", "observation_dim"), 10**12),
    "policy-words": (("agent", "network", "feature_dim"), "wide"),
    "policy-nothing": (("agent",), None),
    "policy-round": (("round",), "first"),
}


def write_policy(run: Path, state: Any, path: tuple[str, ...], value: Any) -> None:
    """A run with a checkpoint in which one value was changed, checksums and all."""
    checkpoint = save_checkpoint(run, state, {})
    meta = json.loads((checkpoint / "state.json").read_text())
    place = meta
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    data = json.dumps(meta).encode()
    (checkpoint / "state.json").write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = hashlib.sha256(data).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("command", ["grow", "evaluate", "record", "ppo"])
def test_a_full_disk_is_one_sentence(command: str, tmp_path: Path) -> None:
    """At different moments: what has been written so far stays readable."""
    words = {
        "grow": ["grow", "--steps", "3", "--no-compare"],
        "evaluate": ["evaluate", "--arms", "static", "--keys", "3", "--steps", "1"],
        "record": ["train", "record", "--episodes", "4", "--controller", "static"],
        "ppo": ["train", "ppo", "--envs", "2", "--rounds", "1"],
    }[command]
    size = {"grow": 2000, "evaluate": 500, "record": 30_000, "ppo": 60_000}[command]
    done = subprocess.run(
        [*ESPER, *words, "--out", "run"],
        cwd=tmp_path,
        env=os.environ | SURROUNDINGS,
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )
    assert done.returncode == 2, done.stderr
    (said,) = done.stderr.splitlines()
    assert "written" in said
    assert not list(tmp_path.rglob("*unfinished*"))


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def check_refused(
    words: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    before = listing(folder)
    assert esper_here(monkeypatch, *words, cwd=folder) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    assert listing(folder) == before, "nothing is left behind"
    return said.err


# What is said is one line that begins with our name and holds the words.
SENTENCES: list[tuple[list[str], str]] = [
    (["grow", "--task", ""], "no task"),
    (["grow", "--task", LONG], "no task"),
    (["grow", "--task", "Digits"], "no task 'Digits'"),
    (["grow", "--task", "[bold]"], "no task '[bold]'"),
    (["grow", "--task", "cifar10"], "data get cifar10"),
    (["grow", "--controller", ""], "no controller ''"),
    (["grow", "--controller", LONG], "no controller 'aaa"),
    (["grow", "--controller", "scripted"], "no controller 'scripted'"),
    (["grow", "--controller", "scripted:"], "no controller 'scripted:'"),
    (["grow", "--controller", "static:x"], "no controller 'static:x'"),
    (["grow", "--controller", f"scripted:{LONG}"], "no script"),
    (["grow", "--controller", "scripted:mine"], "no script 'mine'"),
    (["grow", "--controller", "file"], "no controller 'file'"),
    (["grow", "--controller", "mine"], "mine"),
    (["grow", "--controller", "x[/]y"], "no controller 'x[/]y'"),
    *((["grow", "--controller", f"scripted:{name}"], name) for name in SCRIPTS),
    *((["grow", "--controller", name], "") for name in POLICIES),
    (["grow", "--out", "file"], "cannot write to file"),
    (["grow", "--out", "file/deeper"], "cannot write to file/deeper"),
    (["grow", "--out", LONG], "File name too long"),
    (["grow", "--out", SURROGATE], "cannot be the name of a folder"),
    (["grow", "--out", "mine"], "config.toml but no run"),
    (["grow", "--out", "mine", "--overwrite"], "config.toml but no run"),
    (["grow", "--out", "words"], "but no run"),
    (["grow", "--max-params", "0.5"], "below the host itself"),
    (["grow", "--max-params", "nan"], "must be a number"),
    (["grow", "--max-params", "inf"], "must be a number"),
    (["grow", "--max-params", "-1"], "below the host itself"),
    (["grow", "--max-params", "1.0"], "too small for any seed"),
    (["grow", "--max-macs", "0"], "below the host itself"),
    (["grow", "--max-macs", "1e999"], "must be a number"),
    (["grow", "--incubation", ""], "'isolated' or 'joint'"),
    (["grow", "--track", "neptune"], "no tracker 'neptune'; there are tensorboard, wandb and"),
    (["grow", "--track", ""], "no tracker ''"),
    (["train", "ppo", "--track", "[bold]"], "no tracker '[bold]'"),
    (["evaluate", "--arms", ""], "arm"),
    (["evaluate", "--arms", "static,wise"], "no controller 'wise'"),
    (["evaluate", "--arms", f"static,{LONG}"], "no controller 'aaa"),
    (["evaluate", "--arms", "static,static"], "static"),
    (["evaluate", "--control-for", "nobody"], "nobody"),
    (["evaluate", "--task", "nothing"], "no task 'nothing'"),
    (["evaluate", "--out", "file"], "file"),
    (["evaluate", "--out", LONG], "File name too long"),
    (["compare", "nowhere"], "not a run directory"),
    (["compare", "file"], "file"),
    (["compare", LONG], "File name too long"),
    (["compare", "mine"], "mine is not a run directory"),
    *((["compare", name], name) for name in OUTCOMES),
    *((["compare", name], name) for name in SUMMARIES),
    (["query", "nowhere", "select 1"], "not a run directory"),
    (["query", LONG, "select 1"], "File name too long"),
    (["query", "words", ""], "a query must be one SELECT"),
    (["query", "words", "select"], "the query failed"),
    (["query", "words", "drop table outcomes"], "a query must be one SELECT"),
    (["query", "words", "select 1; select 2"], "a query must be one SELECT"),
    (["query", "words", "select * from nothing"], "the query failed"),
    (["query", "words", "select * from 'file'"], "the query failed"),
    (["query", "words", "select 'x' || [1]"], "the query failed"),
    (["query", "no-json", "select 1"], "is damaged"),
    (["query", "words", "select 1", "--timeout", "0"], "must be above 0"),
    (["query", "words", "select 1", "--timeout", "-3"], "must be above 0"),
    (
        ["query", "words", "select sum(a.range * b.range) from range(999999) a, range(999999) b",
         "--timeout", "0.2"],
        "took longer than 0.2 seconds",
    ),
    (["data", "get", "nothing"], "unknown data set 'nothing'"),
    (["data", "get", LONG], "unknown data set"),
    (["data", "get", "../digits"], "unknown data set"),
    (["train", "ppo", "--config", "nowhere"], "nowhere cannot be read: No such file"),
    (["train", "ppo", "--config", "mine"], "mine cannot be read"),
    (["train", "ppo", "--config", LONG], "cannot be read"),
    *((["train", "ppo", "--config", name], "") for name in CONFIGS),
    (["train", "ppo", "--task", "nothing"], "no task 'nothing'"),
    (["train", "ppo", "--reward", "fame"], "no reward mode 'fame'"),
    (["train", "ppo", "--population", "crowded"], "population must be"),
    (["train", "ppo", "--warm-start", "nowhere"], "nowhere"),
    (["train", "ppo", "--warm-start", LONG], "File name too long"),
    (["train", "ppo", "--warm-start", "policy-wide"], "lstm_hidden_dim"),
    (["train", "ppo", "--resume", "nowhere"], "not the folder of a training run"),
    (["train", "ppo", "--resume", LONG], "File name too long"),
    (["train", "ppo", "--resume", "mine"], "mine"),
    *((["train", "ppo", "--resume", name], "timings.jsonl is damaged") for name in TIMINGS),
    (["train", "ppo", "--resume", "mine", "--overwrite"], "exclude each other"),
    (["grow", "--resume", "--overwrite"], "exclude each other"),
    (["evaluate", "--resume", "--overwrite"], "exclude each other"),
    (["grow", "--extra", "0.3"], "--start trained"),
    (["grow", "--controller", "scripted:latin.txt"], "not UTF-8"),
    (["grow", "--controller", "scripted:sparse"], "longer than"),
    (["grow", "--settings", "latin.txt"], "not UTF-8"),
    (["train", "ppo", "--config", "sparse"], "longer than"),
    (["train", "ppo", "--config", "loop"], "loop"),
    *(
        ([*words, "--out", ""], "out is empty")
        for words in (["grow"], ["evaluate"], ["train", "ppo"], ["train", "record"])
    ),
    (["show", ""], "run is empty"),
    (["runs", ""], "folder is empty"),
    (["train", "ppo", "--resume", ""], "resume is empty"),
    (["serve", ".", "--host", ".."], "cannot serve on .."),
    (["grow", "--task", "\x1b[31m"], "no task '\\x1b[31m'"),
    (["train", "ppo", "--resume", "words", "--task", "digits"], "resume"),
    (["train", "ppo", "--device", "cuda:77"], "no device 'cuda:77'"),
    (["train", "ppo", "--device", ""], "device"),
    (["train", "ppo", "--workers", "0"], "worker"),
    (["train", "ppo", "--workers", "many"], "worker"),
    (["train", "ppo", "--workers", "2", "--device", "cpu"], "leave out workers"),
    (["train", "ppo", "--profile", "500"], "round 500 cannot be profiled"),
    (["train", "ppo", "--gamma", "2"], "gamma"),
    (["train", "ppo", "--gamma", "nan"], "gamma"),
    (["train", "ppo", "--learning-rate", "0"], "learning_rate"),
    (["train", "ppo", "--learning-rate", "inf"], "learning_rate"),
    (["train", "ppo", "--entropy-coef", "-1"], "entropy_coef"),
    (["train", "ppo", "--out", "file"], "cannot write to file"),
    (["train", "ppo", "--out", "mine", "--overwrite"], "but no run"),
    (["train", "record", "--controller", "wise"], "no controller 'wise'"),
    (["train", "record", "--network", "round"], "network must be 'flat' or 'set', got 'round'"),
    (["explain", "nowhere", "--step", "1"], "nowhere is not the folder of a run"),
    (["policies", "show", "wise"], "no policy"),
    (["policies", "export", "nowhere", "--name", "mine"], "nowhere holds no checkpoint"),
    (["policies", "export", "nowhere", "--name", "../mine"], "the name of a policy is"),
    (["grow", "--controller", "pretrained:wise"], "no policy"),
    (["train", "record", "--controller", LONG], "no controller 'aaa"),
    (["train", "record", "--task", "nothing"], "no task 'nothing'"),
    (["train", "record", "--out", LONG], "File name too long"),
    (["train", "record", "--out", "mine", "--overwrite"], "but no run"),
    (["train", "imitate", "--from", "wise"], "no controller 'wise'"),
    (["train", "imitate", "--task", "nothing"], "no task 'nothing'"),
    (["train", "imitate", "--from", "policy-deep"], "lstm_layers"),
    (["train", "offline", "--episodes", "nowhere"], "holds no recorded episodes"),
    (["train", "offline", "--episodes", LONG], "File name too long"),
    (["train", "offline", "--episodes", "words", "--expectile", "2"], "expectile"),
    (["train", "offline", "--episodes", "words", "--beta", "-1"], "beta"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), SENTENCES)
def test_bad_input_is_one_sentence(
    words: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = check_refused(words, folder, monkeypatch, capsys)
    assert said.startswith("esper: ")
    assert len(said.strip().splitlines()) == 1
    assert message in said
    assert len(said) < 700


USAGE = [
    ["sprout"], ["grow", "digits"], ["grow", "--nonsense"], ["grow", "--task"], ["compare"],
    ["query"], ["query", "words"], ["query", "words", "select 1", "--limit", "0"],
    ["query", "words", "select 1", "--limit", "many"],
    ["query", "words", "select 1", "--timeout", "nan"], ["data"], ["data", "put"], ["data", "get"],
    ["serve", ".", "--port", "99999"], ["serve", ".", "--port", "-1"],
    ["train"], ["train", "sarsa"], ["train", "offline"], ["grow", "--compare", "3"], ["--nonsense"],
]  # fmt: skip


@pytest.mark.parametrize("words", USAGE)
def test_bad_usage_is_exit_code_two(
    words: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_refused(words, folder, monkeypatch, capsys)


# The last one is a number like any other where fractions are.
MALFORMED = ["", "many", "nan", "-" + "9" * 40, "9" * 40]


def malformed_numbers() -> Iterator[tuple[str, str, str]]:
    """For every flag of every command that takes a number: what is none, or none that can be."""
    commands: dict[str, Any] = {
        "grow": GrowSettings,
        "evaluate": EvaluateSettings,
        "train record": RecordSettings,
        "train imitate": ImitateSettings,
        "train offline --episodes nowhere": OfflineSettings,
        "train ppo": PPOSettings,
    }
    for command, kind in commands.items():
        hints = get_type_hints(kind)
        for item in fields(kind):
            flag = f"--{item.name.replace('_', '-')}"
            if hints[item.name] in (int, int | None):
                yield from ((command, flag, value) for value in MALFORMED)
            if hints[item.name] in (float, float | None):
                yield from ((command, flag, value) for value in MALFORMED[:-1])


@pytest.mark.parametrize(("command", "flag", "value"), list(malformed_numbers()))
def test_no_flag_takes_a_malformed_number(
    command: str,
    flag: str,
    value: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_refused([*command.split(), flag, value], folder, monkeypatch, capsys)


def test_there_are_enough_of_them() -> None:
    assert len(SENTENCES) + len(USAGE) + len(list(malformed_numbers())) >= 200


# --- files and texts that nobody has thought of ----------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@FAST
@given(name=st.sampled_from([f.name for f in fields(TrainingConfig)]), value=values)
def test_any_value_of_a_setting_is_taken_or_refused(name: str, value: Any) -> None:
    with suppress(ConfigError):
        load_config(None, {name: value})


@FAST
@given(text=st.text(max_size=60) | st.text("=[]\"'.#\n abc123", max_size=60))
def test_any_config_file_is_read_or_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "any.toml").write_text(text, encoding="utf-8", errors="replace")
    with suppress(ConfigError):
        load_config(tmp_path / "any.toml")


rows = st.dictionaries(st.sampled_from(sorted(outcome())), values) | values


@FAST
@given(found=st.lists(rows, max_size=4), summary=values)
def test_any_record_is_compared_or_refused(found: list[Any], summary: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    (run / "outcomes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    (run / "summary.json").write_text(json.dumps(summary))
    with suppress(ConfigError):
        compare_runs([run])


@FAST
@given(sql=st.text(max_size=40) | st.text("select *,from outcomes()'1;-", max_size=40))
def test_any_text_is_answered_or_refused(sql: str, folder: Path) -> None:
    with suppress(ConfigError):
        query(folder / "summary-number", sql, limit=3, timeout=5)


@FAST
@given(text=st.text(max_size=60) | st.text("123 \n#auoWAITGERMNFOSL", max_size=60))
def test_any_script_is_read_or_refused(text: str) -> None:
    with suppress(ConfigError):
        parse_script(text, "plan.txt")


@settings(FAST, max_examples=15)
@given(
    path=st.sampled_from(
        [
            ("round",), ("space",), ("space", "num_slots"), ("space", "blueprints"), ("settings",),
            ("agent", "ppo"), ("agent", "network"), ("agent", "network", "lstm_layers"),
            ("agent", "update_count"), ("observations",), ("rewards",), ("detector",), ("files",),
        ]
    ),
    value=values,
)  # fmt: skip
def test_any_policy_file_is_loaded_or_refused(
    path: tuple[str, ...], value: Any, tmp_path: Path
) -> None:
    run = tmp_path / "policy"
    shutil.rmtree(run, ignore_errors=True)
    write_policy(run, POLICY, path, value)
    with suppress(EsperError):
        load_policy(run)


POLICY = new_state(TrainingConfig(), space_of(find_task("digits")))
