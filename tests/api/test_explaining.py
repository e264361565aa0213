"""One recorded decision of a run, and bad questions."""

import json
from pathlib import Path

import pytest
import torch

import esper
from command_support import esper_here
from esper.api import explain, find_controller
from esper.leyline import ConfigError, History
from esper.leyline.events import Decided
from esper.leyline.growth_settings import GrowthSettings
from esper.observatory.explain import explanation_in_words
from esper.proof import EvaluationSettings, evaluate
from esper.simic.training.policy_controller import LearnedController
from esper.tolaria.engine.run import make_env, play
from training_support import rows, tiny_run, tiny_task
from view_support import write_evaluation_folder, write_growth


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explained") / "run"
    tiny_run(folder, rounds=2)
    return folder


@pytest.fixture(scope="module")
def grown(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the user's own, grown by the policy, with a record."""
    task = tiny_task()
    data = task.load(None)
    loaders = [
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32)
        for x, y in ((data.train_x, data.train_y), (data.val_x, data.val_y))
    ]
    out = tmp_path_factory.mktemp("explained") / "grown"
    policy = esper.load_policy(trained, deterministic=False)
    policy.task = "CNNHost"  # so that it does not warn
    esper.grow(task.build(), *loaders, slots=task.slots, controller=policy, steps=6, out=out)
    return out


def test_a_growth_run_has_recorded_its_decisions(grown: Path) -> None:
    steps = {row["step"]: row for row in rows(grown / "metrics.jsonl")}
    for step in range(1, 6):
        told = explain(grown, step=step)
        assert told["action"]["op"] == steps[step]["op"]
        assert told["result"]["change"] == pytest.approx(
            steps[step]["val_score"] - steps[step - 1]["val_score"]
        )
        choices = told["policy"]["heads"]["op"]
        legal = [c["probability"] for c in choices if c["forbidden"] is None]
        assert sum(legal) == pytest.approx(1.0, abs=1e-3)
        assert told["action"]["op"] in explanation_in_words(told)


def test_the_fate_of_a_seed_is_told(grown: Path) -> None:
    germinated = next(r for r in rows(grown / "metrics.jsonl") if r["op"] == "GERMINATE")
    told = explain(grown, step=germinated["step"])
    assert told["result"]["seed"]
    assert any("planted" in words for words in told["result"]["events"])


def test_a_training_run_has_no_decisions_and_says_how_to_get_some(trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"esper grow --controller .*run\) and explain"):
        explain(trained, step=1)


def test_a_rule_has_no_probabilities_but_all_else_is_told(tmp_path: Path) -> None:
    run = write_growth(tmp_path / "run")
    told = explain(run, step=2)
    assert told["policy"] is None
    assert told["situation"]["val_score"] == 51.0
    words = explanation_in_words(told)
    assert "conv_light in blocks.0 planted" in words
    assert "it is a rule" in words


def test_an_evaluation_has_recorded_those_of_learned_policies(
    trained: Path, tmp_path: Path
) -> None:
    task, policy = tiny_task(), str(trained)
    settings = EvaluationSettings(("static", policy), keys=2, steps=4, controls=False)
    data = task.load(None)
    evaluate(task, data, settings, find_controller, folder=tmp_path)
    for key in (0, 1):
        told = explain(tmp_path, arm=policy, key=key, step=2)
        alone = History()
        rules = GrowthSettings(4, schedule=task.schedule)
        play(make_env(task.recipe(data), [key], rules, alone), find_controller(policy))
        expected = next(e for e in alone.events if isinstance(e, Decided) and e.step == 2)
        assert told["action"]["op"] == expected.taken[0]
        assert told["policy"]["value"] == pytest.approx(expected.value, abs=2e-3)
        assert told["result"]["final_score"] is not None
    for where in ({}, {"arm": "static", "key": 0}, {"arm": policy, "key": 7}):
        with pytest.raises(ConfigError, match=r"--arm \(.*run\) and a key from 0 to 1"):
            explain(tmp_path, step=2, **where)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"step": 99}, "no decision before step 99; choose a step from 1 to 12"),
        ({"step": 0}, "no decision before step 0"),
        ({"step": 1, "env": 3}, "has no environment 3"),
        ({"step": -1}, "step must be a whole number"),
    ],
)
def test_a_bad_question_gets_one_sentence(
    tmp_path: Path, where: dict[str, int], message: str
) -> None:
    run = write_growth(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        explain(run, **where)


def test_a_bad_folder_gets_one_sentence(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        explain(tmp_path, step=1)
    with pytest.raises(ConfigError, match="an evaluation without learned policies"):
        explain(write_evaluation_folder(tmp_path / "evaluation"), step=1)
    rubbish = '{"label": "a", "key": 1, "metrics": 3}\n{"label": "a", "key": 1, "metrics": {}}\n'
    (tmp_path / "evaluation" / "decisions.jsonl").write_text(rubbish)
    with pytest.raises(ConfigError, match=r"--arm \(a\) and a key from 1 to 1"):
        explain(tmp_path / "evaluation", step=1, arm="a", key=1)
    with pytest.raises(ConfigError, match="is not an evaluation; leave out --arm and --key"):
        explain(trained, step=1, arm="a", key=1)


def test_the_command_says_it_and_as_json(
    grown: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert esper_here(monkeypatch, "explain", str(grown), "--step", "2", cwd=tmp_path) == 0
    assert "the decision before epoch 2" in capsys.readouterr().out
    words = ("explain", str(grown), "--step", "2", "--json")
    assert esper_here(monkeypatch, *words, cwd=tmp_path) == 0
    assert json.loads(capsys.readouterr().out) == explain(grown, step=2)
    assert esper_here(monkeypatch, "explain", str(grown), "--step", "88", cwd=tmp_path) == 2
    said = capsys.readouterr().err
    assert said.startswith("esper: ")
    assert said.count("\n") == 1


def test_a_learned_controller_gives_reasons() -> None:
    from esper.tamiyo.controllers.simple import StaticController
    from esper.tamiyo.situation import GivesReasons

    assert issubclass(LearnedController, GivesReasons)
    assert not isinstance(StaticController(), GivesReasons)
