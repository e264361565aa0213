"""Policies that see what candidates would bring: all are tried before the first decision."""

from functools import cache

import numpy as np
import pytest

from esper.leyline import ConfigError, EpisodeOutcome, EsperWarning, History, NullRecorder
from esper.leyline.events import CandidatesTried
from esper.simic.lessons import Episodes, record_episodes
from esper.simic.training import LearnedController, load_config, new_state
from esper.tamiyo import make_controller
from esper.tolaria import GrowthEnv, TrialRules, make_env, play
from helpers import small_digits

SETTINGS = {"steps": 2, "network.kind": "set", "envs": 2}


class Outcomes(NullRecorder):
    def __init__(self) -> None:
        self.outcomes: list[EpisodeOutcome] = []

    def outcome(self, outcome: EpisodeOutcome) -> None:
        self.outcomes.append(outcome)


@cache
def recorded(trials: bool) -> tuple[Episodes, Outcomes]:
    task, data = small_digits(96)
    log = Outcomes()
    config = load_config(None, {**SETTINGS, "trials": trials})
    static = make_controller("static")
    return record_episodes(config, task, data, static, episodes=2, recorder=log), log


def column(episodes: Episodes, entry: str) -> np.ndarray:
    """[N, T + 1, ...]: all columns of that name."""
    names = episodes.space.names([str(n) for n in range(episodes.space.num_slots)])
    return episodes.observations[..., [n for n, (_, name) in enumerate(names) if name == entry]]


def test_the_scores_are_seen_before_the_first_decision_and_paid_for() -> None:
    (seen, log), (blind, blind_log) = recorded(True), recorded(False)
    assert column(seen, "trials known")[:, :, 0].tolist() == [[1.0, 0.0, 0.0]] * 2
    assert np.array_equal(column(seen, "tried")[:, 0], column(seen, "allowed")[:, 0])
    assert column(seen, "gain")[:, 0].std() > 0
    assert not column(blind, "trials known").any()
    spent, blind_spent = (
        [outcome.train_macs for outcome in each.outcomes] for each in (log, blind_log)
    )
    assert all(more > less for more, less in zip(spent, blind_spent, strict=True))


def test_a_policy_that_has_learnt_with_trials_asks_for_them_once() -> None:
    task, data = small_digits(96)
    asked = {}
    for trials in (True, False):
        config = load_config(None, {**SETTINGS, "trials": trials})
        controller = LearnedController(new_state(config, recorded(trials)[0].space))
        told = History()
        play(make_env(task.recipe(data), [3], TrialRules(2), told), controller)
        asked[trials] = [e.step for e in told.events if isinstance(e, CandidatesTried)]
    assert asked == {True: [0], False: []}


def test_trials_that_no_budget_pays_for_are_not_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, data = small_digits(96)
    config = load_config(None, {**SETTINGS, "trials": True})
    monkeypatch.setattr(GrowthEnv, "_trials_paid", lambda env, *_: np.zeros(env.n_envs, dtype=bool))
    with pytest.warns(EsperWarning, match="does not pay for trials"):
        found = record_episodes(config, task, data, make_controller("static"), episodes=2)
    assert not column(found, "trials known").any()


def test_a_flat_network_sees_no_trials() -> None:
    with pytest.raises(ConfigError, match="a flat network does not see trials"):
        load_config(None, {"trials": True})
