"""Where episodes come from: a controller that plays, or a training run that keeps its own."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from esper.leyline import ActionMasks, RoundRecorder
from esper.simic.agent.rollout import VectorEnv
from esper.simic.recordings.episodes import Episodes, join, save_episodes
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.modes import compute_reward
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_specs import ShardSpec, side_by_side
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
    """Let the controller play as a policy would in a training run with these settings; a function
    of its arguments. All hosts of one architecture are a round, which `recorder` is told of. What
    is recorded is what a policy of the kind `config.network.kind` would have seen."""
    together, log, parts = side_by_side(config, family), RoundLog(recorder), []
    reward = config.reward_config(config.reward_mode)
    for round_, first in enumerate(range(0, episodes, together)):
        progress(first, episodes)
        envs = tuple(range(min(together, episodes - first)))
        spec = ShardSpec(config, task, data, envs, family=family, controller=controller.name)
        shard = Shard(spec, log)
        log.begin(round_, closely=False)
        history = _play(shard, round_, controller)
        if history:
            parts.append(from_transitions(history, shard.space, reward, config.ppo.gamma))
    progress(episodes, episodes)
    return join(parts)


def _play(shard: Shard, round_: int, controller: Controller) -> list[Transition]:
    """One episode of every environment of a shard whose hosts are all alike."""
    shard.reset(round_)
    (part,) = shard.parts
    controller.reset(shard.num_envs)
    history = []
    while part.env.running.any():
        shard.step(act(part.env, controller))
        assert part.transition is not None
        history.append(part.transition)
    return history


def from_transitions(
    history: Sequence[Transition], space: Space, reward: RewardConfig, gamma: float
) -> Episodes:
    """The episodes of E environments that stepped together; those that never acted are left out."""
    # What was decided on, and the end.
    situations = [*(t.before for t in history), history[-1].after]
    seen, allowed = zip(*(space.look(situation) for situation in situations), strict=True)
    rewards = [compute_reward(t, reward, gamma).total for t in history]
    acted = np.stack([t.acted for t in history], axis=1)
    return _stacked(
        space, seen, allowed[:-1], [t.actions for t in history], rewards, acted.sum(axis=1)
    )


def _stacked(
    space: Space,
    seen: Sequence[np.ndarray],
    allowed: Sequence[ActionMasks],
    actions: Sequence[np.ndarray],
    rewards: Sequence[np.ndarray],
    lengths: np.ndarray,
) -> Episodes:
    """From arrays [E, ...] of one step after another; `seen` is one longer, it has the end."""
    masks = {f"{n}_masks": np.stack([getattr(m, n) for m in allowed], axis=1) for n in _MASKS}
    everyone = Episodes(
        space,
        observations=np.stack(seen, axis=1),
        **masks,
        actions=np.stack(actions, axis=1),
        rewards=np.stack(rewards, axis=1).astype(np.float64),
        lengths=lengths.astype(np.int64),
    )
    return everyone.rows(np.flatnonzero(lengths > 0))


class Tape:
    """A `VectorEnv` around another one; what happens in each round is kept in `run`.

    A round is written when the last of its episodes is over, over what an earlier attempt at the
    same round has left.
    """

    def __init__(self, env: VectorEnv, space: Space, run: Path) -> None:
        self.env, self.num_envs, self.groups = env, env.num_envs, env.groups
        self.space, self.run = space, run

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        seen, masks = self.env.reset(round_)
        self.round, self.lengths = round_, np.zeros(self.num_envs, dtype=np.int64)
        self.running = np.ones(self.num_envs, dtype=bool)
        self.seen, self.allowed = [seen], [masks]
        self.actions: list[np.ndarray] = []
        self.rewards: list[np.ndarray] = []
        return seen, masks

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, ActionMasks, np.ndarray, np.ndarray, np.ndarray]:
        seen, masks, rewards, terminated, truncated = self.env.step(actions)
        self.lengths += self.running
        self.seen.append(seen)
        self.allowed.append(masks)
        self.actions.append(actions.copy())
        self.rewards.append(np.where(self.running, rewards, 0.0))
        self.running = self.running & ~(terminated | truncated)
        if not self.running.any():
            self._write()
        return seen, masks, rewards, terminated, truncated

    def _write(self) -> None:
        played = _stacked(
            self.space, self.seen, self.allowed[:-1], self.actions, self.rewards, self.lengths
        )
        save_episodes(self.run, played, self.round)
