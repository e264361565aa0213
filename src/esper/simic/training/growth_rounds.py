"""All growth environments of a run, as the one vectorised environment that the loop plays."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from esper.leyline import ActionMasks, EpisodeOutcome, Recorder
from esper.simic.training.config import TrainingConfig
from esper.simic.training.shard import Record, ShardSpec, ShardStep
from esper.simic.training.workers import LocalShard, WorkerShard
from esper.tolaria.tasks import Task


class GrowthRounds:
    """A `VectorEnv` of `config.envs` growth environments, with one worker for each of `devices`: a
    process of its own, or this one if there is only one.

    What happens is told to `recorder` step by step, environments in order, so that records do
    not depend on the number of workers either. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        config: TrainingConfig,
        task: Task,
        recorder: Recorder,
        devices: Sequence[str] = ("cpu",),
    ) -> None:
        self.num_envs, self.recorder = config.envs, recorder
        self.max_steps = config.steps or task.steps
        self.reward_seconds = 0.0
        parts = np.array_split(np.arange(config.envs), min(len(devices), config.envs))
        specs = [
            ShardSpec(config, task, tuple(part.tolist()), device)
            for part, device in zip(parts, devices, strict=False)
        ]
        kind = LocalShard if len(specs) == 1 else WorkerShard
        self.shards = [kind(spec) for spec in specs]
        self.cuts = np.cumsum([len(part) for part in parts])[:-1]

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        results = self._all("reset", [round_] * len(self.shards))
        return _joined(results, "observations"), _join_masks(results)

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, ActionMasks, np.ndarray, np.ndarray, np.ndarray]:
        results = self._all("step", np.split(actions, self.cuts))
        observations, rewards, ended = (
            _joined(results, name) for name in ("observations", "rewards", "ended")
        )
        return observations, _join_masks(results), rewards, ended, np.zeros_like(ended)

    def _all(self, name: str, arguments: Sequence[Any]) -> list[ShardStep]:
        for shard, argument in zip(self.shards, arguments, strict=True):
            shard.begin(name, argument)
        results = [shard.result() for shard in self.shards]
        self.reward_seconds += max(result.reward_seconds for result in results)
        for result in results:
            for records in result.records:
                for record in records:
                    self._tell(record)
        return results

    def _tell(self, record: Record) -> None:
        if isinstance(record, EpisodeOutcome):
            self.recorder.outcome(record)
        elif isinstance(record, dict):
            self.recorder.metrics(record)
        else:
            self.recorder.event(record)

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def __enter__(self) -> "GrowthRounds":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _joined(results: list[ShardStep], name: str) -> np.ndarray:
    return np.concatenate([getattr(result, name) for result in results])


def _join_masks(results: list[ShardStep]) -> ActionMasks:
    return ActionMasks(
        **{
            name: np.concatenate([getattr(result.masks, name) for result in results])
            for name in ("op", "slot", "blueprint", "blend")
        }
    )
