import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import compare, finished, keys_with_all, means, print_comparisons, run_missing
from esper.leyline import ConfigError
from esper.proof.statistics import holm, paired_difference

SETTINGS = {"width": 4, "rates": (0.1, 0.2)}
ARMS = ("grown", "static", "wide")


def score(arm: str, key: int) -> dict[str, Any]:
    return {"score": {"grown": 3.0, "static": 1.0, "wide": 2.5}[arm] + (key * 7 % 5) / len(arm)}


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    path, calls = tmp_path / "new" / "trials.jsonl", []

    def run(arm: str, key: int) -> dict[str, Any]:
        calls.append((arm, key))
        if len(calls) == 5:
            raise KeyboardInterrupt
        return score(arm, key)

    with pytest.raises(KeyboardInterrupt):
        run_missing(path, SETTINGS, ARMS, range(3), run)
    assert list(finished(path, SETTINGS)) == calls[:4]
    # A kill in the middle of a line.
    path.write_text(path.read_text() + '{"arm": "static", "ke')
    again = run_missing(path, SETTINGS, ARMS, range(3), run)
    assert calls == [*calls[:4], ("static", 1), *[(arm, key) for key in (1, 2) for arm in ARMS][1:]]
    whole = run_missing(tmp_path / "whole.jsonl", SETTINGS, ARMS, range(3), score)
    assert list(again) == list(whole)
    assert [row["score"] for row in again.values()] == [row["score"] for row in whole.values()]
    assert finished(path, SETTINGS) == again
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 9


def test_trials_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    run_missing(path, SETTINGS, ARMS, [1], score)
    with pytest.raises(ConfigError, match=r"trials\.jsonl holds trials with other settings"):
        run_missing(path, {**SETTINGS, "width": 5}, ARMS, [1], score)
    assert finished(tmp_path / "absent.jsonl", SETTINGS) == {}


def test_comparisons_are_of_the_keys_that_all_arms_have(tmp_path: Path) -> None:
    trials = run_missing(tmp_path / "trials.jsonl", SETTINGS, ARMS, range(6), score)
    del trials["wide", 2]
    keys = [0, 1, 3, 4, 5]
    assert keys_with_all(trials, ARMS) == keys
    found = compare(trials, [("grown", "static"), ("grown", "wide")], "score")
    expected = [
        paired_difference(
            [score("grown", key)["score"] for key in keys],
            [score(other, key)["score"] for key in keys],
        )
        for other in ("static", "wide")
    ]
    assert [(row["n"], row["mean"], row["low"], row["high"]) for row in found] == [
        (5, each.mean, each.low, each.high) for each in expected
    ]
    assert [row["p_holm"] for row in found] == holm([each.p for each in expected])
    assert means(trials, ARMS, ["score"])["wide"] == {
        "n": 5,
        "score": pytest.approx(sum(score("wide", key)["score"] for key in keys) / 5),
    }
    assert compare({}, [("grown", "static")], "score") == []


def test_hosts_are_the_pairs_where_several_keys_share_one() -> None:
    """Four keys of each of three hosts: three pairs, not twelve."""
    drawn = np.random.default_rng(0)
    hosts = {key: key // 4 for key in range(12)}
    of_host = drawn.normal(1.0, 2.0, 3)
    grown = {key: of_host[host] + drawn.normal(0.0, 0.1) for key, host in hosts.items()}
    trials = {("grown", key): {"score": value} for key, value in grown.items()}
    trials |= {("static", key): {"score": 0.0} for key in grown}
    (found,) = compare(trials, [("grown", "static")], "score", hosts)
    means = [np.mean([grown[key] for key in grown if hosts[key] == host]) for host in range(3)]
    expected = paired_difference([float(mean) for mean in means], [0.0] * 3)
    assert (found["n"], found["mean"]) == (3, pytest.approx(expected.mean))
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
    assert found["p"] >= 0.25, "three pairs cannot show more"
    (by_key,) = compare(trials, [("grown", "static")], "score")
    assert by_key["n"] == 12


def test_a_table_of_few_pairs_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    trials = {(arm, key): score(arm, key) for arm in ARMS for key in range(10)}
    few = {place: row for place, row in trials.items() if place[1] < 3}
    print_comparisons(compare(few, [("grown", "static")], "score"))
    assert "smallest possible p-value is 0.25" in capsys.readouterr().out
    print_comparisons(compare(trials, [("grown", "static")], "score"))
    assert "smallest possible" not in capsys.readouterr().out
