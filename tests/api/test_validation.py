"""What a policy in training is worth on other hosts: asked now and then; the best one is kept."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.api.training import resume_ppo, train_ppo
from esper.leyline import ConfigError
from esper.proof.arms import validation_score
from esper.simic import analytic
from esper.simic.training.checkpoint import load_state
from esper.simic.training.loop import run_training
from esper.simic.training.policy_controller import LearnedController
from esper.simic.training.round_log import RoundLog
from esper.simic.training.state import BestPolicy
from esper.tamiyo.controllers.simple import StaticController
from esper.tolaria.data.catalogue import data_root
from training_support import (
    RunHistory,
    analytic_state,
    family_run,
    rows,
    same_run,
    tiny_config,
    tiny_family,
    tiny_task,
)


@pytest.fixture(scope="module", autouse=True)
def hosts_are_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_DATA", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, hosts_are_kept: None) -> Path:
    """A run that is validated after each of its rounds."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    family_run(run, rounds=3, validate_every=1)
    return run


class Told:
    """Scores in this order; remembers the rounds after which it was asked, and kept something."""

    def __init__(self, *scores: float) -> None:
        self.scores, self.asked, self.kept = list(scores), [], []

    def score(self, state) -> float:
        self.asked.append(state.round)
        return self.scores.pop(0)

    def keep(self, state) -> None:
        self.kept.append((state.round, state.best))


def test_it_is_asked_every_so_many_rounds_and_what_is_better_is_kept():
    config, state = analytic_state(rounds=7, validate_every=2)
    history, env, told = (
        RunHistory(),
        analytic.AnalyticGrowth(4, config.key),
        Told(50.0, 61.0, 61.0),
    )
    run_training(config, state, env, analytic.HORIZON, RoundLog(history), validation=told)
    assert told.asked == [2, 4, 6]
    assert told.kept == [(2, BestPolicy(2, 50.0)), (4, BestPolicy(4, 61.0))]
    assert state.best == BestPolicy(4, 61.0)
    column = [row["validation_hosts_score"] for row in history.of("round")]
    assert column == [None, 50.0, None, 61.0, None, 61.0, None]


def test_the_folder_has_the_policy_of_that_round(tmp_path, whole):
    asked = [row for row in rows(whole / "metrics.jsonl") if row["kind"] == "round"]
    scores = [row["validation_hosts_score"] for row in asked]
    found, best = load_state(whole).best, whole / "best"
    assert found == BestPolicy(1 + scores.index(max(scores)), max(scores))
    assert f"validation hosts of digits:tiny: {max(scores):.2f}" in (best / "card.toml").read_text()
    then = family_run(tmp_path / "then", rounds=found.round)
    for (name, kept), now in zip(
        load_state(best).agent.network.state_dict().items(),
        then.agent.network.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(kept, now), name
    family = tiny_family()
    data = family.task.load(Path())
    again = validation_score(family, LearnedController.load(best), data, data_root())
    assert again == found.score


def test_a_run_that_is_resumed_keeps_the_same(tmp_path, whole):
    """Also if it was killed while it wrote the best one, before the checkpoint of that round."""
    parts = tmp_path / "parts"
    family_run(parts, rounds=1, validate_every=1)
    (parts / "unfinished-best").mkdir()
    resume_ppo(parts, rounds=3, family=tiny_family())
    same_run(whole, parts)
    files = [sorted((run / "best").iterdir()) for run in (whole, parts)]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_the_best_one_goes_with_the_run_that_it_is_of(tmp_path, whole):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    train_ppo(tiny_config(rounds=1), run, task=tiny_task(), overwrite=True)
    assert not (run / "best").exists()


def test_test_data_are_not_looked_at():
    family = tiny_family()
    data = family.task.load(Path())
    blind = replace(data, test_x=torch.full_like(data.test_x, torch.nan))
    scores = [
        validation_score(family, StaticController(), each, data_root()) for each in (data, blind)
    ]
    assert scores[0] == scores[1] > 0


def test_only_a_family_has_validation_hosts(tmp_path):
    with pytest.raises(ConfigError, match="validate_every needs a family"):
        train_ppo(tiny_config(validate_every=2), tmp_path / "run", task=tiny_task())
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="validate_every must be from 1"):
        tiny_config(validate_every=0)
