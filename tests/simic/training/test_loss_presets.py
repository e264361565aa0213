"""`esper train ppo --reward loss` needs no further settings for any built-in task."""

from dataclasses import replace

import pytest
import torch

from esper.api import train_ppo
from esper.simic.training.config import load_config
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.tasks import BUILT_IN, find_task
from training_support import rows

SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "fashion_mnist": (1, 28, 28)}
SMALL = (3, 16, 16)


def stand_in(name: str) -> DataSplits:
    """Four random examples for each split, of the task's shape."""
    task, draw = find_task(name), torch.Generator().manual_seed(0)
    if not task.shape:
        block = task.build().block_size
        texts = [torch.randint(256, (4, block + 1), generator=draw) for _ in range(3)]
        return DataSplits(*(half for rows in texts for half in (rows[:, :-1], rows[:, 1:])))
    shape = SHAPES.get(task.data_set, SMALL if "k" in name.split("_")[1:] else (3, 32, 32))
    halves = []
    for _ in range(3):
        halves += [torch.rand(4, *shape, generator=draw), torch.arange(4)]
    return DataSplits(*halves)


@pytest.mark.parametrize("name", [task.name for task in BUILT_IN])
def test_004_m4_a_loss_reward_needs_no_settings_for_a_built_in_task(tmp_path, name):
    sizes = {"network.feature_dim": 8, "network.lstm_hidden_dim": 8}
    flags = {"task": name, "reward_mode": "loss", "rounds": 1, "envs": 1, "growth.steps": 1}
    config = load_config(flags={**flags, **sizes})
    task = replace(find_task(name), load=lambda root: stand_in(name))
    train_ppo(config, tmp_path / "run", task=task)
    steps = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "reward" in row]
    assert all("reward.terminal_loss" in row for row in steps)
    # A guess is worth nothing, and the target everything.
    assert config.reward_config.target_loss < config.reward_config.baseline_loss


def test_settings_of_the_user_win_over_the_preset():
    flags = {"reward_mode": "loss", "reward.target_loss": 0.7}
    reward = load_config(flags=flags).reward_config
    assert (reward.target_loss, reward.baseline_loss) == (0.7, 2.303)
