from dataclasses import replace

import numpy as np
import pytest

from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import (
    BLEND_NAMES,
    HEAD_NAMES,
    IS_BLENDED,
    LEGAL_TRANSITION,
    ConfigError,
    History,
    InvalidStateMachineError,
    LifecycleOp,
    SeedStage,
)
from esper.leyline.events import SeedCulled, SeedFossilized, SeedGerminated, SeedStageChanged
from esper.leyline.growth_settings import Budget
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.controllers.simple import RandomController
from esper.tamiyo.situation import wait
from esper.tolaria.engine.event_log import Transition
from esper.tolaria.engine.garden import Validation
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.run import GrowthEnv, play, settle
from helpers import (
    break_host,
    digits_env,
    episode_settings,
    network_of,
    small_digits,
    trained_params,
)

BOTH = pytest.mark.parametrize("kind", ["looped", "fused"])
EARLY = "1 GERMINATE r0c0 branch linear\nauto FOSSILIZE"


def transitions(env: GrowthEnv, controller: object) -> list[Transition]:
    seen: list[Transition] = []
    play(env, controller, on_step=seen.append)  # type: ignore[arg-type]
    return seen


def test_gymnasium_order() -> None:
    env = digits_env([1], max_steps=3)
    first = env.reset()
    assert first.step == 0
    actions = np.array([[1, default_catalogue().index("norm"), 0, LifecycleOp.GERMINATE]])
    transition = env.step(actions)
    assert transition.before is first
    assert first.table.stage[0, 1] == SeedStage.DORMANT, "the past does not change"
    assert transition.after.table.stage[0, 1] == SeedStage.TRAINING
    assert not transition.after.masks.slot[0, LifecycleOp.GERMINATE, 1], "masks are post-action"
    assert transition.after.step == 1
    env.step(wait(1))
    last = env.step(wait(1))
    assert last.truncated[0]
    assert not last.terminated[0]
    assert not last.after.running[0]
    with pytest.raises(InvalidStateMachineError, match="over"):
        env.step(wait(1))


@BOTH
def test_an_illegal_action_raises_and_changes_nothing(kind: str) -> None:
    env = digits_env([1, 2], max_steps=3, kind=kind)
    env.reset()
    stage = env.table.stage.copy()
    actions = wait(2)
    actions[0] = [0, default_catalogue().index("norm"), 0, LifecycleOp.GERMINATE]
    actions[1] = [0, 0, 0, LifecycleOp.CULL]
    with pytest.raises(InvalidStateMachineError, match="environment 1"):
        env.step(actions)
    assert np.array_equal(env.table.stage, stage)
    assert network_of(env, 0).slot(0).seed is None
    assert env.step_count == 0


@BOTH
def test_masks_allow_exactly_what_can_be_executed(kind: str) -> None:
    """Every action of the whole space, at many situations: allowed means it works."""
    env = digits_env([1], max_steps=12, train=64, budget=Budget(params=2.2), kind=kind)
    controller = RandomController()
    situation = env.reset()
    n_blueprints, tried = len(situation.catalogue), 0
    while situation.running.any():
        grid = np.stack(
            np.meshgrid(range(3), range(n_blueprints), range(3), range(4), indexing="ij"), axis=-1
        ).reshape(-1, len(HEAD_NAMES))
        masks = situation.masks
        for action in grid:
            slot, blueprint, _, op = action
            legal = bool(masks.allows(action[None])[0])
            stage = SeedStage(situation.table.stage[0, slot])
            possible = {
                LifecycleOp.WAIT: True,
                LifecycleOp.GERMINATE: stage == SeedStage.DORMANT
                and env.garden.limits.fits[slot, blueprint]
                and situation.total_params[0] + env.garden.limits.params[slot, blueprint]
                <= 2.2 * env.garden.host_params,
                LifecycleOp.CULL: LEGAL_TRANSITION[stage, SeedStage.CULLED],
                LifecycleOp.FOSSILIZE: stage == SeedStage.HOLDING
                and situation.table.contribution[0, slot] >= 1.0,
            }[LifecycleOp(op)]
            assert legal == bool(possible), (action, stage)
            tried += 1
        situation = env.step(controller.act(situation)).after
    assert tried > 5000


@BOTH
def test_random_episodes_never_refuse_what_the_masks_allow_and_keep_the_books(kind: str) -> None:
    listener = History()
    env = digits_env(
        [1, 2, 3, 4], max_steps=20, train=64, recorder=listener, on_panic="continue", kind=kind
    )

    def audit(transition: Transition) -> None:
        table = transition.after.table
        for e in range(env.n_envs):
            network, seeds = network_of(env, e), 0
            for s, slot in network.each_slot():
                assert (slot.seed is not None) == bool(table.holds_seed[e, s])
                if slot.seed is not None:
                    assert slot.stage == table.stage[e, s]
                    assert slot.alpha == pytest.approx(table.alpha[e, s])
                    own = sum(p.numel() for p in network.seed_parameters(s))
                    assert own == table.params[e, s], "parameters are counted, gates too"
                    seeds += own
            assert transition.after.total_params[e] == env.garden.host_params + seeds
            assert trained_params(env, e) == transition.after.total_params[e], "all are trained"

    play(env, RandomController(), on_step=audit)
    for event in listener.events:
        if isinstance(event, SeedStageChanged):
            assert LEGAL_TRANSITION[SeedStage[event.from_stage], SeedStage[event.to_stage]]
    counts = env.garden.counts
    assert sum(isinstance(e, SeedGerminated) for e in listener.events) == counts["germinated"].sum()
    assert sum(isinstance(e, SeedCulled) for e in listener.events) == counts["culled"].sum()
    assert counts["culled"].sum() > 5


@BOTH
def test_contributions_are_measured_by_taking_a_seed_out(kind: str) -> None:
    env = digits_env([1], max_steps=14, kind=kind, counterfactuals="all")
    situation = env.reset()
    controller = ScriptedController(EARLY, "x")
    checked = 0
    while situation.running.any():
        situation = env.step(controller.act(situation)).after
        table = situation.table
        acting = IS_BLENDED[table.stage[0]]
        if table.stage[0, 0] in (SeedStage.HOLDING, SeedStage.FOSSILIZED) and (
            table.epochs_in_stage[0, 0] > 0
        ):
            with_and_without = np.array([[True] * 3, [False, True, True]])
            score = env.population.evaluate(np.array([0, 0]), with_and_without).score
            assert table.contribution[0, 0] == pytest.approx(score[0] - score[1])
            checked += 1
        assert np.isnan(table.contribution[0, ~acting]).all(), "unmeasured is not zero"
    assert checked >= 3


@BOTH
def test_a_blending_seed_has_a_counterfactual_from_its_first_epoch(kind: str) -> None:
    env = digits_env([1], max_steps=8, kind=kind)
    rows = transitions(env, ScriptedController(EARLY, "x"))
    first = next(t for t in rows if t.before.table.stage[0, 0] == SeedStage.BLENDING)
    assert first.before.table.alpha[0, 0] == pytest.approx(0.2)
    assert np.isfinite(first.after.table.contribution[0, 0])


@BOTH
def test_a_gated_blend_reports_what_it_applies(kind: str) -> None:
    env = digits_env([1], max_steps=9, kind=kind)
    script = "1 GERMINATE r0c0 conv_light gated"
    env_rows = []
    situation = env.reset()
    controller = ScriptedController(script, "x")
    with_gate = env.garden.valve_params[0, default_catalogue().index("conv_light")]
    while situation.running.any():
        before = situation
        situation = env.step(controller.act(situation)).after
        env_rows.append((before, situation))
    params = [after.table.params[0, 0] for _, after in env_rows]
    held = [after.table.stage[0, 0] == SeedStage.HOLDING for _, after in env_rows]
    assert params[0] - params[-1] == with_gate
    assert held[-1]


@BOTH
def test_fossils_survive_everything(kind: str) -> None:
    env = digits_env([1], max_steps=16, on_panic="continue", kind=kind)
    listener = History()
    env.recorder = env.garden.recorder = listener
    rows = transitions(env, ScriptedController(EARLY, "x"))
    fossil = next(i for i, t in enumerate(rows) if t.after.table.stage[0, 0] == 7)
    break_host(env, 0)
    assert any(isinstance(e, SeedFossilized) for e in listener.events)
    assert all(t.after.table.stage[0, 0] == SeedStage.FOSSILIZED for t in rows[fossil:])
    assert not env.situation.masks.op[0, LifecycleOp.CULL]  # type: ignore[union-attr]
    env.settle(np.array([True]))
    assert env.table.stage[0, 0] == SeedStage.FOSSILIZED


@BOTH
def test_trajectories_do_not_depend_on_neighbours(kind: str) -> None:
    def rows(keys: list[int], env_index: int) -> list[dict[str, object]]:
        listener = History()
        env = digits_env(
            keys, max_steps=12, train=64, recorder=listener, on_panic="continue", kind=kind
        )
        play(env, RandomController())
        return [{**r, "env": 0} for r in listener.rows if r["env"] == env_index]

    # Of two with one key the second is grown otherwise.
    assert rows([11], 0) == rows([5, 11, 8], 1) == rows([11, 11], 0)


@BOTH
def test_a_budget_is_never_exceeded(kind: str) -> None:
    for budget in (Budget(params=1.3), Budget(macs=1.2), Budget(params=1.1, macs=1.1)):
        env = digits_env(
            [1, 2], max_steps=15, train=64, budget=budget, on_panic="continue", kind=kind
        )
        for t in transitions(env, RandomController()):
            macs = env.garden.host_macs + t.after.table.macs.sum(axis=1)
            if budget.params:
                assert (t.after.total_params <= budget.params * env.garden.host_params).all()
            if budget.macs:
                assert (macs <= budget.macs * env.garden.host_macs).all()
    with pytest.raises(ConfigError, match="too small for any seed"):
        digits_env([1], budget=Budget(params=1.0, macs=1.0))


def test_a_budget_may_be_a_number_of_parameters() -> None:
    assert Budget(params=1200, macs=2.0).left_for_seeds(496, 1000) == (704, 1000)
    assert Budget(params=100.0).left_for_seeds(496, 1000) == (99 * 496, None)
    with pytest.raises(ConfigError, match="400 parameters is below the host itself, which has 496"):
        digits_env([1], budget=Budget(params=400))


@pytest.mark.parametrize("bad", [{"params": 0.9}, {"macs": -1.0}, {"params": float("nan")}])
def test_a_budget_below_the_host_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="below the host itself"):
        Budget(**bad)


@BOTH
def test_max_seeds_is_kept(kind: str) -> None:
    env = digits_env([1], max_steps=15, train=64, max_seeds=1, on_panic="continue", kind=kind)
    for t in transitions(env, RandomController()):
        assert t.after.table.holds_seed.sum() <= 1


@BOTH
def test_joint_incubation_acts_from_birth(kind: str) -> None:
    env = digits_env([1], 4, kind=kind, incubation="joint")
    rows = transitions(env, ScriptedController("1 GERMINATE r0c0 branch linear", "x"))
    assert rows[0].after.table.stage[0, 0] == SeedStage.BLENDING
    assert rows[0].after.table.alpha[0, 0] == 1.0
    # It was trained in the epoch before, and taking it out is measured at once.
    assert rows[0].after.table.contribution[0, 0] != 0.0


@BOTH
def test_a_topology_is_there_from_the_first_epoch(kind: str) -> None:
    branch = default_catalogue().index("branch")
    env = digits_env([1], max_steps=2, keep_best=True, kind=kind, topology=((0, branch),))
    play(env, make_controller("static"))
    outcome = settle(env, np.array([True]), task="digits", controller="static")[0]
    assert [(s.slot_id, s.blueprint, s.stage) for s in outcome.seeds] == [
        ("r0c0", "branch", "FOSSILIZED")
    ]
    assert outcome.params == 986
    assert outcome.germinated == 0


@BOTH
def test_settling_brings_the_best_network_back(kind: str) -> None:
    env = digits_env([3], max_steps=14, keep_best=True, kind=kind)
    listener = History()
    env.recorder = env.garden.recorder = listener
    play(env, ScriptedController(EARLY, "x"))
    outcome = settle(env, np.array([True]), task="digits", controller="x")[0]
    best = max(listener.rows, key=lambda row: row["val_score"])  # type: ignore[arg-type, return-value]
    assert outcome.best_step == best["step"]
    assert outcome.val_score is not None
    assert outcome.val_score >= best["val_score"]  # type: ignore[operator]
    whole = env.population.evaluate(np.array([0]), np.ones((1, 3), dtype=bool))
    assert whole.score[0] == outcome.val_score
    assert all(s.stage == "FOSSILIZED" or s.counterfactual_contribution > 0 for s in outcome.seeds)  # type: ignore[operator]


@pytest.mark.parametrize("task_name", ["digits", pytest.param("pydocs", marks=pytest.mark.soak)])
def test_the_heuristic_goes_through_full_lifecycles(task_name: str) -> None:
    from dataclasses import replace
    from pathlib import Path

    from esper.tamiyo.controllers.heuristic import HeuristicConfig, HeuristicController
    from esper.tolaria.tasks import find_task

    if task_name == "digits":
        task, data = small_digits(train=400)
    else:
        task = replace(find_task("pydocs"), batches_per_epoch=6)
        whole = task.load(Path("unused"))
        data = replace(whole, val_x=whole.val_x[:64], val_y=whole.val_y[:64])
    listener = History()
    population = LoopedPopulation(task.recipe(data, default_catalogue()), [0])
    env = GrowthEnv(population, episode_settings(40, on_panic="continue"), recorder=listener)
    play(env, HeuristicController(HeuristicConfig(blend=BLEND_NAMES[1])))
    stages = {e.to_stage for e in listener.events if isinstance(e, SeedStageChanged)}
    assert {"GERMINATED", "TRAINING", "BLENDING", "HOLDING"} <= stages
    assert stages & {"FOSSILIZED", "CULLED"}


def test_where_the_rate_decays_the_latest_within_chance_of_the_best_is_kept() -> None:
    env = digits_env([1, 2], max_steps=3, keep_best=True)
    env.prefer_later, env.answers_per_sample = True, 1
    env.start()
    # Of 900 answers 90 % right: chance is one point, and a little more below that.
    for step, scores in enumerate(([90.0, 90.0], [89.1, 88.8])):
        env.step_count = step
        validation = replace(Validation.nothing(2, 3, samples=900), score=np.array(scores))
        env._keep_best(validation, np.ones(2, dtype=bool))
    assert [saved.step for saved in env.best if saved] == [1, 0]
    assert env.best_score.tolist() == [90.0, 90.0]
