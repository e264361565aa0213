"""A problem as an environment of Gymnasium, and many copies of it as one vector environment.

`growth`, `growth_vector`, `analytic` and `analytic_vector` are what `gymnasium.make` and `make_vec`
call. Only hosts need torch, so it is loaded with the first of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from esper.gym.analytic import AnalyticProblem
from esper.gym.choices import make_choices
from esper.gym.problem import Problem, Seen
from esper.gym.rendering import picture, text
from esper.leyline import OP, ConfigError, LifecycleOp
from esper.leyline.constants import MOST_KEY

RENDER_MODES = ("ansi", "rgb_array")
KEYS = 2**31


def growth(
    *, actions: str = "factored", render_mode: str | None = None, **settings: Any
) -> "SlotsEnv":
    """One host training; `settings` are those of `GrowthProblem`."""
    from esper.gym.growth import GrowthProblem

    return SlotsEnv(GrowthProblem(1, **settings), actions, render_mode)


def growth_vector(
    num_envs: int = 1,
    *,
    actions: str = "factored",
    render_mode: str | None = None,
    **settings: Any,
) -> "SlotsVectorEnv":
    """Many host trainings as one population; `settings` are those of `GrowthProblem`."""
    from esper.gym.growth import GrowthProblem

    return SlotsVectorEnv(GrowthProblem(num_envs, **settings), actions, render_mode)


def analytic(*, actions: str = "factored", render_mode: str | None = None) -> "SlotsEnv":
    return SlotsEnv(AnalyticProblem(1), actions, render_mode)


def analytic_vector(
    num_envs: int = 1, *, actions: str = "factored", render_mode: str | None = None
) -> "SlotsVectorEnv":
    return SlotsVectorEnv(AnalyticProblem(num_envs), actions, render_mode)


class _Copies:
    """The copies of a problem, with actions and facts as agents want them."""

    def __init__(self, problem: Problem, actions: str, render_mode: str | None) -> None:
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise ConfigError(f"render_mode is {' or '.join(RENDER_MODES)}, got {render_mode!r}")
        self.problem = problem
        self.choices = make_choices(actions, problem.sizes)
        self.render_mode = render_mode
        self.over = True

    def reset(self, keys: Sequence[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        self.keys, self.over = np.array(keys), False
        return self._show(self.problem.reset(keys), np.zeros(len(keys), dtype=bool))

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Observations, rewards, facts; illegal decisions become WAIT and are marked."""
        if self.over:
            raise ConfigError("the episode is over; call reset before the next step")
        if len(actions) != self.problem.n_envs:
            raise ConfigError(f"step takes {self.problem.n_envs} actions, one for each environment")
        rows = self.choices.rows(actions)
        illegal = ~self.masks.allows(rows)
        rows = np.where(illegal[:, None], 0, rows)
        rows[illegal, OP] = LifecycleOp.WAIT
        seen, rewards, self.over = self.problem.step(rows)
        observations, facts = self._show(seen, illegal)
        return observations, rewards, facts

    def _show(self, seen: Seen, illegal: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        self.masks = seen.masks
        facts = {"action_mask": self.mask().astype(np.int8), "illegal": illegal, "key": self.keys}
        return seen.observations, facts | dict(seen.facts)

    def mask(self) -> np.ndarray:
        return self.choices.mask(self.masks)

    def render(self) -> tuple[Any, ...] | None:
        if self.render_mode is None:
            return None
        draw = text if self.render_mode == "ansi" else picture
        return tuple(draw(self.problem.look(env)) for env in range(self.problem.n_envs))


class SlotsEnv(gymnasium.Env[np.ndarray, Any]):
    """One copy. `reset(options={"key": K})` begins the episode with that key; without, the key is
    drawn from the environment's own generator. An episode always terminates, never truncates."""

    metadata = {"render_modes": list(RENDER_MODES), "render_fps": 4}  # noqa: RUF012

    def __init__(self, problem: Problem, actions: str, render_mode: str | None) -> None:
        self._copies = _Copies(problem, actions, render_mode)
        self.render_mode = render_mode
        self.observation_space = problem.observation_space
        self.action_space = self._copies.choices.space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        key = int(self.np_random.integers(KEYS))
        given = _option(options, "key")
        observations, facts = self._copies.reset(
            [key if given is None else _check_key("the option key", given)]
        )
        return observations[0], _first(facts)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observations, rewards, facts = self._copies.step(np.asarray(action)[None])
        return observations[0], float(rewards[0]), self._copies.over, False, _first(facts)

    def action_masks(self) -> np.ndarray:
        """bool[n]: what may be chosen now, the parts of the heads one after another."""
        return self._copies.mask()[0]

    def render(self) -> Any:
        frames = self._copies.render()
        return None if frames is None else frames[0]


class SlotsVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """Many copies, as one population. Copy i is the environment that a single one is with seed + i.

    All episodes end at once; the step after that begins new ones and ignores its actions.
    `reset(options={"keys": [...]})` begins the episodes with those keys.
    """

    metadata = {  # noqa: RUF012
        "render_modes": list(RENDER_MODES),
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
        self.single_action_space = self._copies.choices.space
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
        observations, facts = self._copies.reset(keys)
        return observations, _marked(facts)

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        nobody = np.zeros(self.num_envs, dtype=bool)
        if self._copies.over:
            observations, facts = self.reset()
            return observations, np.zeros(self.num_envs), nobody, nobody.copy(), facts
        observations, rewards, facts = self._copies.step(actions)
        ended = np.full(self.num_envs, self._copies.over)
        return observations, rewards, ended, nobody, _marked(facts)

    def action_masks(self) -> np.ndarray:
        """bool[E, n]: what may be chosen now, a row for each copy."""
        return self._copies.mask()

    def render(self) -> tuple[Any, ...] | None:
        return self._copies.render()


def _first(facts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The facts of the only copy: plain numbers, and arrays where there are several."""
    return {name: value[0] if value.ndim > 1 else value[0].item() for name, value in facts.items()}


def _marked(facts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Gymnasium says beside each fact which copies it is of: here always all of them."""
    everyone = {f"_{name}": np.ones(len(value), dtype=bool) for name, value in facts.items()}
    return {**facts, **everyone}


def _option(options: dict[str, Any] | None, name: str) -> Any:
    for other in options or {}:
        if other != name:
            raise ConfigError(f"no option {other!r} of reset; there is {name!r}")
    return (options or {}).get(name)


def _check_length(name: str, values: Any, length: int) -> None:
    if not isinstance(values, Sequence | np.ndarray) or len(values) != length:
        raise ConfigError(f"{name} must be a list of {length}, one for each environment")


def _check_key(name: str, value: Any) -> int:
    """Raises ConfigError unless `value` can be a key."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not 0 <= value <= MOST_KEY:
        raise ConfigError(f"{name} must be a whole number from 0 to {MOST_KEY}, got {value!r}")
    return int(value)
