"""`esper tune`, with the real Optuna: what it tries, gives up and remembers."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from command_support import esper_here
from esper.leyline import ConfigError, PackageMissingError
from esper.observatory import METRICS, RunDirectory, best_trial, find_runs, read_trials
from esper.simic.training import load_config
from esper.tamiyo import HeuristicConfig, make_controller
from esper.tuning import Hearing, Plan, make_subject, resume, tune
from esper.tuning.space import Numbers, Words, searched
from esper.tuning.study import search
from esper.tuning.subjects import Report, Tried

pytestmark = pytest.mark.heavy
TINY = Plan(trials=2, keys=1, steps=1, settings=("blend", "min_epochs_before_germinate"))


@dataclass(frozen=True)
class Hill:
    """A known optimum, x = 3 and up, that shows from the first report on."""

    reports: int = 4

    @property
    def space(self) -> Sequence[Any]:
        return (Numbers("x", 0.0, 10.0), Numbers("whole", 1, 3), Words("way", ("up", "down")))

    @property
    def start(self) -> Mapping[str, Any]:
        return {"x": 8.0, "whole": 2, "way": "down"}

    def settings(self, chosen: Mapping[str, Any]) -> Mapping[str, Any]:
        return chosen

    def play(self, chosen: Mapping[str, Any], report: Report) -> Tried:
        score = -((chosen["x"] - 3.0) ** 2) - (chosen["way"] == "down")
        for number in range(self.reports):
            if report(number, score + number):
                return Tried(None, 1.0, 1.0)
        return Tried(score + self.reports, 1.0, 1.0)


def climb(out: Path, trials: int = 40, key: int = 0, subject: Any = None, **how: Any) -> list[Any]:
    subject = subject or Hill()
    with RunDirectory.create(out, {"command": "tune"}) as record:
        return search(
            subject,
            searched(subject.space, (), subject.start),
            record,
            [],
            trials=trials,
            key=key,
            **{"prune": True, "hearing": Hearing(), **how},
        )


def test_it_finds_the_top_and_gives_up_what_is_worse(tmp_path: Path) -> None:
    rows = climb(tmp_path / "run")
    top = best_trial(rows)
    assert abs(top["x"] - 3.0) < 1.0
    assert top["way"] == "up"
    assert tomllib.loads((tmp_path / "run" / "best.toml").read_text()) == {
        name: top[name] for name in ("x", "whole", "way")
    }
    assert {k: rows[0][k] for k in Hill().start} == Hill().start
    pruned = [row for row in rows if row["state"] == "pruned"]
    assert pruned
    # Half of a trial is always played, and what was given up never wins.
    assert all(2 < len(row["scores"]) < 4 for row in pruned)
    assert all(row["val_score"] == row["scores"][-1] for row in pruned)
    assert all(len(row["scores"]) == 4 for row in rows if row["state"] == "complete")


def test_without_pruning_every_trial_is_complete(tmp_path: Path) -> None:
    rows = climb(tmp_path / "run", prune=False)
    assert {row["state"] for row in rows} == {"complete"}


def test_the_same_key_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    for name, key in (("first", 0), ("again", 0), ("other", 1)):
        climb(tmp_path / name, trials=14, key=key)
    first, again, other = (
        (tmp_path / name / METRICS).read_bytes() for name in ("first", "again", "other")
    )
    assert first == again != other


def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    subject = Hill()
    whole = climb(tmp_path / "whole", trials=30)
    with RunDirectory.create(tmp_path / "parts", {}) as record:
        rows: list[Any] = []
        for trials in (1, 12, 13, 30):  # A study is made of the rows each time.
            rows = search(
                subject,
                searched(subject.space, (), subject.start),
                record,
                rows,
                trials=trials,
                key=0,
                prune=True,
                hearing=Hearing(),
            )
    assert rows == whole
    assert "pruned" in {row["state"] for row in rows[:13]}


def test_a_trial_that_nobody_could_measure_has_failed_and_does_not_win(tmp_path: Path) -> None:
    class Unmeasured(Hill):
        def play(self, chosen: Mapping[str, Any], report: Report) -> Tried:
            return Tried(None, None, None)

    rows = climb(tmp_path / "run", trials=3, subject=Unmeasured())
    assert [row["state"] for row in rows] == ["failed"] * 3
    assert best_trial(rows) is None
    assert not (tmp_path / "run" / "best.toml").exists()


def test_a_killed_search_of_the_heuristic_ends_with_the_same_rows(tmp_path: Path) -> None:
    tune(TINY, tmp_path / "whole")
    tune(replace(TINY, trials=1), tmp_path / "killed")
    rows = tmp_path / "killed" / METRICS
    rows.write_bytes(rows.read_bytes() + b'{"round": 1, "kind": "tri')
    (tmp_path / "killed" / "best.toml").unlink()
    resume(tmp_path / "killed", trials=2)
    for name in (METRICS, "best.toml", "base.toml", "config.toml"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    (line,) = find_runs(tmp_path / "killed")
    assert (line.kind, line.state, line.done, line.total) == ("tuning", "finished", 2, 2)
    assert line.val_score == best_trial(read_trials(tmp_path / "whole"))["val_score"]


def test_the_test_part_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subject = make_subject(TINY, HeuristicConfig(), tmp_path)
    chosen = {"blend": "linear", "min_epochs_before_germinate": 5}
    before = subject.play(chosen, lambda number, score: False)
    import esper.tuning.plan as plan

    whole = plan.find_task("digits")

    def spoilt(root: Path) -> Any:
        data = whole.load(root)
        return replace(data, test_x=data.test_x * float("nan"))

    monkeypatch.setattr(plan, "find_task", lambda name: replace(whole, load=spoilt))
    again = make_subject(TINY, HeuristicConfig(), tmp_path)
    assert again.play(chosen, lambda number, score: False) == before


def test_settings_of_the_heuristic_go_to_a_file_and_come_back(tmp_path: Path) -> None:
    subject = make_subject(TINY, HeuristicConfig(), tmp_path)
    chosen = {
        name: value
        for name, value in subject.start.items()
        if name in {setting.name for setting in subject.space}
    }
    assert subject.settings(chosen) == subject.settings({})
    chosen |= {"first_blueprint": "norm", "plateau_epochs_to_germinate": 4, "blend": "gated"}
    with RunDirectory.create(tmp_path / "run", subject.settings(chosen)) as record:
        file = record.path / "config.toml"
    config = HeuristicConfig.load(file)
    assert config.blueprint_rotation[:3] == ("norm", "depthwise", "widen_double")
    assert sorted(config.blueprint_rotation) == sorted(HeuristicConfig().blueprint_rotation)
    assert (config.plateau_epochs_to_germinate, config.blend) == (4, "gated")
    named = make_controller(f"heuristic:{file}")
    assert (named.name, named.config) == (f"heuristic:{file}", config)


def test_a_training_is_tuned_and_leaves_settings_to_train_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("tune", "--what", "ppo", "--settings", "ppo.learning_rate,ppo.epochs")
    short = ("--trials", "2", "--rounds", "2", "--envs", "2", "--steps", "1", "--out", "run")
    assert esper_here(monkeypatch, *words, *short, "--json", cwd=tmp_path) == 0
    told = json.loads(capsys.readouterr().out)
    rows = read_trials(tmp_path / "run")
    assert told["best"] == best_trial(rows)
    assert [len(row["scores"]) for row in rows] == [2, 2]
    assert rows[0]["ppo.learning_rate"] == load_config(None, {"task": "digits"}).ppo.learning_rate
    assert rows[1]["ppo.learning_rate"] != rows[0]["ppo.learning_rate"]
    best = load_config(tmp_path / told["settings"])
    assert (best.rounds, best.envs, best.steps) == (2, 2, 1)
    assert best.ppo.learning_rate == told["best"]["ppo.learning_rate"]
    assert best.ppo.epochs == told["best"]["ppo.epochs"]
    assert not (tmp_path / "run" / "trying").exists()
    assert esper_here(monkeypatch, "show", "run", cwd=tmp_path) == 0
    assert "ppo.learning_rate" in capsys.readouterr().out


def test_a_dry_run_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("tune", "--trials", "8", "--keys", "2", "--steps", "2", "--dry-run", "--json")
    assert esper_here(monkeypatch, *words, cwd=tmp_path) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["would"].startswith("try 8 settings of the heuristic on 2 hosts of digits")
    assert told["seconds"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--what", "nosuch"), "heuristic or ppo can be tuned, got 'nosuch'"),
        (("--settings", "blent"), "no setting 'blent' to search; there are min_epochs"),
        (("--rounds", "3"), "--rounds is of a training; give --what ppo as well"),
        (("--what", "ppo", "--keys", "3"), "keys is of the heuristic"),
        (("--task", "nosuch"), "no task 'nosuch'"),
        (("--config", "nosuch.toml"), "cannot read the config nosuch.toml"),
        (("--config", "wrong.toml"), "no setting bland; did you mean blend?"),
        (("--config", "list.toml"), "blueprint_rotation must be a list, each text, got 'norm'"),
        (("--resume", "nosuch"), "nosuch is not the folder of a search"),
        (("--resume", "grown"), "grown holds no search to go on with"),
        (("--resume", "grown", "--key", "3"), "leave out key"),
        (("--out", "grown"), "grown already holds a run"),
    ],
)
def test_bad_input_is_one_sentence(
    words: tuple[str, ...],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "wrong.toml").write_text('bland = "linear"\n')
    (tmp_path / "list.toml").write_text('blueprint_rotation = "norm"\n')
    RunDirectory.create(tmp_path / "grown", {"task": "digits"}).close()
    before = sorted(tmp_path.rglob("*"))
    assert esper_here(monkeypatch, "tune", *words, cwd=tmp_path) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_another_base_than_what_is_tuned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes a HeuristicConfig as its base"):
        tune(TINY, tmp_path / "run", load_config())


def test_without_optuna_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("esper.tuning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(PackageMissingError, match=r"pip install 'esper-grow\[tune\]'"):
        import esper.tuning  # noqa: F401
