"""Some of a run's growth environments, in one process.

What an environment does depends on the run's key, the round, its group and its own number. How
environments are divided into shards changes nothing as long as groups stay whole.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from esper.leyline import ActionMasks, History
from esper.leyline.events import Event
from esper.simic.agent.rollout import Step
from esper.simic.rewards.modes import compute_reward
from esper.simic.training.env_specs import EnvSpec, RoundSpecs, ShardSpec, space_of
from esper.simic.training.round_log import RoundLog
from esper.tamiyo.situation import Situation
from esper.tolaria.engine.event_log import Transition
from esper.tolaria.engine.run import make_env, settle


class EnvBatch:
    """The environments of one `GrowthEnv`: stepped, rewarded and settled together.

    `history` holds what was recorded since it was last cleared, with environments counted from 0.
    """

    def __init__(self, spec: EnvSpec, shard_spec: ShardSpec, log: RoundLog) -> None:
        self.spec, self.shard_spec, self.log = spec, shard_spec, log
        self.envs = shard_spec.envs[spec.rows]
        self.history = History()
        self.env = make_env(spec.recipe, spec.keys, spec.rules, self.history, shard_spec.device)
        self.returns = np.zeros(len(spec.keys))

    @property
    def situation(self) -> Situation:
        assert self.env.situation is not None
        return self.env.situation

    def reset(self) -> None:
        situation = self.env.reset()
        # The episode of a host that breaks while it warms up ends with the first step.
        self.broken_at_start = ~situation.running
        self._settle(self.broken_at_start)
        self._complete_outcomes()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Raw rewards [E], and which episodes have ended (bool[E])."""
        rewards, ended = np.zeros(len(actions)), self.broken_at_start
        self.broken_at_start = np.zeros_like(ended)
        # Other batches of the shard may run longer than this one.
        if self.env.running.any():
            transition = self.env.step(actions)
            step_events, self.history.events = self.history.events, []
            transition = self._with_final_results(transition)
            with self.log.clock.phase("reward"):
                rewards, suspicions = self._reward(transition)
            # In the order of what they are about, although settling comes before rewards.
            self.history.events = [*step_events, *suspicions, *self.history.events]
            self.returns += rewards
            self._complete_outcomes()
            # The last epoch is the end of a host's training: no value is left to bootstrap from.
            ended = ended | transition.ended
        return rewards, ended

    def _with_final_results(self, transition: Transition) -> Transition:
        """Settle the episodes that have ended, and add their final scores and sizes."""
        self._settle(transition.ended)
        score, params = np.full((2, len(self.returns)), np.nan)
        for outcome in self.history.outcomes:
            score[outcome.env] = np.nan if outcome.val_score is None else outcome.val_score
            params[outcome.env] = outcome.params
        return replace(transition, final_score=score, final_params=params)

    def _settle(self, envs: np.ndarray) -> None:
        if envs.any():
            shard = self.shard_spec
            settle(self.env, envs, task=shard.task.name, controller=shard.controller)

    def _complete_outcomes(self) -> None:
        """Add the return and the reward mode to the outcomes of the step."""
        mode = self.shard_spec.config.reward_mode
        self.history.outcomes[:] = [
            replace(each, total_reward=float(self.returns[each.env]), reward_mode=mode)
            for each in self.history.outcomes
        ]

    def _reward(self, transition: Transition) -> tuple[np.ndarray, list[Event]]:
        """Raw rewards [E], and suspicions of reward hacking. The rows of the step get the
        components."""
        config = self.shard_spec.config
        rows = {row["env"]: row for row in self.history.rows}
        components = compute_reward(transition, config.reward_config, config.ppo.gamma)
        for env in np.flatnonzero(transition.acted).tolist():
            named = zip(components.names, components.values[env].tolist(), strict=True)
            rows[env] |= {
                "reward_mode": config.reward_mode,
                "reward": float(components.total[env]),
                "shaped_ratio": float(components.shaped_ratio[env]),
                **{f"reward.{name}": value for name, value in named},  # add up to `reward`
            }
        return components.total, list(components.suspicions)


class Shard:
    """A `VectorEnv`: `reset` begins a round with new hosts, `step` plays one step of it for raw
    rewards. Environments whose episode is over wait.

    `log` gets the records of each step, in the order of environments and under their numbers in
    the run, so that files do not depend on the number of shards either.
    """

    def __init__(self, spec: ShardSpec, log: RoundLog) -> None:
        self.spec, self.log, self.num_envs = spec, log, len(spec.envs)
        self.round_specs = RoundSpecs(spec)
        self.groups = self.round_specs.groups
        self.space = space_of(spec.task, spec.family, kind=spec.config.network.kind)

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        specs = self.round_specs.of_round(round_)
        self.batches = [EnvBatch(each, self.spec, self.log) for each in specs]
        for batch in self.batches:
            batch.reset()
        return self._observe()

    def step(self, actions: np.ndarray) -> Step:
        rewards, ended = np.zeros(self.num_envs), np.zeros(self.num_envs, dtype=bool)
        for batch in self.batches:
            rows = batch.spec.rows
            rewards[rows], ended[rows] = batch.step(actions[rows])
        observations, masks = self._observe()
        return observations, masks, rewards, ended, np.zeros_like(ended)

    def _observe(self) -> tuple[np.ndarray, ActionMasks]:
        situations = [batch.situation for batch in self.batches]
        with self.log.clock.phase("reward"):
            observed = (self.space.observe(situation) for situation in situations)
            observations, masks = zip(*observed, strict=True)
        with self.log.clock.phase("telemetry"):
            for batch in self.batches:
                self._record(batch.history, batch.envs)
        return np.concatenate(observations), join_masks(masks)

    def _record(self, history: History, envs: Sequence[int]) -> None:
        for row in sorted(history.rows, key=lambda row: row["env"]):
            self.log.metrics({**row, "env": envs[row["env"]]})
        events = filter(self.log.keeps, history.events)
        for event in sorted(events, key=lambda event: event.env):
            self.log.event(replace(event, env=envs[event.env]))
        for outcome in sorted(history.outcomes, key=lambda outcome: outcome.env):
            self.log.outcome(replace(outcome, env=envs[outcome.env]))
        history.clear()


def join_masks(masks: Sequence[ActionMasks]) -> ActionMasks:
    """The masks of all environments, one after another."""
    names = [each.name for each in fields(ActionMasks)]
    return ActionMasks(**{n: np.concatenate([getattr(m, n) for m in masks]) for n in names})
