"""Our agent and those of other libraries on the same growth environments, at equal steps.

    python benchmarks/rl_compare.py analytic|digits [--keys 5] [--rounds N] [--agents ours,...]
                                    [--out FILE.jsonl]

Every agent plays whole episodes of all copies, learns from them, and plays on, for the same number
of environment steps; then its most probable actions are played on held-out keys.
A round, learning rate, epochs, minibatches and network widths are alike; our agent has the settings
that it has elsewhere on these problems, the others were not tuned. What stands in FILE is not run
again. The last line is one JSON object: mean return of every agent, and its 95 % interval over
training keys.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from sb3_contrib import MaskablePPO, RecurrentPPO
from scipy import stats
from stable_baselines3.common.vec_env import VecEnv
from tensordict import TensorDict

import esper.gym
from agent_learns import GROWTH, new_agent
from esper.leyline import ActionMasks, draw_key
from esper.simic.agent.rollout import action_draws, play_round
from esper.simic.training.config import load_config
from esper.simic.training.env_specs import Space
from esper.simic.training.loop import run_training
from esper.simic.training.round_log import RoundLog
from esper.simic.training.state import new_state
from esper.tamiyo.situation import wait

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import gym_cleanrl
import gym_torchrl

FIRST_TEST_KEY = 1_000_000
EPOCHS, MINIBATCHES = 4, 4

# What is seen, which choices are legal (as rows, and as the mask of the agent's own actions), and
# whether an episode begins -> actions.
Policy = Callable[[np.ndarray, ActionMasks, np.ndarray, bool], np.ndarray]


@dataclass(frozen=True)
class Arena:
    """A problem, how much of it is played, and the settings of all learners."""

    env_id: str
    settings: dict[str, Any]
    num_envs: int
    steps: int
    rounds: int
    test_envs: int
    learning_rate: float

    def envs(self, actions: str, num_envs: int | None = None) -> Any:
        return gymnasium.make_vec(
            self.env_id, num_envs=num_envs or self.num_envs, actions=actions, **self.settings
        ).unwrapped

    @property
    def total(self) -> int:
        return self.num_envs * self.steps * self.rounds


ARENAS = {
    "analytic": Arena(esper.gym.ANALYTIC, {}, 32, 16, 80, 512, 2e-3),
    "digits": Arena(esper.gym.GROWTH, {"task": "digits", "steps": 12}, 16, 12, 5, 8, 1e-3),
}


# --- ours --------------------------------------------------------------------------------------


class ForOurs:
    """The copies of an environment as our loop wants them."""

    def __init__(self, arena: Arena, key: int) -> None:
        self.problem = arena.envs("factored")._copies.problem
        self.num_envs, self.key = arena.num_envs, key
        self.groups = np.arange(arena.num_envs)

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        keys = [draw_key(self.key, "episode", round_, env) for env in range(self.num_envs)]
        seen = self.problem.reset(keys)
        return seen.observations, seen.masks

    def step(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        seen, rewards, over = self.problem.step(rows)
        ended = np.full(self.num_envs, over)
        return seen.observations, seen.masks, rewards, ended, np.zeros_like(ended)


def ours(arena: Arena, key: int) -> Policy:
    env = ForOurs(arena, key)
    scale = torch.from_numpy
    if arena.env_id == esper.gym.ANALYTIC:
        agent = new_agent(GROWTH, key)
        buffer = agent.new_buffer(arena.num_envs, arena.steps)
        for round_ in range(arena.rounds):
            draws = action_draws(key, round_, arena.num_envs, arena.steps)
            play_round(agent, env, buffer, round_, draws)
            agent.update(buffer, torch.Generator().manual_seed(draw_key(key, "shuffle", round_)))
    else:
        flags = {**arena.settings, "envs": arena.num_envs, "rounds": arena.rounds, "key": key}
        config = load_config(flags=flags)
        problem = env.problem
        width = problem.observation_space.shape[0]
        state = new_state(config, Space(width, problem.sizes[0], problem.blueprints))
        run_training(config, state, env, arena.steps, RoundLog())
        agent, scale = state.agent, lambda raw: state.observations.normalize(torch.from_numpy(raw))
    hidden: Any = None

    def act(seen: np.ndarray, masks: ActionMasks, mask: np.ndarray, first: bool) -> np.ndarray:
        nonlocal hidden
        hidden = agent.initial_hidden(len(seen)) if first else hidden
        decision = agent.act(scale(seen), hidden, masks, None)
        hidden = decision.hidden
        return decision.actions

    return act


# --- Stable-Baselines3 -------------------------------------------------------------------------


class ForSB3(VecEnv):
    """A native vector as Stable-Baselines3 wants it: new episodes begin with the last step."""

    def __init__(self, envs: Any, key: int) -> None:
        self.native = envs
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        envs.reset(seed=key * envs.num_envs)

    def reset(self) -> np.ndarray:
        return self.native.reset()[0]

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        seen, rewards, ended, _, _ = self.native.step(self.actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if ended.all():
            infos = [{"terminal_observation": last} for last in seen]
            seen = self.reset()
        return seen, rewards, ended, infos

    def env_method(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return list(getattr(self.native, name)())

    def has_attr(self, name: str) -> bool:
        return hasattr(self.native, name)

    def get_attr(self, name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.native, name, None)] * self.num_envs

    def set_attr(self, name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs

    def close(self) -> None:
        self.native.close()


def sb3(kind: Any, policy: str, actions: str, arena: Arena, key: int, **more: Any) -> Any:
    model = kind(
        policy,
        ForSB3(arena.envs(actions), key),
        learning_rate=arena.learning_rate,
        n_steps=arena.steps,
        batch_size=arena.num_envs * arena.steps // MINIBATCHES,
        n_epochs=EPOCHS,
        gamma=1.0,
        ent_coef=0.02,
        seed=key,
        device="cpu",
        **more,
    )
    return model.learn(arena.total)


def maskable(actions: str) -> Callable[[Arena, int], Policy]:
    def learn(arena: Arena, key: int) -> Policy:
        model = sb3(MaskablePPO, "MlpPolicy", actions, arena, key)

        def act(seen: np.ndarray, masks: ActionMasks, mask: np.ndarray, first: bool) -> np.ndarray:
            return model.predict(seen, action_masks=mask, deterministic=True)[0]

        return act

    return learn


def recurrent(arena: Arena, key: int) -> Policy:
    sizes = {"lstm_hidden_size": 64}
    model = sb3(RecurrentPPO, "MlpLstmPolicy", "factored", arena, key, policy_kwargs=sizes)
    state: Any = None

    def act(seen: np.ndarray, masks: ActionMasks, mask: np.ndarray, first: bool) -> np.ndarray:
        nonlocal state
        begins = np.full(len(seen), first)
        actions, state = model.predict(
            seen, None if first else state, episode_start=begins, deterministic=True
        )
        return actions

    return act


# --- TorchRL, and the single file --------------------------------------------------------------


def torchrl(arena: Arena, key: int) -> Policy:
    """Its losses, advantages and distribution, on episodes of a native vector."""
    torch.manual_seed(key)
    envs = arena.envs("flat")
    start = envs.reset(seed=key * envs.num_envs)
    width, actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    learner = gym_torchrl.Learner(width, actions, arena.learning_rate)
    for _ in range(arena.rounds):
        learner.update(_episodes(envs, learner, start))
        start = envs.reset()

    def act(seen: np.ndarray, masks: ActionMasks, mask: np.ndarray, first: bool) -> np.ndarray:
        logits = learner.actor.module[0](torch.from_numpy(seen))
        assert logits.shape == mask.shape
        return logits.masked_fill(~torch.from_numpy(mask), -torch.inf).argmax(-1).numpy()

    return act


@torch.no_grad()
def _episodes(envs: Any, learner: gym_torchrl.Learner, start: tuple) -> TensorDict:
    """One episode of every copy, [E, T]."""
    steps, over = [], False
    step = _looked_at(*start)
    while not over:
        step = learner.actor(step)
        seen, rewards, ended, _, info = envs.step(step["action"].numpy())
        over = bool(ended.all())
        following = _looked_at(seen, info)
        done = torch.from_numpy(ended)[:, None]
        result = {"reward": torch.from_numpy(rewards).float()[:, None]}
        step["next"] = following.clone().update(result | {"done": done, "terminated": done})
        steps.append(step)
        step = following
    return torch.stack(steps, dim=1)


def _looked_at(seen: np.ndarray, info: dict[str, Any]) -> TensorDict:
    mask = torch.from_numpy(info["action_mask"]).bool()
    return TensorDict(
        {"observation": torch.from_numpy(seen), "action_mask": mask}, batch_size=len(seen)
    )


def cleanrl(arena: Arena, key: int) -> Policy:
    args = gym_cleanrl.Args(
        env_id=arena.env_id,
        num_envs=arena.num_envs,
        total_steps=arena.total,
        seed=key * arena.num_envs,
        learning_rate=arena.learning_rate,
    )
    agent = gym_cleanrl.train(args, **arena.settings)

    def act(seen: np.ndarray, masks: ActionMasks, mask: np.ndarray, first: bool) -> np.ndarray:
        return agent.policy(torch.from_numpy(seen), torch.from_numpy(mask)).probs.argmax(-1).numpy()

    return act


# --- without learning ---------------------------------------------------------------------------


def static(arena: Arena, key: int) -> Policy:
    return lambda seen, masks, mask, first: wait(len(seen))


def uniform(arena: Arena, key: int) -> Policy:
    rng = np.random.default_rng(key)
    return lambda seen, masks, mask, first: np.array(
        [rng.choice(np.flatnonzero(row)) for row in mask]
    )


AGENTS: dict[str, tuple[str, Callable[[Arena, int], Policy]]] = {
    "static": ("factored", static),
    "uniform": ("flat", uniform),
    "ours": ("factored", ours),
    "maskable-flat": ("flat", maskable("flat")),
    "maskable-factored": ("factored", maskable("factored")),
    "recurrent": ("factored", recurrent),
    "torchrl": ("flat", torchrl),
    "cleanrl": ("flat", cleanrl),
}


def mean_return(arena: Arena, actions: str, policy: Policy) -> tuple[float, float]:
    """On the test keys; and the share of decisions that were illegal."""
    envs = arena.envs(actions, arena.test_envs)
    keys = [FIRST_TEST_KEY + i for i in range(arena.test_envs)]
    seen, _ = envs.reset(options={"keys": keys})
    total, illegal, first, over = 0.0, [], True, False
    while not over:
        with torch.no_grad():
            chosen = policy(seen, envs._copies.masks, envs.action_masks(), first)
        seen, rewards, ended, _, info = envs.step(chosen)
        total, first, over = total + float(rewards.mean()), False, bool(ended.all())
        illegal.append(info["illegal"].mean())
    return total, float(np.mean(illegal))


def run(name: str, arena: Arena, key: int) -> dict[str, Any]:
    actions, learn = AGENTS[name]
    began = time.process_time()
    policy = learn(arena, key)
    seconds = time.process_time() - began
    score, illegal = mean_return(arena, actions, policy)
    return {"return": score, "illegal": illegal, "cpu_seconds": seconds}


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    returns = np.array([row["return"] for row in rows])
    half = 0.0
    if len(returns) > 1:
        half = stats.t.ppf(0.975, len(returns) - 1) * returns.std(ddof=1) / np.sqrt(len(returns))
    means = {name: np.mean([row[name] for row in rows]) for name in ("illegal", "cpu_seconds")}
    result = {"return": returns.mean(), "low": returns.mean() - half, "high": returns.mean() + half}
    return {name: round(float(value), 4) for name, value in (result | means).items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("problem", choices=ARENAS)
    parser.add_argument("--keys", type=int, default=5)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--agents", default=",".join(AGENTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    arena = ARENAS[options.problem]
    if options.rounds:
        arena = Arena(**{**vars(arena), "rounds": options.rounds})
    there = options.out is not None and options.out.exists()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if there else []
    for key in range(options.keys):
        for name in options.agents.split(","):
            what = {"problem": options.problem, "agent": name, "key": key, "steps": arena.total}
            if any(what.items() <= row.items() for row in rows):
                continue
            rows.append(what | run(name, arena, key))
            print(json.dumps(rows[-1]), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    own = [r for r in rows if r["problem"] == options.problem and r["steps"] == arena.total]
    names = [name for name in AGENTS if any(row["agent"] == name for row in own)]
    result = {name: summary([row for row in own if row["agent"] == name]) for name in names}
    print(json.dumps({"problem": options.problem, "steps": arena.total, "agents": result}))


if __name__ == "__main__":
    main()
