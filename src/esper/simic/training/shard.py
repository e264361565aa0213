"""Some of a run's growth environments, in one process.

What an environment does depends on the run's key, the round, its group and its own number: how
environments are divided into shards changes nothing, as long as groups stay whole.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from esper.leyline import ActionMasks
from esper.simic.training.env_batch import Part
from esper.simic.training.env_specs import RoundSpecs, ShardSpec, space_of
from esper.simic.training.round_log import RoundLog


class Shard:
    """A `VectorEnv`: `reset` begins a round with new hosts, `step` plays one step of it, for raw
    rewards. Environments whose episode is over just wait.

    `log` is told what happens step by step, environments in order, by their numbers in the run, so
    that records do not depend on the number of shards either.
    """

    def __init__(self, spec: ShardSpec, log: RoundLog) -> None:
        self.config, self.log = spec.config, log
        self.names = spec.task.name, spec.controller
        self.envs, self.device, self.num_envs = spec.envs, spec.device, len(spec.envs)
        self.specs = RoundSpecs(spec)
        self.groups = self.specs.groups
        self.space = space_of(spec.task, spec.family, kind=spec.config.network.kind)
        self.modes = np.array([self.config.mode_of(env) for env in self.envs])

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        self.parts = [
            Part(spec, self.config, self.modes[spec.rows], self.names, self.device, self.log)
            for spec in self.specs.of_round(round_)
        ]
        for part in self.parts:
            part.reset()
        return self._look()

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, ActionMasks, np.ndarray, np.ndarray, np.ndarray]:
        rewards, ended = np.zeros(self.num_envs), np.zeros(self.num_envs, dtype=bool)
        for part in self.parts:
            rows = part.spec.rows
            rewards[rows], ended[rows] = part.step(actions[rows])
        observations, masks = self._look()
        return observations, masks, rewards, ended, np.zeros_like(ended)

    def _look(self) -> tuple[np.ndarray, ActionMasks]:
        situations = [part.situation for part in self.parts]
        with self.log.clock.phase("reward"):
            seen, masks = zip(*(self.space.look(each) for each in situations), strict=True)
        with self.log.clock.phase("telemetry"):
            self._tell()
        return np.concatenate(seen), joined_masks(masks)

    def _tell(self) -> None:
        for part in self.parts:
            told, envs = part.told, self.envs[part.spec.rows]
            for row in sorted(told.rows, key=lambda row: row["env"]):
                self.log.metrics({**row, "env": envs[row["env"]]})
            for event in sorted(told.events, key=lambda event: event.env):
                self.log.event(replace(event, env=envs[event.env]))
            for outcome in sorted(told.outcomes, key=lambda outcome: outcome.env):
                self.log.outcome(replace(outcome, env=envs[outcome.env]))
            told.clear()


def joined_masks(parts: Sequence[ActionMasks]) -> ActionMasks:
    """Those of one environment after the other."""
    names = [each.name for each in fields(ActionMasks)]
    return ActionMasks(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})
