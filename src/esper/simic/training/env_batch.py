"""One `GrowthEnv` of a shard: it is stepped, rewarded and settled as one."""

from dataclasses import replace
from typing import Any

import numpy as np

from esper.leyline import History
from esper.simic.rewards.components import RewardComponents
from esper.simic.rewards.modes import compute_reward
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_specs import EnvSpec
from esper.simic.training.round_log import RoundLog
from esper.tamiyo.situation import Situation
from esper.tolaria.engine.run import make_env, settle
from esper.tolaria.engine.transition import Transition


class Part:
    """Plays the environments of a spec, `modes` being the reward modes of each, and `names` those
    of the task and the controller. `told` is what has happened since it was last cleared,
    environments counted from 0; `log` has the clock. `transition` is the last step, None before the
    first."""

    def __init__(
        self,
        spec: EnvSpec,
        config: TrainingConfig,
        modes: np.ndarray,
        names: tuple[str, str],
        device: str,
        log: RoundLog,
    ) -> None:
        self.spec, self.config, self.modes, self.log = spec, config, modes, log
        self.task, self.controller = names
        self.told = History()
        self.env = make_env(spec.recipe, spec.keys, spec.rules, self.told, device)
        self.returns = np.zeros(len(spec.keys))
        self.transition: Transition | None = None

    @property
    def situation(self) -> Situation:
        assert self.env.situation is not None
        return self.env.situation

    def reset(self) -> None:
        situation = self.env.reset()
        # A host that breaks while it warms up: its episode ends with the first step.
        self.stillborn = ~situation.running
        self._settle(self.stillborn)
        self._name_outcomes()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Raw rewards [E], and which episodes have ended (bool[E])."""
        rewards, ended = np.zeros(len(actions)), self.stillborn
        self.stillborn = np.zeros_like(ended)
        # Others may still be playing when all is over here.
        if self.env.running.any():
            transition = self.env.step(actions)
            happened = len(self.told.events)
            self.transition = transition = self._settled(transition)
            with self.log.clock.phase("reward"):
                rewards = self._reward(transition, happened)
            self.returns += rewards
            self._name_outcomes()
            # The last epoch is the end of a host's training: no value is left to bootstrap from.
            ended = ended | transition.ended
        return rewards, ended

    def _settled(self, transition: Transition) -> Transition:
        """Close the episodes that have ended; the transition then knows what they leave behind."""
        self._settle(transition.ended)
        score, params = np.full((2, len(self.returns)), np.nan)
        for outcome in self.told.outcomes:
            score[outcome.env] = np.nan if outcome.val_score is None else outcome.val_score
            params[outcome.env] = outcome.params
        return replace(transition, final_score=score, final_params=params)

    def _settle(self, envs: np.ndarray) -> None:
        if envs.any():
            settle(self.env, envs, task=self.task, controller=self.controller)

    def _name_outcomes(self) -> None:
        """Say in the outcomes what the episodes have earned."""
        self.told.outcomes[:] = [
            replace(
                outcome,
                total_reward=float(self.returns[outcome.env]),
                reward_mode=str(self.modes[outcome.env]),
            )
            for outcome in self.told.outcomes
        ]

    def _reward(self, transition: Transition, happened: int) -> np.ndarray:
        """Raw rewards [E], each environment by its own mode; the rows of the step get the parts,
        and suspicions come after the events that had `happened` in it."""
        gamma, total = self.config.ppo.gamma, np.zeros(len(self.returns))
        rows = {row["env"]: row for row in self.told.rows}
        suspicions = []
        for mode in dict.fromkeys(self.modes.tolist()):
            parts = compute_reward(transition, self.config.reward_config(mode), gamma)
            own = self.modes == mode
            total[own] = parts.total[own]
            suspicions += [event for event in parts.suspicions if own[event.env]]
            for env in np.flatnonzero(own & transition.acted).tolist():
                rows[env].update(reward_columns(parts, env, mode))
        self.told.events[happened:happened] = suspicions
        return total


def reward_columns(parts: RewardComponents, env: int, mode: str) -> dict[str, Any]:
    """Columns of a step's row; those named `reward.` add up to `reward`."""
    named = zip(parts.names, parts.values[env].tolist(), strict=True)
    return {
        "reward_mode": mode,
        "reward": float(parts.total[env]),
        "shaped_ratio": float(parts.shaped_ratio[env]),
        **{f"reward.{name}": value for name, value in named},
    }
