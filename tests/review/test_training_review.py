"""Findings about tasks, the training loop and its records."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from esper.tolaria.scoring import score_on

from esper.api import resume_ppo
from esper.growth import default_catalogue
from esper.leyline import HEAD_NAMES, ConfigError, EpisodeOutcome, NullRecorder, SeedStage
from esper.leyline.events import RewardHackingSuspected
from esper.observatory.comparison import AVERAGED
from esper.observatory.training_progress import round_line
from esper.simic import analytic
from esper.simic.agent import PPOUpdateMetrics
from esper.simic.rewards import compute_reward
from esper.simic.training import shard as shard_module
from esper.simic.training.checkpoint import MANIFEST, STATE, TENSORS
from esper.simic.training.config import NetworkSizes, TrainingConfig
from esper.simic.training.loop import Hooks, Tally, diagnose, run_training
from esper.simic.training.shard import Shard, ShardSpec, space_of
from esper.simic.training.state import Space, new_state
from esper.tamiyo import wait
from esper.tolaria.batches import LoaderSource, TensorSource
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.population import LoopedPopulation
from esper.tolaria.tasks import all_tasks
from helpers import small_digits
from reward_support import Keeper, one_seed, transition
from training_support import tiny_config, tiny_run, tiny_task


@pytest.fixture
def shard():
    """One environment, the sixth of its run."""
    shard = Shard(ShardSpec(tiny_config(**{"ppo.gamma": 0.9}), tiny_task(), (5,)))
    shard.reset(0)
    return shard


@pytest.mark.parametrize("mode", ["objective", "shaped", "simplified", "loss"])
def test_004_c1_a_run_whose_reward_names_another_gamma_does_not_start(mode):
    losses = {"reward.baseline_loss": 2.3, "reward.target_loss": 0.3}
    losses["reward.typical_loss_delta_std"] = 0.1
    flags = {"reward_mode": mode, "ppo.gamma": 0.99, **(losses if mode == "loss" else {})}
    assert tiny_config(**flags, **{"reward.gamma": 0.99}).ppo.gamma == 0.99
    with pytest.raises(ConfigError, match=r"gamma=0\.995 but the run uses gamma=0\.99;"):
        tiny_config(**flags, **{"reward.gamma": 0.995})


def test_004_c1_rewards_of_a_run_are_shaped_with_the_gamma_of_its_agent(shard, monkeypatch):
    asked = []

    def spy(step, config, gamma):
        asked.append(gamma)
        return compute_reward(step, config, gamma)

    monkeypatch.setattr(shard_module, "compute_reward", spy)
    shard.step(wait(1))
    agent = new_state(shard.config, space_of(shard.task)).agent
    assert asked == [agent.config.gamma] == [0.9]


def test_004_c5_the_loop_learns_after_the_statistics_took_in_the_round():
    space = Space(analytic.OBSERVATION_DIM, analytic.NUM_SLOTS, ("small", "medium", "large"))
    config = TrainingConfig(task="analytic", rounds=3, envs=4, network=NetworkSizes(8, 8))
    state, seen = new_state(config, space), []
    update = state.agent.update

    def spy(buffer, generator):
        seen.append((len(buffer), state.observations.count))
        return update(buffer, generator)

    state.agent.update = spy
    run_training(
        config, state, analytic.AnalyticGrowth(4, 0), analytic.HORIZON, Tally(NullRecorder())
    )
    steps, counts = zip(*seen, strict=True)
    assert counts == pytest.approx(np.cumsum(steps), abs=1e-3)


def anomalies_of_two_updates(**values):
    """What the loop tells about two equal updates, and whether it looks closer afterwards."""
    config, keeper = tiny_config(), Keeper()
    state = new_state(config, Space(7, 2, ("a", "b")))
    for _ in range(2):
        diagnose(config, state, PPOUpdateMetrics(steps=9, values=values), Tally(keeper), {})
    return [(e.anomaly, e.worst_head) for e in keeper.events], state.escalation.level.name


@pytest.mark.parametrize("head", HEAD_NAMES)
@pytest.mark.parametrize(
    ("entropy", "expected"), [(0.05, "entropy_collapse"), (0.2, "entropy_low"), (0.5, None)]
)
def test_004_h1_the_loop_tells_of_the_entropy_of_each_head(head, entropy, expected):
    entropies = dict.fromkeys(HEAD_NAMES, 0.5) | {head: entropy}
    told, level = anomalies_of_two_updates(**{f"{h}_entropy": e for h, e in entropies.items()})
    assert told == ([] if expected is None else [(expected, head)])
    assert level == ("NORMAL" if expected is None else "DEBUG")


@pytest.mark.parametrize(("kl", "expected"), [(0.2, "kl_spike"), (0.6, "kl_extreme"), (0.05, None)])
def test_004_h2_the_loop_tells_of_kl(kl, expected):
    told, _ = anomalies_of_two_updates(approx_kl_max=kl)
    assert told == ([] if expected is None else [(expected, None)])


def test_004_h9_suspicions_reach_the_record_of_a_training_run(shard, monkeypatch):
    before = one_seed(SeedStage.BLENDING, n=1)
    after = one_seed(SeedStage.BLENDING, n=2, c=2.0, gained=-0.5)

    def suspicious(step, config, gamma):
        return compute_reward(transition(before, after), config, gamma)

    monkeypatch.setattr(shard_module, "compute_reward", suspicious)
    (records,) = shard.step(wait(1)).records
    (event,) = [r for r in records if isinstance(r, RewardHackingSuspected)]
    assert (event.env, event.slot_id, event.severity) == (5, "r0c0", "critical")


def test_004_m6_resuming_reads_every_file_of_a_checkpoint_once(tmp_path, monkeypatch):
    tiny_run(tmp_path / "run", rounds=1)
    read, names = Path.read_bytes, []

    def spy(path):
        names.append(path.name)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", spy)
    resume_ppo(tmp_path / "run", task=tiny_task())
    assert sorted(n for n in names if n in (MANIFEST, STATE, TENSORS)) == [MANIFEST, STATE, TENSORS]


@pytest.mark.parametrize("name", all_tasks())
def test_004_m17_a_task_says_how_large_its_batches_are(name):
    x, y = torch.zeros(30, 3, 32, 32), torch.zeros(30, dtype=torch.int64)
    data = DataSplits(x, y, x, y, x, y)
    task = replace(all_tasks()[name], batch=7, val_batch=11, batches_per_epoch=None)
    source = task.recipe(data, default_catalogue()).data
    assert [len(target) for _, target in source.train_batches(0)] == [7, 7, 7, 7, 2]
    assert [len(target) for _, target in source.val_batches()] == [11, 11, 8]
    sizes = []
    network = torch.nn.Flatten(2)
    network.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    score_on(network, replace(task, score=lambda output, target: torch.zeros(())), x, y)
    assert sizes == [11, 11, 8]


def test_004_m17_loaders_of_the_user_keep_their_batches():
    batches = [(torch.zeros(n, 1), torch.zeros(n)) for n in (5, 2)]
    source = LoaderSource(batches, batches[::-1])
    assert [len(target) for _, target in source.train_batches(0)] == [5, 2]
    assert [len(target) for _, target in source.val_batches()] == [2, 5]


def test_d20_hosts_are_measured_on_all_of_validation_every_example_counting_once():
    task, data = small_digits(train=64, val=297)
    recipes = [
        replace(task, val_batch=size).recipe(data, default_catalogue()) for size in (297, 290)
    ]
    whole, cut = (LoopedPopulation(recipe, [1, 2]) for recipe in recipes)
    everybody = np.ones((1, 3), dtype=bool)
    for env in range(2):
        one, other = whole.evaluate(env, everybody), cut.evaluate(env, everybody)
        assert one.samples == other.samples == 297
        assert other.loss == pytest.approx(one.loss, rel=1e-6)
        assert other.score == pytest.approx(one.score, rel=1e-6)


def test_d21_an_epoch_is_every_example_once_and_the_key_decides_order_and_augmentation():
    x, y = torch.arange(10.0)[:, None], torch.arange(10)

    def augment(inputs, generator):
        return inputs + torch.rand(inputs.shape, generator=generator)

    source = TensorSource((x, y), (x, y), batch=4, augment=augment)
    first, again, other = (list(source.train_batches(key)) for key in (1, 1, 2))
    assert [len(target) for _, target in first] == [4, 4, 2]
    for epoch in (first, other):
        assert sorted(torch.cat([target for _, target in epoch]).tolist()) == list(range(10))
    inputs = [torch.cat([batch for batch, _ in epoch]) for epoch in (first, again, other)]
    assert torch.equal(inputs[0], inputs[1])
    assert not torch.equal(inputs[0].sort(0).values, inputs[2].sort(0).values)


class Strict(dict):
    """A row in which nothing is silently absent."""

    get = dict.__getitem__


def test_d26_views_read_only_what_training_writes(tmp_path):
    rows = []
    hooks = Hooks(on_round=lambda number, row, timing: rows.append((Strict(row), Strict(timing))))
    tiny_run(tmp_path / "run", rounds=1, hooks=hooks)
    ((row, timing),) = rows
    assert "op 0." in round_line(row, timing, 0, 1, 0.0)
    read = {"task", "controller", "total_reward", *AVERAGED}
    assert read <= {field.name for field in fields(EpisodeOutcome)}
