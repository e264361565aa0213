"""Some of a run's growth environments, in one process.

What an environment does depends on the run's key, the round and its own number: how environments
are divided into shards changes nothing.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from esper.growth import default_catalogue
from esper.leyline import ActionMasks, EpisodeOutcome, draw_key
from esper.leyline.events import Event
from esper.simic.rewards import RewardComponents, compute_reward
from esper.simic.training.config import TrainingConfig
from esper.simic.training.state import Space
from esper.tamiyo import FeatureExtractionContext, Situation, feature_size, signals_to_features
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.garden import Budget
from esper.tolaria.tasks import Task
from esper.tolaria.transition import Transition
from esper.tolaria.trial import TrialRules, make_env, settle

CONTROLLER = "ppo"

# What happened, in order: an event, a row of metrics or an outcome.
Record = Event | dict[str, Any] | EpisodeOutcome


@dataclass(frozen=True)
class ShardSpec:
    """Everything a shard is made from; `envs` are the numbers of its environments in the run, and
    `device` is where their hosts are trained."""

    config: TrainingConfig
    task: Task
    envs: tuple[int, ...]
    device: str = "cpu"


@dataclass(frozen=True)
class ShardStep:
    """What a step of a shard gives back; arrays over its environments.

    `rewards` are raw. `ended` marks the last step of an episode. `records` holds what happened to
    each environment. `reward_seconds` went into rewards and observations, the rest of the step
    into training and evaluating hosts.
    """

    observations: np.ndarray
    masks: ActionMasks
    rewards: np.ndarray
    ended: np.ndarray
    records: list[list[Record]]
    reward_seconds: float = 0.0


def space_of(task: Task) -> Space:
    """Slots and blueprints of a task's environments, and the width of their observations."""
    names = default_catalogue().names
    slots = len(task.slots)
    return Space(feature_size(slots, len(names)), slots, tuple(names))


def episode_key(run_key: int, round_: int, env: int) -> int:
    """The key of one episode; `esper grow` with it makes the same host."""
    return draw_key(run_key, "episode", round_, env)


class Shard:
    """`reset` begins a round with new hosts, `step` plays one step of it. Ended ones just wait."""

    def __init__(self, spec: ShardSpec) -> None:
        self.config, self.task = spec.config, spec.task
        self.envs, self.device = spec.envs, spec.device
        self.recipe = self.task.recipe(self.task.load(data_root()))
        self.rules = TrialRules(
            self.config.steps or self.task.steps,
            cast(Literal["isolated", "joint"], self.config.incubation),
            budget=Budget(params=self.config.max_params, macs=self.config.max_macs),
            max_seeds=self.config.max_seeds,
            on_panic="terminate",
            keep_best=False,
        )
        self.modes = [self.config.mode_of(env) for env in self.envs]

    def reset(self, round_: int) -> ShardStep:
        config = self.config
        self.log = _Log(self.envs)
        keys = [episode_key(config.key, round_, env) for env in self.envs]
        self.env = make_env(self.recipe, keys, self.rules, self.log, self.device)
        self.returns = np.zeros(len(self.envs))
        situation = self.env.reset()
        # A host that breaks while it warms up: its episode ends with the first step.
        self.stillborn = ~situation.running
        for env in np.flatnonzero(self.stillborn).tolist():
            self._settle(env, "rollback")
        nothing = np.zeros(len(self.envs))
        return self._result(situation, nothing, nothing > 0)

    def step(self, actions: np.ndarray) -> ShardStep:
        if not self.env.running.any():
            situation = self.env.situation
            assert situation is not None
            ended, self.stillborn = self.stillborn, np.zeros_like(self.stillborn)
            return self._result(situation, np.zeros(len(self.envs)), ended)
        transition = self.env.step(actions)
        began = time.perf_counter()
        rewards = self._reward(transition)
        self.returns += rewards
        seconds = time.perf_counter() - began
        for env in np.flatnonzero(transition.ended).tolist():
            self._settle(env, "rollback" if transition.terminated[env] else "finished")
        # The last epoch is the end of a host's training: no value is left to bootstrap from.
        ended = transition.ended | self.stillborn
        self.stillborn = np.zeros_like(self.stillborn)
        return self._result(transition.after, rewards, ended, seconds)

    def _reward(self, transition: Transition) -> np.ndarray:
        """Raw rewards [E], each environment by its own mode; the rows of the step get the parts."""
        gamma, total = self.config.ppo.gamma, np.zeros(len(self.envs))
        for mode in dict.fromkeys(self.modes):
            parts = compute_reward(transition, self.config.reward_config(mode), gamma)
            own = np.array([other == mode for other in self.modes])
            total[own] = parts.total[own]
            for event in parts.suspicions:
                if own[event.env]:
                    self.log.event(event)
            for env in np.flatnonzero(own & transition.acted).tolist():
                self.log.extend_row(env, reward_columns(parts, env, mode))
        return total

    def _settle(self, env: int, ended: str) -> None:
        which = np.arange(len(self.envs)) == env
        settle(self.env, which, task=self.task.name, controller=CONTROLLER)
        self.log.finish_outcome(env, float(self.returns[env]), self.modes[env])

    def _result(
        self,
        situation: Situation,
        rewards: np.ndarray,
        ended: np.ndarray,
        reward_seconds: float = 0.0,
    ) -> ShardStep:
        began = time.perf_counter()
        observations = signals_to_features(FeatureExtractionContext(situation))
        seconds = reward_seconds + time.perf_counter() - began
        masks, records = situation.masks, self.log.take()
        return ShardStep(observations, masks, rewards, ended, records, seconds)


def reward_columns(parts: RewardComponents, env: int, mode: str) -> dict[str, Any]:
    """Columns of a step's row; those named `reward.` add up to `reward`."""
    named = zip(parts.names, parts.values[env].tolist(), strict=True)
    return {
        "reward_mode": mode,
        "reward": float(parts.total[env]),
        "shaped_ratio": float(parts.shaped_ratio[env]),
        **{f"reward.{name}": value for name, value in named},
    }


class _Log:
    """A recorder that sorts by environment, and calls them by their numbers in the run."""

    def __init__(self, envs: tuple[int, ...]) -> None:
        self.envs = envs
        self.records: list[list[Record]] = [[] for _ in envs]

    def event(self, event: Event) -> None:
        self.records[event.env].append(replace(event, env=self.envs[event.env]))

    def metrics(self, row: Mapping[str, Any]) -> None:
        self.records[row["env"]].append({**row, "env": self.envs[row["env"]]})

    def outcome(self, outcome: EpisodeOutcome) -> None:
        self.records[outcome.env].append(replace(outcome, env=self.envs[outcome.env]))

    def extend_row(self, env: int, columns: Mapping[str, Any]) -> None:
        """Add columns to the last row of an environment."""
        row = next(r for r in reversed(self.records[env]) if isinstance(r, dict))
        row.update(columns)

    def finish_outcome(self, env: int, total_reward: float, reward_mode: str) -> None:
        """Say what the episode earned in the outcome that was recorded last."""
        outcome = self.records[env].pop()
        assert isinstance(outcome, EpisodeOutcome)
        self.records[env].append(
            replace(outcome, total_reward=total_reward, reward_mode=reward_mode)
        )

    def take(self) -> list[list[Record]]:
        taken, self.records = self.records, [[] for _ in self.envs]
        return taken
