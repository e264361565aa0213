"""Learning from comparison with episodes that began alike."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.leyline import OP, SLOT, ConfigError, LifecycleOp
from esper.simic.control.normalization import RunningMeanStd
from esper.simic.recordings.episodes import Episodes
from esper.simic.recordings.imitation import CloningConfig, EpisodeTensors, agreement
from esper.simic.recordings.offline import OfflineConfig, group_weights, learn_offline
from recorded import SPACE, play_analytic, random_player, small_network

CONFIG = OfflineConfig("group", beta=3.0, policy=CloningConfig(epochs=30, learning_rate=3e-3))


def bandit(hosts: int = 4, pulls: int = 12) -> Episodes:
    """Episodes of one step: host h pays 1 for a seed in slot h % 2 and nothing elsewhere; hosts
    differ far more in what they pay anyway."""
    drawn = play_analytic(random_player(0), hosts * pulls, key=0)
    one = {
        name: getattr(drawn, name)[:, :1]
        for name in ("op_masks", "slot_masks", "blueprint_masks", "blend_masks", "actions")
    }
    host = np.repeat(np.arange(hosts), pulls)
    seen = np.random.default_rng(0).normal(size=(hosts, SPACE.observation_dim))
    actions = one["actions"]
    actions[...], actions[:, 0, OP] = 0, LifecycleOp.GERMINATE
    actions[:, 0, SLOT] = np.arange(hosts * pulls) % 2
    paid = 50.0 * host + (actions[:, 0, SLOT] == host % 2)
    observations = np.stack([seen[host]] * 2, axis=1).astype(np.float32)
    lengths = np.ones(len(host), dtype=np.int64)
    return Episodes(SPACE, observations, **one, rewards=paid[:, None], lengths=lengths, hosts=host)


def test_the_weights_are_the_softmax_of_each_host() -> None:
    episodes = bandit(hosts=3, pulls=4)
    found, returns = (a.reshape(3, 4) for a in (group_weights(episodes, 2.0), episodes.returns))
    spread = (returns - returns.mean(axis=1, keepdims=True)).std()
    expected = torch.softmax(torch.from_numpy(2.0 * returns / spread), dim=1)
    assert found == pytest.approx(4 * expected.numpy())


def test_the_best_action_of_each_host_is_learnt_though_hosts_differ_more() -> None:
    episodes, network, scale = bandit(), small_network(), RunningMeanStd((SPACE.observation_dim,))
    report = learn_offline(network, scale, episodes, CONFIG)
    best = episodes.rows(np.flatnonzero(episodes.returns % 50 == 1))
    assert agreement(network, EpisodeTensors.of(best, scale)).overall == 1.0
    assert report.q_loss is None
    assert 0.3 < report.effective_share < 0.7, "half of the actions were good"


def test_an_episode_without_company_counts_for_nothing() -> None:
    episodes = bandit(hosts=2, pulls=4)
    alone = episodes.observations.copy()
    alone[0] += 1.0
    found = group_weights(replace(episodes, observations=alone), 1.0)
    assert found[0] == 0.0
    assert (found[1:] > 0.0).all()
    with pytest.raises(ConfigError, match="no two of these episodes"):
        group_weights(episodes.rows(np.array([0, 4])), 1.0)
