"""Recording episodes: of a controller, or of a training run that keeps its own."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from esper.leyline import ActionMasks, RoundRecorder
from esper.simic.agent.rollout import VectorEnv
from esper.simic.recordings.episodes import MASKS, Episodes, join, save_episodes
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_specs import ShardSpec, env_batch_size, host_numbers
from esper.simic.training.round_log import RoundLog
from esper.simic.training.shard import Shard
from esper.simic.training.space import Space
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.run import act
from esper.tolaria.families.base import Family
from esper.tolaria.tasks.base import Task


class RecordingEnv:
    """A wrapper of a `VectorEnv` that remembers each round. With a folder `run` it writes a round
    when the last episode ends, in place of an earlier attempt at the same round."""

    def __init__(
        self,
        env: VectorEnv,
        space: Space,
        config: TrainingConfig,
        family: Family | None = None,
        run: Path | None = None,
    ) -> None:
        self.env, self.num_envs, self.groups = env, env.num_envs, env.groups
        self.space, self.config, self.family, self.run = space, config, family, run

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
        if self.run is not None and not self.running.any():
            save_episodes(self.run, self.episodes(), self.round)
        return observations, masks, rewards, terminated, truncated

    def episodes(self) -> Episodes:
        """One episode of each environment in this round, after at least one step."""
        masks = self.masks[:-1]
        return Episodes(
            self.space,
            observations=np.stack(self.observations, axis=1),
            **{f"{n}_masks": np.stack([getattr(m, n) for m in masks], axis=1) for n in MASKS},
            actions=np.stack(self.actions, axis=1),
            rewards=np.stack(self.rewards, axis=1).astype(np.float64),
            lengths=self.lengths,
            hosts=host_numbers(self.config, self.family, self.round, self.groups),
        )


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
    for round_, first in enumerate(range(0, episodes, size)):
        progress(first, episodes)
        envs = tuple(range(min(size, episodes - first)))
        spec = ShardSpec(config, task, data, envs, family=family, controller=controller.name)
        shard = Shard(spec, log)
        log.begin(round_, detailed=False)
        env = RecordingEnv(shard, shard.space, config, family)
        env.reset(round_)
        (batch,) = shard.batches
        # A host that breaks while it warms up has no episode.
        playable = np.flatnonzero(batch.env.running)
        controller.reset(shard.num_envs)
        while batch.env.running.any():
            env.step(act(batch.env, controller))
        if len(playable):
            recorded.append(env.episodes().rows(playable))
    progress(episodes, episodes)
    return join(recorded)
