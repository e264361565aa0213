"""Recording episodes: of a controller, or of a training run that keeps its own."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from esper.leyline import ActionMasks, RoundRecorder
from esper.simic.agent import VectorEnv
from esper.simic.recordings.episodes import Episodes, join, save_episodes
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.modes import compute_reward
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_specs import ShardSpec, env_batch_size
from esper.simic.training.round_log import RoundLog
from esper.simic.training.shard import Shard
from esper.simic.training.space import Space
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.run import act
from esper.tolaria.engine.transition import Transition
from esper.tolaria.families.base import Family
from esper.tolaria.tasks.base import Task

_MASKS = ("op", "slot", "blueprint", "blend")


def record_episodes(
    config: TrainingConfig,
    task: Task,
    data: DataSplits,
    controller: Controller,
    *,
    episodes: int,
    family: Family | None = None,
    recorder: RoundRecorder | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Episodes:
    """Let the controller play the episodes of a training run with these settings. Hosts of one
    architecture make a round. `recorder` gets the records of all rounds. The observations are those
    of a policy with `config.network.kind`. The result is a function of the arguments."""
    size, log, recorded = env_batch_size(config, family), RoundLog(recorder), []
    reward = config.reward_config(config.reward_mode)
    for round_, first in enumerate(range(0, episodes, size)):
        progress(first, episodes)
        envs = tuple(range(min(size, episodes - first)))
        spec = ShardSpec(config, task, data, envs, family=family, controller=controller.name)
        shard = Shard(spec, log)
        log.begin(round_, closely=False)
        history = _play(shard, round_, controller)
        if history:
            recorded.append(from_transitions(history, shard.space, reward, config.ppo.gamma))
    progress(episodes, episodes)
    return join(recorded)


def _play(shard: Shard, round_: int, controller: Controller) -> list[Transition]:
    """One episode of every environment of a shard with a single architecture."""
    shard.reset(round_)
    (batch,) = shard.batches
    controller.reset(shard.num_envs)
    history = []
    while batch.env.running.any():
        shard.step(act(batch.env, controller))
        assert batch.transition is not None
        history.append(batch.transition)
    return history


def from_transitions(
    history: Sequence[Transition], space: Space, reward: RewardConfig, gamma: float
) -> Episodes:
    """The episodes of E environments that stepped together, without those that never acted."""
    situations = [*(t.before for t in history), history[-1].after]
    observations, masks = zip(*(space.observe(each) for each in situations), strict=True)
    rewards = [compute_reward(t, reward, gamma).total for t in history]
    acted = np.stack([t.acted for t in history], axis=1)
    return _stacked(
        space, observations, masks[:-1], [t.actions for t in history], rewards, acted.sum(axis=1)
    )


def _stacked(
    space: Space,
    observations: Sequence[np.ndarray],
    masks: Sequence[ActionMasks],
    actions: Sequence[np.ndarray],
    rewards: Sequence[np.ndarray],
    lengths: np.ndarray,
) -> Episodes:
    """Stack the arrays [E, ...] of all steps; `observations` has one more, after the last step."""
    episodes = Episodes(
        space,
        observations=np.stack(observations, axis=1),
        **{f"{n}_masks": np.stack([getattr(m, n) for m in masks], axis=1) for n in _MASKS},
        actions=np.stack(actions, axis=1),
        rewards=np.stack(rewards, axis=1).astype(np.float64),
        lengths=lengths.astype(np.int64),
    )
    return episodes.rows(np.flatnonzero(lengths > 0))


class RecordingEnv:
    """A wrapper of a `VectorEnv` that writes the episodes of each round to the folder `run`.

    A round is written when its last episode ends, and replaces an earlier attempt at it.
    """

    def __init__(self, env: VectorEnv, space: Space, run: Path) -> None:
        self.env, self.num_envs, self.groups = env, env.num_envs, env.groups
        self.space, self.run = space, run

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        observations, masks = self.env.reset(round_)
        self.round, self.lengths = round_, np.zeros(self.num_envs, dtype=np.int64)
        self.running = np.ones(self.num_envs, dtype=bool)
        self.observations, self.masks = [observations], [masks]
        self.actions: list[np.ndarray] = []
        self.rewards: list[np.ndarray] = []
        return observations, masks

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, ActionMasks, np.ndarray, np.ndarray, np.ndarray]:
        observations, masks, rewards, terminated, truncated = self.env.step(actions)
        self.lengths += self.running
        self.observations.append(observations)
        self.masks.append(masks)
        self.actions.append(actions.copy())
        self.rewards.append(np.where(self.running, rewards, 0.0))
        self.running = self.running & ~(terminated | truncated)
        if not self.running.any():
            self._save()
        return observations, masks, rewards, terminated, truncated

    def _save(self) -> None:
        steps = self.observations, self.masks[:-1], self.actions, self.rewards
        save_episodes(self.run, _stacked(self.space, *steps, self.lengths), self.round)
