"""Some of a run's growth environments, in one process.

What an environment does depends on the run's key, the round and its own number: how environments
are divided into shards changes nothing.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from esper.growth import default_catalogue
from esper.leyline import ActionMasks, History, draw_key
from esper.simic.rewards import RewardComponents, compute_reward
from esper.simic.training.config import TrainingConfig
from esper.simic.training.round_log import RoundLog
from esper.simic.training.state import Space
from esper.tamiyo import FeatureExtractionContext, Situation, feature_size, signals_to_features
from esper.tolaria import (
    Budget,
    DataSplits,
    HostRecipe,
    Task,
    Transition,
    TrialRules,
    choose_population,
    make_env,
    settle,
)

CONTROLLER = "ppo"


@dataclass(frozen=True)
class ShardSpec:
    """Everything a shard is made from; `envs` are the numbers of its environments in the run, and
    `device` is where their hosts are trained. With `data` that is shared, it can be sent to another
    process."""

    config: TrainingConfig
    task: Task
    data: DataSplits
    envs: tuple[int, ...]
    device: str = "cpu"


def space_of(task: Task) -> Space:
    """Slots and blueprints of a task's environments, and the width of their observations."""
    names = default_catalogue().names
    slots = len(task.slots)
    return Space(feature_size(slots, len(names)), slots, tuple(names))


def recipe_of(config: TrainingConfig, task: Task, data: DataSplits) -> HostRecipe:
    """How the hosts of a run are made and trained."""
    return replace(task, precision=config.precision).recipe(data)


def episode_key(run_key: int, round_: int, env: int) -> int:
    """The key of one episode; `esper grow` with it makes the same host."""
    return draw_key(run_key, "episode", round_, env)


def groups_of(spec: ShardSpec) -> np.ndarray:
    """The groups int[E] of a shard's environments, numbered in the run: each is alone."""
    return np.array(spec.envs)


class Shard:
    """A `VectorEnv`: `reset` begins a round with new hosts, `step` plays one step of it, for raw
    rewards. Environments whose episode is over just wait.

    `log` is told what happens step by step, environments in order, by their numbers in the run, so
    that records do not depend on the number of shards either.
    """

    def __init__(self, spec: ShardSpec, log: RoundLog) -> None:
        self.config, self.task, self.log = spec.config, spec.task, log
        self.envs, self.device, self.num_envs = spec.envs, spec.device, len(spec.envs)
        self.groups = groups_of(spec)
        self.recipe = recipe_of(spec.config, spec.task, spec.data)
        self.rules = TrialRules(
            self.config.steps or self.task.steps,
            cast(Literal["isolated", "joint"], self.config.incubation),
            budget=Budget(params=self.config.max_params, macs=self.config.max_macs),
            max_seeds=self.config.max_seeds,
            on_panic="terminate",
            keep_best=False,
            schedule=self.task.schedule,
            population=choose_population(
                self.recipe, self.config.envs, self.config.population, self.device
            ),
        )
        self.modes = np.array([self.config.mode_of(env) for env in self.envs])

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        self.told = History()
        keys = [episode_key(self.config.key, round_, env) for env in self.envs]
        self.env = make_env(self.recipe, keys, self.rules, self.told, self.device)
        self.returns = np.zeros(self.num_envs)
        situation = self.env.reset()
        # A host that breaks while it warms up: its episode ends with the first step.
        self.stillborn = ~situation.running
        self._settle(self.stillborn)
        return self._look(situation)

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, ActionMasks, np.ndarray, np.ndarray, np.ndarray]:
        rewards, ended = np.zeros(self.num_envs), self.stillborn
        self.stillborn = np.zeros_like(ended)
        # Other shards may still be playing when all is over here.
        if self.env.running.any():
            transition = self.env.step(actions)
            with self.log.clock.phase("reward"):
                rewards = self._reward(transition)
            self.returns += rewards
            self._settle(transition.ended)
            # The last epoch is the end of a host's training: no value is left to bootstrap from.
            ended = ended | transition.ended
        assert self.env.situation is not None
        observations, masks = self._look(self.env.situation)
        return observations, masks, rewards, ended, np.zeros_like(ended)

    def privileged(self) -> np.ndarray:
        return np.zeros((self.num_envs, 0), dtype=np.float32)

    def _reward(self, transition: Transition) -> np.ndarray:
        """Raw rewards [E], each environment by its own mode; the rows of the step get the parts."""
        gamma, total = self.config.ppo.gamma, np.zeros(self.num_envs)
        rows = {row["env"]: row for row in self.told.rows}
        for mode in dict.fromkeys(self.modes.tolist()):
            parts = compute_reward(transition, self.config.reward_config(mode), gamma)
            own = self.modes == mode
            total[own] = parts.total[own]
            for event in parts.suspicions:
                if own[event.env]:
                    self.told.event(event)
            for env in np.flatnonzero(own & transition.acted).tolist():
                rows[env].update(reward_columns(parts, env, mode))
        return total

    def _settle(self, envs: np.ndarray) -> None:
        """Close episodes (bool[E]), and say in their outcomes what they earned."""
        if not envs.any():
            return
        outcomes = settle(self.env, envs, task=self.task.name, controller=CONTROLLER)
        self.told.outcomes[:] = [
            replace(
                outcome,
                total_reward=float(self.returns[outcome.env]),
                reward_mode=str(self.modes[outcome.env]),
            )
            for outcome in outcomes
        ]

    def _look(self, situation: Situation) -> tuple[np.ndarray, ActionMasks]:
        with self.log.clock.phase("reward"):
            observations = signals_to_features(FeatureExtractionContext(situation))
        with self.log.clock.phase("telemetry"):
            self._tell()
        return observations, situation.masks

    def _tell(self) -> None:
        told = self.told
        for row in sorted(told.rows, key=lambda row: row["env"]):
            self.log.metrics({**row, "env": self.envs[row["env"]]})
        for event in sorted(told.events, key=lambda event: event.env):
            self.log.event(replace(event, env=self.envs[event.env]))
        for outcome in sorted(told.outcomes, key=lambda outcome: outcome.env):
            self.log.outcome(replace(outcome, env=self.envs[outcome.env]))
        told.clear()


def reward_columns(parts: RewardComponents, env: int, mode: str) -> dict[str, Any]:
    """Columns of a step's row; those named `reward.` add up to `reward`."""
    named = zip(parts.names, parts.values[env].tolist(), strict=True)
    return {
        "reward_mode": mode,
        "reward": float(parts.total[env]),
        "shaped_ratio": float(parts.shaped_ratio[env]),
        **{f"reward.{name}": value for name, value in named},
    }
