"""Behaviour cloning: it learns what it is shown, and says truly how well."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from esper.leyline import HEAD_NAMES, OP, SLOT, ConfigError, LifecycleOp
from esper.simic.agent.network import FactoredRecurrentActorCritic
from esper.simic.control.normalization import RunningMeanStd
from esper.simic.recordings.episodes import Episodes
from esper.simic.recordings.imitation import (
    CloningConfig,
    CloningReport,
    EpisodeTensors,
    agreement,
    clone,
    split,
    weighted_nll,
)
from recorded import SPACE, best_player, learner, play_analytic, random_player, small_network

QUICK = CloningConfig(epochs=25, minibatch=16, learning_rate=2e-3)


def new_scale() -> RunningMeanStd:
    return RunningMeanStd((SPACE.observation_dim,))


@cache
def taught() -> tuple[FactoredRecurrentActorCritic, RunningMeanStd, CloningReport]:
    network, scale = small_network(), new_scale()
    episodes = play_analytic(best_player(), 160, key=0)
    return network, scale, clone(network, scale, episodes, QUICK)


def test_a_clone_of_the_best_agrees_and_earns_as_much() -> None:
    network, scale, report = taught()
    assert report.held_out.overall > 0.97
    assert report.held_out.acting is not None
    assert report.held_out.acting > 0.95
    assert report.held_out.always_wait < 0.9, "waiting would do; the test shows nothing"
    teacher = play_analytic(best_player(), 200, key=7).returns.mean()
    pupil = play_analytic(learner(network, scale), 200, key=7).returns.mean()
    assert pupil > 0.95 * teacher > 2.0


def test_what_is_reported_is_what_is_kept() -> None:
    network, scale, report = taught()
    _, held_out = split(play_analytic(best_player(), 160, key=0), QUICK.held_out, 0)
    exam = EpisodeTensors.of(held_out, scale)
    assert report.loss < 0.2 * report.first_loss
    assert weighted_nll(network, exam).item() == pytest.approx(report.loss, rel=1e-5)
    assert agreement(network, exam) == report.held_out


def test_noise_cannot_be_imitated_and_the_report_says_so() -> None:
    network = small_network()
    episodes = play_analytic(random_player(0), 40, key=0)
    report = clone(network, new_scale(), episodes, CloningConfig(epochs=5))
    assert report.held_out.overall < 0.6


def test_the_loss_is_the_cross_entropy_of_relevant_heads() -> None:
    """By hand: log of the share among legal choices for a policy that knows nothing yet."""
    network, scale = small_network(), new_scale()
    for head in HEAD_NAMES:
        torch.nn.init.zeros_(network.head(head)[2].weight)
    episodes = play_analytic(random_player(1), 6, key=0)
    choices = []
    for n, t in np.argwhere(episodes.valid).tolist():
        slot, _, _, op = episodes.actions[n, t].tolist()
        choices.append(episodes.op_masks[n, t].sum())
        if op != LifecycleOp.WAIT:
            choices.append(episodes.slot_masks[n, t, op].sum())
        if op == LifecycleOp.GERMINATE:
            choices.append(episodes.blueprint_masks[n, t, slot].sum())
            choices.append(episodes.blend_masks[n, t].sum())
    steps, lesson = episodes.valid.sum(), EpisodeTensors.of(episodes, scale)
    expected = np.log(choices).sum() / steps
    assert weighted_nll(network, lesson).item() == pytest.approx(expected)
    # Who knows nothing is as undecided as can be wherever there is a choice.
    undecided = sum(count > 1 for count in choices) / steps
    assert weighted_nll(network, lesson, entropy=0.3).item() == pytest.approx(
        expected - 0.3 * undecided
    )


def test_a_clone_that_is_to_keep_doubts_agrees_and_can_still_explore() -> None:
    episodes = play_analytic(best_player(), 160, key=0)
    sure, scale, _ = taught()
    doubting = small_network()
    report = clone(doubting, new_scale(), episodes, replace(QUICK, entropy=0.4))
    assert report.held_out.overall > 0.97
    lesson = EpisodeTensors.of(episodes, scale)
    hidden = doubting.get_initial_hidden(len(episodes))
    entropies = [
        network.evaluate_actions(lesson.observations, lesson.actions, lesson.masks, hidden)[1]
        for network in (sure, doubting)
    ]
    assert entropies[0].mean() < 0.02
    assert entropies[1].mean() > 5 * entropies[0].mean()


def _shortened(episodes: Episodes, length: int) -> Episodes:
    return replace(episodes, lengths=np.full(len(episodes), length))


def test_padding_does_not_count() -> None:
    network, scale = small_network(), new_scale()
    full = play_analytic(random_player(1), 5, key=0)
    cut = _shortened(full, 4)
    changed = _shortened(full, 4)
    changed.actions[:, 4:] = 0
    changed.observations[:, 5:] = 1e6
    losses = [weighted_nll(network, EpisodeTensors.of(e, scale)).item() for e in (cut, changed)]
    assert losses[0] == losses[1]
    assert agreement(network, EpisodeTensors.of(cut, scale)).steps == 20


def test_weights_choose_what_is_learnt() -> None:
    """Of two teachers in one recording, only the one with weight is imitated."""
    episodes = play_analytic(random_player(2), 40, key=0)
    weights = (episodes.actions[..., OP] == LifecycleOp.WAIT).astype(np.float32)
    network, scale = small_network(), new_scale()
    from esper.simic.recordings.imitation import fit

    lesson = EpisodeTensors.of(episodes, scale, weights)
    fit(network, lesson, CloningConfig(epochs=8, learning_rate=3e-3), 0, lambda epoch: None)
    hidden = network.get_initial_hidden(len(episodes))
    features, _ = network.encode(lesson.observations, hidden)
    chosen = network.decide(features, lesson.masks)[0]
    assert (chosen[..., OP] == LifecycleOp.WAIT).float().mean() > 0.99


def test_cloning_is_a_function_of_its_key() -> None:
    episodes = play_analytic(random_player(0), 8, key=0)
    found = [
        clone(small_network(), new_scale(), episodes, CloningConfig(epochs=2), key)
        for key in (0, 0, 1)
    ]
    assert found[0] == found[1] != found[2]


def test_held_out_episodes_are_never_learnt_from() -> None:
    episodes = play_analytic(random_player(0), 9, key=0)
    learn, held_out = split(episodes, 0.25, key=3)
    assert (len(learn), len(held_out)) == (7, 2)
    shared = {row.tobytes() for row in learn.actions} & {row.tobytes() for row in held_out.actions}
    assert not shared


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 0},
        {"learning_rate": 0.0},
        {"held_out": 1.0},
        {"minibatch": 0},
        {"entropy": -0.1},
        {"entropy": 1.5},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CloningConfig(**settings)


def test_the_smallest_settings_are_allowed() -> None:
    assert CloningConfig(epochs=1, minibatch=1, held_out=0.01, entropy=0.0).minibatch == 1


def test_one_host_is_not_enough() -> None:
    episodes = replace(play_analytic(random_player(0), 4, key=0), hosts=np.zeros(4, dtype=np.int64))
    with pytest.raises(ConfigError, match="at least 2 hosts"):
        clone(small_network(), new_scale(), episodes)


def test_episodes_of_one_host_are_held_out_together() -> None:
    """A rule repeats itself on a host, so a held-out copy would measure nothing."""
    hosts = np.repeat(np.arange(6), 4)
    episodes = replace(play_analytic(random_player(0), 24, key=0), hosts=hosts)
    seen = set()
    for key in range(8):
        learn, held_out = split(episodes, 0.25, key)
        assert not set(learn.hosts.tolist()) & set(held_out.hosts.tolist())
        assert (len(learn), len(held_out)) == (16, 8)
        seen |= set(held_out.hosts.tolist())
    assert len(seen) > 2, "the key chooses the hosts"


def test_held_out_episodes_are_not_in_the_statistics_of_observations() -> None:
    episodes = play_analytic(random_player(0), 8, key=0)
    _, held_out = split(episodes, QUICK.held_out, key=0)
    changed = replace(episodes, observations=episodes.observations.copy())
    changed.observations[np.isin(episodes.hosts, held_out.hosts)] += 100.0
    scales = [new_scale(), new_scale()]
    for each, scale in zip((episodes, changed), scales, strict=True):
        clone(small_network(), scale, each, CloningConfig(epochs=1))
    first, second = (scale.state_dict() for scale in scales)
    assert torch.equal(first["mean"], second["mean"])
    assert torch.equal(first["var"], second["var"])


def test_agreement_is_of_all_heads_that_matter() -> None:
    """The same op in another slot is a different action."""
    episodes = play_analytic(best_player(), 160, key=0)
    network, scale, _ = taught()
    lesson = EpisodeTensors.of(episodes, scale)
    hidden = network.get_initial_hidden(len(episodes))
    chosen = network.decide(network.encode(lesson.observations, hidden)[0], lesson.masks)[0]
    own = replace(lesson, actions=chosen)
    assert agreement(network, own).overall == 1.0
    moved = chosen.clone()
    moved[..., SLOT] = (moved[..., SLOT] + 1) % SPACE.num_slots
    assert agreement(network, replace(lesson, actions=moved)).acting == 0.0
    # A slot means nothing where the policy waits.
    waits = (chosen[..., OP] == LifecycleOp.WAIT)[lesson.weights > 0].float().mean().item()
    assert agreement(network, replace(lesson, actions=moved)).overall == pytest.approx(waits)
