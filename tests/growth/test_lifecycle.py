import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.growth.lifecycle import (
    act_from_start,
    age,
    cull,
    failed_checks,
    fossilize,
    gate_checks,
    gate_passes,
    germinate,
    move,
    one_slot,
    tick,
)
from esper.growth.slot_table import SlotTable
from esper.leyline import (
    IS_LIVE,
    LEGAL_TRANSITION,
    GateLevel,
    InvalidStateMachineError,
    SeedStage,
)
from esper.leyline.growth_settings import GrowthSettings

ONE = np.ones(1, dtype=bool)


def seed_table(settings: GrowthSettings | None = None) -> SlotTable:
    table = SlotTable.empty(1, 1)
    germinate(table, 0, 0, blueprint=1, blend=0, params=10, macs=5, score=50.0)
    table.noise[:] = 2.0
    return table


def epoch(
    table: SlotTable,
    settings: GrowthSettings,
    *,
    score: float = 51.0,
    contribution: float = np.nan,
    lasting: bool = False,
) -> list[str]:
    """One epoch as the environment drives it; gives the stages entered."""
    age(table, ONE)
    table.score[table.holds_seed] = score
    table.gradient_ratio[table.holds_seed] = 1.0
    table.contribution[:] = contribution
    return [change.target.name for change in tick(table, settings, ONE, lasting)]


def test_earliest_path_of_a_25_epoch_run() -> None:
    settings = GrowthSettings(steps=25)
    table = seed_table()
    stages, alphas = [], []
    for _ in range(9):
        epoch(table, settings, contribution=2.0)
        stages.append(SeedStage(table.stage[0, 0]).name)
        alphas.append(table.alpha[0, 0])
    # Germinated at the start of epoch e; the list starts at the end of e.
    assert stages == ["TRAINING"] * 3 + ["BLENDING"] * 5 + ["HOLDING"]
    assert alphas == pytest.approx([0, 0, 0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_holding_times_out_at_the_end_of_its_fifth_epoch() -> None:
    settings = GrowthSettings(steps=25)
    table = seed_table()
    while table.stage[0, 0] != SeedStage.HOLDING:
        epoch(table, settings, contribution=0.5)
    ends = [epoch(table, settings, contribution=0.5) for _ in range(5)]
    assert ends == [[], [], [], [], ["CULLED"]]


@pytest.mark.parametrize(("contribution", "stays"), [(0.1, True), (0.0, False), (-3.0, False)])
def test_a_held_seed_that_does_not_help_is_culled(contribution: float, stays: bool) -> None:
    settings = GrowthSettings(steps=25)
    table = seed_table()
    while table.stage[0, 0] != SeedStage.HOLDING:
        epoch(table, settings, contribution=1.0)
    epoch(table, settings, contribution=contribution)
    assert (table.stage[0, 0] == SeedStage.HOLDING) == stays


@pytest.mark.parametrize(
    ("noise", "contribution", "stays"),
    [(2.0, -4.9, True), (2.0, -5.1, False), (0.02, -0.049, True), (0.02, -0.051, False)],
)
def test_a_blending_seed_that_does_harm_beyond_noise_is_culled(
    noise: float, contribution: float, stays: bool
) -> None:
    settings = GrowthSettings(steps=25)
    table = seed_table()
    while table.stage[0, 0] != SeedStage.BLENDING:
        epoch(table, settings)
    table.noise[:] = noise
    epoch(table, settings, contribution=contribution)
    assert (table.stage[0, 0] == SeedStage.BLENDING) == stays


def test_lasting_seeds_have_until_the_end_of_the_run() -> None:
    settings = GrowthSettings(steps=25)
    table = seed_table()
    while table.stage[0, 0] != SeedStage.BLENDING:
        epoch(table, settings)
    reached = [epoch(table, settings, contribution=-50.0, lasting=True) for _ in range(15)]
    assert [stage for stages in reached for stage in stages] == ["HOLDING"]
    table.healthy[:] = False
    assert epoch(table, settings, lasting=True) == ["CULLED"]


def test_a_held_seed_that_was_not_measured_is_not_culled_for_it() -> None:
    settings = GrowthSettings(steps=25)
    table = seed_table()
    while table.stage[0, 0] != SeedStage.HOLDING:
        epoch(table, settings)
    assert epoch(table, settings) == []


def test_cooldown_is_one_epoch_culled_five_embargoed_one_resetting() -> None:
    settings = GrowthSettings(steps=25)
    table = seed_table()
    epoch(table, settings)
    cull(table, one_slot(table, 0, 0), "controller")
    assert table.params[0, 0] == 0
    assert table.blueprint[0, 0] == -1
    stages = []
    for _ in range(7):
        epoch(table, settings)
        stages.append(SeedStage(table.stage[0, 0]).name)
    assert stages == ["EMBARGOED"] * 5 + ["RESETTING", "DORMANT"]
    germinate(table, 0, 0, blueprint=2, blend=0, params=1, macs=1, score=60.0)


def test_an_unhealthy_seed_is_culled_at_once() -> None:
    settings = GrowthSettings(steps=25)
    table = seed_table()
    epoch(table, settings)
    table.healthy[:] = False
    assert epoch(table, settings) == ["CULLED"]


def test_joint_incubation_acts_in_full_from_birth_and_holds_after_its_least_epochs() -> None:
    settings = GrowthSettings(steps=25, incubation="joint")
    table = seed_table()
    changes = act_from_start(table, one_slot(table, 0, 0), settings)
    assert [change.target.name for change in changes] == ["TRAINING", "BLENDING"]
    assert table.alpha[0, 0] == 1.0
    assert [epoch(table, settings, contribution=1.0) for _ in range(3)] == [[], [], ["HOLDING"]]


def test_fossils_are_permanent() -> None:
    settings = GrowthSettings(steps=25)
    table = seed_table()
    while table.stage[0, 0] != SeedStage.HOLDING:
        epoch(table, settings, contribution=2.0)
    fossilize(table, one_slot(table, 0, 0))
    for _ in range(40):
        assert epoch(table, settings, contribution=-50.0) == []
    for target in SeedStage:
        with pytest.raises(InvalidStateMachineError):
            move(table, one_slot(table, 0, 0), target)
    assert table.stage[0, 0] == SeedStage.FOSSILIZED


@pytest.mark.parametrize(
    ("gate", "column", "passing", "failing"),
    [
        (GateLevel.G2, "gradient_ratio", 0.001, 0.0009),
        (GateLevel.G2, "epochs_in_stage", 3, 2),
        (GateLevel.G3, "alpha", 0.95, 0.94),
        (GateLevel.G3, "epochs_in_stage", 3, 2),
        (GateLevel.G5, "contribution", 1.01, 1.0),
        (GateLevel.G5, "noise", 9.9, 10.0),
        (GateLevel.G5, "healthy", True, False),
    ],
)
def test_gate_thresholds(gate: GateLevel, column: str, passing: float, failing: float) -> None:
    settings = GrowthSettings(steps=25)
    table = seed_table()
    table.stage[:] = SeedStage.TRAINING
    table.gradient_ratio[:], table.alpha[:], table.contribution[:] = 1.0, 1.0, 5.0
    table.epochs_in_stage[:] = 9
    getattr(table, column)[:] = passing
    assert gate_passes(gate, table, settings).all()
    getattr(table, column)[:] = failing
    assert not gate_passes(gate, table, settings).any()
    assert len(failed_checks(gate, table, settings, 0, 0)) == 1


@pytest.mark.parametrize("gate", [GateLevel.G2, GateLevel.G5])
def test_what_was_not_measured_fails_the_gate(gate: GateLevel) -> None:
    settings = GrowthSettings(steps=25)
    table = seed_table()
    table.epochs_in_stage[:] = 9
    assert np.isnan(table.contribution).all()
    assert not gate_passes(gate, table, settings).any()
    if gate == GateLevel.G5:
        assert "counterfactual_available" in failed_checks(gate, table, settings, 0, 0)


def test_g0_and_g1() -> None:
    settings = GrowthSettings(steps=5)
    table = SlotTable.empty(1, 2)
    germinate(table, 0, 1, blueprint=0, blend=0, params=1, macs=1, score=0.0)
    for gate in (GateLevel.G0, GateLevel.G1):
        assert gate_passes(gate, table, settings).tolist() == [[False, True]]
        assert len(gate_checks(gate, table, settings)) == 1


def test_timings_scale_with_the_run() -> None:
    assert (GrowthSettings(25).training_epochs, GrowthSettings(25).holding_epochs) == (3, 5)
    assert (GrowthSettings(100).training_epochs, GrowthSettings(100).holding_epochs) == (10, 10)


def test_ten_thousand_random_ops_make_only_legal_transitions() -> None:
    rng = np.random.default_rng(0)
    settings = GrowthSettings(steps=25)
    n_envs, n_slots = 40, 5
    table = SlotTable.empty(n_envs, n_slots)
    running = np.ones(n_envs, dtype=bool)
    ops = 0
    fossils = np.zeros((n_envs, n_slots), dtype=bool)
    while ops < 10_000:
        before = table.stage.copy()
        for env in range(n_envs):
            slot, ops = int(rng.integers(n_slots)), ops + 1
            stage = SeedStage(table.stage[env, slot])
            where = one_slot(table, env, slot)
            choice = rng.integers(3)
            if choice == 0 and stage == SeedStage.DORMANT:
                germinate(table, env, slot, blueprint=1, blend=0, params=1, macs=1, score=0.0)
            elif choice == 1 and IS_LIVE[stage] and rng.random() < 0.2:
                cull(table, where, "controller")
            elif choice == 2 and stage == SeedStage.HOLDING:
                fossilize(table, where)
            assert_path(before[env, slot], table.stage[env, slot], 1)
        middle = table.stage.copy()
        age(table, running)
        table.score[:] = rng.normal(50, 5, table.shape)
        table.gradient_ratio[:] = rng.uniform(0, 1, table.shape)
        table.contribution[:] = np.where(
            rng.random(table.shape) < 0.2, np.nan, rng.normal(2, 2, table.shape)
        )
        table.healthy[:] = rng.random(table.shape) > 0.02
        tick(table, settings, running)
        for env, slot in np.ndindex(table.shape):
            assert_path(middle[env, slot], table.stage[env, slot], 1)
        assert (table.stage[fossils] == SeedStage.FOSSILIZED).all()
        fossils |= table.stage == SeedStage.FOSSILIZED
        free = (rng.random(table.shape) < 0.02) & fossils
        # Free some slots so that the run does not fill up with fossils.
        table.clear(free)
        fossils &= ~free
    assert ops >= 10_000
    seen = {SeedStage(s).name for s in np.unique(table.stage)}
    assert {"DORMANT", "TRAINING", "BLENDING", "FOSSILIZED", "EMBARGOED"} <= seen


def assert_path(source: int, target: int, length: int) -> None:
    if source != target:
        assert LEGAL_TRANSITION[SeedStage(source), SeedStage(target)]


@settings(max_examples=200)
@given(
    source=st.sampled_from(list(SeedStage)),
    target=st.sampled_from(list(SeedStage)),
)
def test_an_illegal_move_raises_and_a_legal_one_is_recorded(
    source: SeedStage, target: SeedStage
) -> None:
    table = SlotTable.empty(2, 2)
    table.stage[1, 0] = source
    table.epochs_in_stage[:] = 4
    table.score[1, 0] = 77.0
    where = one_slot(table, 1, 0)
    if not LEGAL_TRANSITION[source, target]:
        with pytest.raises(InvalidStateMachineError, match="slot 0 of environment 1"):
            move(table, where, target)
        assert table.stage[1, 0] == source
        return
    change = move(table, where, target)
    assert change.source[1, 0] == source
    assert (table.stage[1, 0], table.previous_stage[1, 0]) == (target, source)
    assert table.epochs_in_stage.tolist() == [[4, 4], [0, 4]]
    assert table.score_at_stage_start[1, 0] == 77.0


def test_one_environment_does_not_touch_another() -> None:
    settings = GrowthSettings(steps=25)
    table = SlotTable.empty(2, 1)
    for env in range(2):
        germinate(table, env, 0, blueprint=1, blend=0, params=1, macs=1, score=0.0)
    row = table.row(1)
    only_first = np.array([True, False])
    age(table, only_first)
    tick(table, settings, only_first)
    assert table.stage.tolist() == [[SeedStage.TRAINING], [SeedStage.GERMINATED]]
    table.set_row(0, row)
    assert table.stage.tolist() == [[SeedStage.GERMINATED]] * 2
