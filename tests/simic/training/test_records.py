"""What a training run writes down: every episode, every reward, and enough to play it again."""

import json
from collections import defaultdict
from dataclasses import fields, replace

import numpy as np
import pytest

from esper.api.training import train_ppo
from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import EpisodeOutcome, History
from esper.leyline import constants as c
from esper.observatory.run_directory import episode_script
from esper.observatory.summaries import AVERAGED
from esper.observatory.terminal import round_line
from esper.simic.telemetry.profiler import resident_mb
from esper.simic.training.loop import Hooks
from esper.simic.training.round_log import PHASES
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tolaria.engine.run import GrowthEnv, play
from esper.tolaria.fused.population import FusedPopulation
from esper.tolaria.governor import Governor
from helpers import episode_settings
from training_support import rows, tiny_config, tiny_run, tiny_task


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records") / "run"
    tiny_run(folder)
    return folder


def test_there_is_one_outcome_per_episode_and_one_row_per_step_and_round(run):
    config = tiny_config()
    outcomes = rows(run / "outcomes.jsonl")
    assert [(o["round"], o["env"]) for o in outcomes] == [
        (round_, env) for round_ in range(config.rounds) for env in range(config.envs)
    ]
    metrics = rows(run / "metrics.jsonl")
    steps = [(r["round"], r["step"], r["env"]) for r in metrics if r["kind"] == "step"]
    assert steps == sorted(steps)
    assert len(steps) == len(set(steps)) == config.rounds * config.envs * (tiny_task().steps + 1)
    assert [r["round"] for r in metrics if r["kind"] == "round"] == list(range(config.rounds))


def test_components_add_up_to_rewards_and_rewards_to_returns(run):
    returns = defaultdict(float)
    for row in rows(run / "metrics.jsonl"):
        if row["kind"] == "step" and row["step"] > 0:
            parts = [value for name, value in row.items() if name.startswith("reward.")]
            assert len(parts) >= 4
            assert row["reward"] == pytest.approx(sum(parts), abs=1e-12)
            returns[row["round"], row["env"]] += sum(parts)
    for outcome in rows(run / "outcomes.jsonl"):
        total = returns[outcome["round"], outcome["env"]]
        assert outcome["total_reward"] == pytest.approx(total, abs=1e-12)
    of_first_round = [total for (round_, _), total in returns.items() if round_ == 0]
    first = next(r for r in rows(run / "metrics.jsonl") if r["kind"] == "round")
    assert first["return"] == pytest.approx(np.mean(of_first_round), abs=1e-12)


def test_the_objective_is_the_gain_in_score_minus_costs(run):
    """The return can be told from the first and the last row of an episode."""
    for outcome in rows(run / "outcomes.jsonl"):
        own = [
            r
            for r in rows(run / "metrics.jsonl")
            if (r["round"], r.get("env")) == (outcome["round"], outcome["env"])
        ]
        gained = (own[-1]["val_score"] - own[0]["val_score"]) / 100
        costs = sum(r["reward.params"] + r["reward.compute"] for r in own[1:])
        assert outcome["total_reward"] == pytest.approx(gained + costs, abs=1e-9)


@pytest.mark.parametrize("env", [0, 3])
def test_a_script_of_the_recorded_actions_gives_the_same_scores(run, env):
    outcome = next(o for o in rows(run / "outcomes.jsonl") if (o["round"], o["env"]) == (2, env))
    task, history = tiny_task(), History()
    again = GrowthEnv(
        FusedPopulation(task.recipe(task.load(None), default_catalogue()), [outcome["key"]]),
        episode_settings(task.steps, schedule=task.schedule),
        recorder=history,
    )
    play(again, ScriptedController(episode_script(run, 2, env), "recorded"))
    recorded = [r for r in rows(run / "metrics.jsonl") if (r["round"], r.get("env")) == (2, env)]
    assert any(r["op"] != "WAIT" for r in recorded)
    # The last row of a run is of what was left when its episode was settled.
    for column, last in {
        "val_score": -1,
        "val_loss": -1,
        "params": -1,
        "op": None,
        "train_loss": None,
    }.items():
        replayed = json.dumps([row[column] for row in history.rows[:last]])
        assert replayed == json.dumps([r[column] for r in recorded[:last]]), column


def test_a_rollback_ends_the_episode_with_an_outcome_and_an_event(tmp_path, monkeypatch):
    check = Governor.check

    def panics(self, *arguments):
        verdict = check(self, *arguments)
        self.calls = getattr(self, "calls", -1) + 1
        if self.calls == 3:
            verdict.panic[1] = verdict.rollback[1] = True
        return verdict

    monkeypatch.setattr(Governor, "check", panics)
    tiny_run(tmp_path / "run", rounds=1)
    outcomes = rows(tmp_path / "run" / "outcomes.jsonl")
    assert sorted(o["env"] for o in outcomes) == [0, 1, 2, 3]
    broken = next(o for o in outcomes if o["env"] == 1)
    assert (broken["ended"], broken["steps"], broken["rollbacks"]) == ("rollback", 3, 1)
    own = [r for r in rows(tmp_path / "run" / "metrics.jsonl") if r.get("env") == 1]
    assert own[-1]["reward.rollback"] == -1.0
    assert broken["total_reward"] == pytest.approx(sum(r["reward"] for r in own[1:]))
    events = rows(tmp_path / "run" / "events.jsonl")
    assert [e["env"] for e in events if e["event"] == "GovernorRollback"] == [1]
    (row,) = [r for r in rows(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "round"]
    assert row["steps"] == 3 * 8 + 3
    assert row["rollbacks"] == 1


def infinite_loss(output, target):
    return (output.sum() + target.sum()) * float("inf")


def test_hosts_that_break_at_once_still_have_their_outcomes(tmp_path):
    task = replace(tiny_task(), loss=infinite_loss)
    train_ppo(tiny_config(rounds=1), tmp_path / "run", task=task)
    outcomes = rows(tmp_path / "run" / "outcomes.jsonl")
    assert [(o["env"], o["ended"]) for o in outcomes] == [(e, "rollback") for e in range(4)]
    (row,) = [r for r in rows(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "round"]
    assert row["steps"] == 4


def test_seconds_are_kept_apart_and_have_the_names_of_the_phases(run):
    timings = rows(run / "timings.jsonl")
    assert [t["round"] for t in timings] == [0, 1, 2]
    for timing in timings:
        phases = {k.removeprefix("seconds.") for k in timing if k.startswith("seconds.")}
        assert phases == set(PHASES)
        assert sum(timing[f"seconds.{name}"] for name in PHASES) <= timing["seconds"]
        assert (timing["memory_mb"] is None) == (resident_mb() is None)
        assert timing["memory_mb"] is None or timing["memory_mb"] > 1
    for name in ("metrics", "outcomes", "events"):
        text = (run / f"{name}.jsonl").read_text()
        assert "second" not in text
        assert "memory" not in text


def test_the_memory_of_the_policy_is_watched(run, tmp_path, monkeypatch):
    healthy = [r for r in rows(run / "metrics.jsonl") if r["kind"] == "round"]
    for row in healthy:
        assert 0 < row["lstm_h_max"] <= row["lstm_h_norm"] < 4  # the root of its 16 units
        assert 0 < row["lstm_c_max"] <= row["lstm_c_norm"]
        assert row["lstm_unhealthy_envs"] == 0
    # The same run is unhealthy by another measure, and is otherwise the same.
    monkeypatch.setattr(c, "LSTM_MAX_NORM", 1e-3)
    tiny_run(tmp_path / "run")
    found = [r for r in rows(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "round"]
    assert [r["lstm_unhealthy_envs"] for r in found] == [4, 4, 4]
    assert ["lstm_unhealthy" in (r["anomalies"] or "") for r in found] == [False, True, True]
    assert [r["lstm_c_norm"] for r in found] == [r["lstm_c_norm"] for r in healthy]
    events = rows(tmp_path / "run" / "events.jsonl")
    told = [e["round"] for e in events if e.get("anomaly") == "lstm_unhealthy"]
    assert told == [1]


def test_anomalies_reach_the_record_and_raise_the_level_of_telemetry(tmp_path):
    flags = {"ppo.learning_rate": 0.3, "ppo.target_kl": 100.0}
    tiny_run(tmp_path / "run", rounds=4, **flags)
    events = rows(tmp_path / "run" / "events.jsonl")
    found = [e for e in events if e["event"] == "AnomalyDetected"]
    assert found
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    levels = [r["telemetry_level"] for r in metrics if r["kind"] == "round"]
    layers = {r["round"] for r in metrics if r["kind"] == "layer"}
    first = found[0]["round"]
    assert levels[first] == "DEBUG"
    # What an anomaly changes begins with the round after it.
    detailed = {r for r in range(1, 4) if levels[r - 1] == "DEBUG"}
    assert detailed
    assert layers == {r["round"] for r in metrics if r["kind"] == "ratios"} == detailed
    snapshots = {e["round"] for e in events if e["event"] == "GovernorSnapshot"}
    assert snapshots == detailed


class Strict(dict):
    """A row in which nothing is silently absent."""

    get = dict.__getitem__


def test_d26_views_read_only_what_training_writes(tmp_path):
    told = []
    hooks = Hooks(on_round=lambda number, row, timing: told.append((Strict(row), Strict(timing))))
    tiny_run(tmp_path / "run", rounds=1, hooks=hooks)
    ((row, timing),) = told
    assert "op 0." in round_line(row, timing, 0, 1, 0.0)
    read = {"task", "controller", "total_reward", *AVERAGED}
    assert read <= {field.name for field in fields(EpisodeOutcome)}
