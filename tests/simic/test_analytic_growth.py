"""The analytic growth problem: its optimum is what its own environment pays, and no more."""

from itertools import product

import numpy as np
import pytest

from esper.leyline import ActionMasks, LifecycleOp, generator
from esper.simic import analytic
from esper.simic.analytic import HORIZON, STATES, AnalyticGrowth, solve


def returns_of(policy, envs: int, key: int = 0) -> np.ndarray:
    env = AnalyticGrowth(envs, key)
    _, masks = env.reset()
    total = np.zeros(envs)
    for time in range(HORIZON):
        _, masks, rewards, terminated, truncated = env.step(policy(time, env.states, masks))
        total += rewards
    assert terminated.all()
    assert not truncated.any()
    return total


def random_policy(key: int):
    rng = generator(key, "random-policy")

    def act(time: int, states: np.ndarray, masks: ActionMasks) -> np.ndarray:
        actions = np.zeros((len(states), 4), dtype=np.int64)
        for env, action in enumerate(actions):
            op = rng.choice(np.flatnonzero(masks.op[env]))
            slot = rng.choice(np.flatnonzero(masks.slot[env, op]))
            blueprint = rng.choice(np.flatnonzero(masks.blueprint[env, slot]))
            action[:] = slot, blueprint, rng.integers(3), op
        return actions

    return act


def test_the_solution_earns_its_optimum_in_the_environment():
    solution = solve()
    returns = returns_of(lambda time, states, _: solution.act(time, states), envs=4000)
    error = returns.std() / np.sqrt(len(returns))
    assert returns.mean() == pytest.approx(solution.optimum, abs=4 * error)
    assert error < 0.03 * solution.optimum


def test_waiting_earns_nothing_and_chance_loses():
    solution = solve()
    wait = returns_of(lambda time, states, _: np.zeros((len(states), 4), dtype=int), envs=3)
    assert (wait == 0).all()
    assert returns_of(random_policy(0), envs=200).mean() < 0.0 < solution.optimum


def test_the_solution_waits_grows_keeps_the_good_and_culls_the_bad():
    solution = solve()
    dormant = np.zeros((1, 2), dtype=int)
    ops = [solution.act(time, dormant)[0, 3] for time in range(HORIZON)]
    assert ops[0] == LifecycleOp.WAIT
    assert LifecycleOp.GERMINATE in ops
    assert ops[-1] == LifecycleOp.WAIT
    index = {(s.stage.name, s.blueprint, s.good): i for i, s in enumerate(STATES)}
    good, bad = index["HOLDING", 1, True], index["HOLDING", 1, False]
    done = index["FOSSILIZED", 2, True]
    assert solution.act(6, np.array([[good, done]]))[0].tolist() == [0, 0, 0, LifecycleOp.FOSSILIZE]
    assert solution.act(6, np.array([[bad, done]]))[0].tolist() == [0, 0, 0, LifecycleOp.CULL]


def test_the_optimum_equals_brute_force_over_the_last_steps():
    """An independent recursion over single states and luck, written from the rules."""
    solution = solve()

    def best(time: int, pair: tuple[int, int]) -> float:
        if time == HORIZON:
            return 0.0
        env = AnalyticGrowth(1)
        env.reset()
        env.time, env.states = time, np.array([pair])
        masks = env._masks()
        options = []
        for action in product(range(2), range(3), range(3), range(4)):
            if not masks.allows(np.array([action]))[0]:
                continue
            if action[3] != LifecycleOp.GERMINATE and action[1:3] != (0, 0):
                continue
            options.append(expected(time, pair, np.array([action])))
        return max(options)

    def expected(time: int, pair: tuple[int, int], action: np.ndarray) -> float:
        total = 0.0
        for luck in product((0.0, 1.0), repeat=2):
            env = AnalyticGrowth(1)
            env.reset()
            env.time, env.states = time, np.array([pair])
            env._luck[:] = luck
            acted = AnalyticGrowth(1)
            acted.reset()
            acted.time, acted.states = time, np.array([pair])
            acted._apply(action)
            chances = analytic._CHANCE[acted.states[0]]
            # Luck 0 is always below a positive chance, luck 1 never is.
            weight = np.prod([c if u == 0.0 else 1 - c for c, u in zip(chances, luck, strict=True)])
            if weight == 0.0:
                continue
            _, _, rewards, _, _ = env.step(action)
            total += weight * (float(rewards[0]) + best(time + 1, tuple(env.states[0])))
        return total

    rng = np.random.default_rng(0)
    for pair in rng.integers(len(STATES), size=(6, 2)):
        start = tuple(int(i) for i in pair)
        assert best(HORIZON - 2, start) == pytest.approx(
            solution.value[(HORIZON - 2, *start)], abs=1e-5
        )


def test_an_environment_does_not_depend_on_its_neighbours():
    few, many = AnalyticGrowth(2, key=3), AnalyticGrowth(9, key=3)
    few.reset(4)
    many.reset(4)
    solution = solve()
    for time in range(HORIZON):
        first = few.step(solution.act(time, few.states))
        second = many.step(solution.act(time, many.states))
        np.testing.assert_array_equal(first[0], second[0][:2])
        np.testing.assert_array_equal(first[2], second[2][:2])


def test_an_illegal_action_and_a_step_too_many_are_refused():
    env = AnalyticGrowth(1)
    env.reset()
    with pytest.raises(ValueError, match="illegal"):
        env.step(np.array([[0, 2, 0, LifecycleOp.GERMINATE]]))
    for _ in range(HORIZON):
        env.step(np.zeros((1, 4), dtype=int))
    with pytest.raises(RuntimeError, match="over"):
        env.step(np.zeros((1, 4), dtype=int))
