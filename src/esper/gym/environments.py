"""A problem as an environment of Gymnasium, and many copies of it as one vector environment.

`gymnasium.make` and `make_vec` call `environment` and `vector_environment`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from esper.gym.problem import ENCODINGS, AnalyticProblem, Observed, Problem
from esper.leyline import ConfigError
from esper.leyline.constants import MOST_KEY

RENDER_MODES = ["ansi"]
KEYS = 2**31


def environment(
    *, problem: str, actions: str = "factored", render_mode: str | None = None, **settings: Any
) -> "SlotsEnv":
    return SlotsEnv(_problem(problem, 1, settings), actions, render_mode)


def vector_environment(
    num_envs: int = 1,
    *,
    problem: str,
    actions: str = "factored",
    render_mode: str | None = None,
    **settings: Any,
) -> "SlotsVectorEnv":
    return SlotsVectorEnv(_problem(problem, num_envs, settings), actions, render_mode)


def _problem(name: str, n_envs: int, settings: Mapping[str, Any]) -> Problem:
    if name == "analytic":
        return AnalyticProblem(n_envs, **settings)
    # Only hosts need torch.
    from esper.gym.growth import GrowthProblem

    return GrowthProblem(n_envs, **settings)


class _Copies:
    """The copies of a problem, with encoded actions."""

    def __init__(self, problem: Problem, actions: str, render_mode: str | None) -> None:
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise ConfigError(f"render_mode must be {RENDER_MODES[0]}, got {render_mode!r}")
        if actions not in ENCODINGS:
            raise ConfigError(f"actions must be {' or '.join(ENCODINGS)}, got {actions!r}")
        self.problem, self.render_mode = problem, render_mode
        self.encoding = ENCODINGS[actions](problem.sizes)
        self.over = True

    def reset(self, keys: Sequence[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        self.keys, self.over = np.array(keys), False
        return self._show(self.problem.reset(keys), np.zeros(len(keys), dtype=bool))

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Observations, rewards, info; illegal decisions become WAIT and are marked."""
        if self.over:
            raise ConfigError("the episode is over; call reset before the next step")
        if len(actions) != self.problem.n_envs:
            raise ConfigError(f"step takes {self.problem.n_envs} actions, one for each environment")
        rows = self.encoding.rows(actions)
        illegal = ~self.masks.allows(rows)
        rows = np.where(illegal[:, None], 0, rows)  # all zeros is WAIT
        observed, rewards, self.over = self.problem.step(rows)
        observations, info = self._show(observed, illegal)
        return observations, rewards, info

    def _show(
        self, observed: Observed, illegal: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        self.masks = observed.masks
        info = {"action_mask": self.mask().astype(np.int8), "illegal": illegal, "key": self.keys}
        return observed.observations, info | dict(observed.info)

    def mask(self) -> np.ndarray:
        return self.encoding.mask(self.masks)

    def render(self) -> tuple[Any, ...] | None:
        if self.render_mode is None:
            return None
        return tuple(self.problem.text(env) for env in range(self.problem.n_envs))


class SlotsEnv(gymnasium.Env[np.ndarray, Any]):
    """One copy. `reset(options={"key": K})` starts the episode with that key; otherwise the key is
    drawn from the environment's own generator. Episodes always terminate and never truncate."""

    metadata = {"render_modes": RENDER_MODES, "render_fps": 4}  # noqa: RUF012

    def __init__(self, problem: Problem, actions: str, render_mode: str | None) -> None:
        self._copies = _Copies(problem, actions, render_mode)
        self.render_mode = render_mode
        self.observation_space = problem.observation_space
        self.action_space = self._copies.encoding.space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        key = int(self.np_random.integers(KEYS))
        given = _option(options, "key")
        observations, info = self._copies.reset(
            [key if given is None else _check_key("the option key", given)]
        )
        return observations[0], _first(info)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observations, rewards, info = self._copies.step(np.asarray(action)[None])
        return observations[0], float(rewards[0]), self._copies.over, False, _first(info)

    def action_masks(self) -> np.ndarray:
        """bool [n]: legal choices, one head after another."""
        return self._copies.mask()[0]

    def render(self) -> Any:
        frames = self._copies.render()
        return None if frames is None else frames[0]


class SlotsVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """Many copies, as one population. Copy i behaves like a single environment with seed + i.

    All episodes end at once; the next step starts new ones and ignores its actions.
    `reset(options={"keys": [...]})` starts the episodes with those keys.
    """

    metadata = {  # noqa: RUF012
        "render_modes": RENDER_MODES,
        "render_fps": 4,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(self, problem: Problem, actions: str, render_mode: str | None) -> None:
        if problem.n_envs < 1:
            raise ConfigError(f"num_envs must be at least 1, got {problem.n_envs}")
        self.num_envs = problem.n_envs
        self._copies = _Copies(problem, actions, render_mode)
        self.render_mode = render_mode
        self.single_observation_space = problem.observation_space
        self.single_action_space = self._copies.encoding.space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._generators = [seeding.np_random(None)[0] for _ in range(self.num_envs)]

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
            _check_length("seeds", seeds, self.num_envs)
            self._generators = [
                old if each is None else seeding.np_random(each)[0]
                for each, old in zip(seeds, self._generators, strict=True)
            ]
            super().reset(seed=seeds[0])
        keys = [int(each.integers(KEYS)) for each in self._generators]
        given = _option(options, "keys")
        if given is not None:
            _check_length("keys", given, self.num_envs)
            keys = [_check_key("each of the option keys", key) for key in given]
        observations, info = self._copies.reset(keys)
        return observations, _marked(info)

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        truncated = np.zeros(self.num_envs, dtype=bool)
        if self._copies.over:
            observations, info = self.reset()
            return observations, np.zeros(self.num_envs), truncated.copy(), truncated, info
        observations, rewards, info = self._copies.step(actions)
        terminated = np.full(self.num_envs, self._copies.over)
        return observations, rewards, terminated, truncated, _marked(info)

    def action_masks(self) -> np.ndarray:
        """bool [E, n]: legal choices, a row for each copy."""
        return self._copies.mask()

    def render(self) -> tuple[Any, ...] | None:
        return self._copies.render()


def _first(info: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The information of the only copy: plain numbers, and arrays where there are several."""
    return {name: value[0] if value.ndim > 1 else value[0].item() for name, value in info.items()}


def _marked(info: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """With the arrays by which Gymnasium marks whose information it is: here always all copies."""
    return {**info, **{f"_{name}": np.ones(len(value), dtype=bool) for name, value in info.items()}}


def _option(options: dict[str, Any] | None, name: str) -> Any:
    for other in options or {}:
        if other != name:
            raise ConfigError(f"reset has no option {other!r}; use {name!r}")
    return (options or {}).get(name)


def _check_length(name: str, values: Any, length: int) -> None:
    if not isinstance(values, Sequence | np.ndarray) or len(values) != length:
        raise ConfigError(f"{name} must be a list of {length}, one for each environment")


def _check_key(name: str, value: Any) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not 0 <= value <= MOST_KEY:
        raise ConfigError(f"{name} must be a whole number from 0 to {MOST_KEY}, got {value!r}")
    return int(value)
