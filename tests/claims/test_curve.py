"""benchmarks/claims/curve.py: points of a run in order, reference arms on the same hosts, and
training that goes on only as far as needed."""

import json
from pathlib import Path

import pytest

import curve
from esper.simic.training.config import load_config

KINDS = ["conv_light", "branch", "widen_double"]
SETTINGS = {"family": "digits:trained", "split": "validation", "kinds": KINDS}


def row(arm, key, val):
    return {"arm": arm, "key": key, "val": val, "settings": SETTINGS}


def test_points_of_a_run_are_in_the_order_of_its_episodes():
    trials = {(arm, 1): {} for arm in ("a@1024", "a@256", "b@512", "a@2048")}
    assert curve.along(trials, "a") == [(256, "a@256"), (1024, "a@1024"), (2048, "a@2048")]


def test_reference_arms_have_the_same_hosts_only(tmp_path: Path):
    rows = [row(rule, key, 90.0) for rule in curve.RULES for key in (1, 2)]
    # Key 3 was not played by the policies: with it the second candidate would be the best for all.
    rows += [row("branch@0", key, val) for key, val in ((1, 92.0), (2, 94.0), (3, 0.0))]
    rows += [row("branch@1", key, val) for key, val in ((1, 95.0), (2, 90.0), (3, 99.0))]
    name = "policy-digits-trained-validation.jsonl"
    (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = curve.reference_arms("digits:trained", {1, 2}, tmp_path)
    assert {key for _, key in found} == {1, 2}
    assert [found[curve.FIXED, key]["val"] for key in (1, 2)] == [92.0, 94.0]
    assert [found[curve.BEST, key]["val"] for key in (1, 2)] == [95.0, 94.0]
    assert found["static", 1]["val"] == 90.0


def test_a_run_is_trained_as_far_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is there is not trained again."""
    calls = []
    monkeypatch.setattr(curve, "is_run", lambda run: bool(calls))
    monkeypatch.setattr(curve, "train_ppo", lambda config, run: calls.append(config.rounds))
    monkeypatch.setattr(curve, "resume_ppo", lambda run, rounds: calls.append(rounds))
    monkeypatch.setattr(
        curve, "export_policy", lambda run, name, out: (out / name).mkdir(parents=True)
    )
    config = load_config(flags={"rounds": 2})
    for rounds in (2, 4, 2, 4):
        found = curve.policy_at(rounds, config, tmp_path)
        assert found == tmp_path / "policies" / f"round-{rounds}"
    assert calls == [2, 4]
