"""Two rewards are compared by separate policies on the same keys."""

import json
from dataclasses import replace

import pytest

from command_support import esper_here
from esper.api import reward_comparison
from esper.api.reward_comparison import RewardComparison, compare_rewards
from esper.leyline import ConfigError
from esper.proof.statistics import paired_difference
from training_support import rows, tiny_config, tiny_task


def compared(one: list[float], two: list[float]) -> str:
    return RewardComparison(
        ("a", "b"), tuple(range(len(one))), (tuple(one), tuple(two)), paired_difference(one, two)
    ).verdict


def test_the_verdict_needs_enough_keys_and_a_difference():
    first, second = [80.0, 81.0, 79.5, 80.2, 80.9, 80.4], [78.0, 79.5, 78.5, 79.0, 78.8, 79.1]
    assert "too few keys" in compared(first[:5], second[:5])
    assert compared(first, second).startswith("a is better")
    assert compared(second, first).startswith("b is better")
    assert compared(first, [*second[:3], 90.0, 90.0, 90.0]).startswith("no difference")


def test_each_reward_has_policies_of_its_own_on_the_same_keys_and_hosts(tmp_path):
    first = tiny_config(rounds=1, envs=2, steps=2)
    second = replace(first, reward_mode="sparse")
    given = {"keys": (3, 4), "hosts": 2, "task": tiny_task()}
    found = compare_rewards(first, second, tmp_path / "ab", **given)
    for key in (3, 4):
        runs = [tmp_path / "ab" / f"{mode}-{key}" for mode in ("objective", "sparse")]
        outcomes = [rows(run / "outcomes.jsonl") for run in runs]
        assert {row["reward_mode"] for row in outcomes[0]} == {"objective"}
        assert {row["reward_mode"] for row in outcomes[1]} == {"sparse"}
        # The first round is played by the same weights on the same hosts.
        assert [row["val_score"] for row in outcomes[0]] == [
            row["val_score"] for row in outcomes[1]
        ]
    assert (found.rewards, found.difference.n) == (("objective", "sparse"), 2)
    saved = json.loads((tmp_path / "ab" / "comparison.json").read_text())
    assert saved["scores"] == [list(each) for each in found.scores]
    assert "too few keys" in saved["verdict"]
    with pytest.raises(ConfigError, match="resume"):
        compare_rewards(first, second, tmp_path / "ab", **given)
    again = compare_rewards(first, second, tmp_path / "ab", resume=True, **given)
    assert again == found
    other = [replace(each, rounds=2) for each in (first, second)]
    with pytest.raises(ConfigError, match="other settings"):
        compare_rewards(*other, tmp_path / "ab", resume=True, **given)


def test_configs_that_differ_in_more_than_the_reward_are_refused(tmp_path):
    first = tiny_config()
    for second, word in (
        (first, "both reward modes"),
        (replace(first, reward_mode="sparse", envs=8), "differ in envs"),
    ):
        with pytest.raises(ConfigError, match=word):
            compare_rewards(first, second, tmp_path / "ab", keys=(1, 2))
    with pytest.raises(ConfigError, match="different keys"):
        compare_rewards(first, replace(first, reward_mode="sparse"), tmp_path / "ab", keys=(1, 1))
    assert not (tmp_path / "ab").exists()


def test_the_command_prints_scores_and_a_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reward_comparison, "_trained", lambda config, *rest: config)
    monkeypatch.setattr(
        reward_comparison, "_score", lambda config, *rest: config.key + len(config.reward_mode)
    )
    (tmp_path / "out").mkdir()
    words = ["--rewards", "sparse,objective", "--out", "out", "--first-key", "5", "--json"]
    assert esper_here(monkeypatch, "train", "ab", *words, cwd=tmp_path) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["keys"] == [5, 6, 7, 8, 9, 10]
    assert found["scores"] == [[11, 12, 13, 14, 15, 16], [14, 15, 16, 17, 18, 19]]
    assert found["verdict"].startswith("objective is better")
    assert esper_here(monkeypatch, "train", "ab", "--rewards", "sparse", cwd=tmp_path) == 2
