from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.lifecycle import germinate
from esper.growth.slot_table import SlotTable
from esper.leyline import (
    BLEND_NAMES,
    BLUEPRINT,
    OP,
    SLOT,
    ConfigError,
    LifecycleOp,
    SeedStage,
    SlotConfig,
    TrainingSignals,
)
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.heuristic import HeuristicConfig, HeuristicController
from esper.tamiyo.controllers.scripted import ScriptedController, parse_script
from esper.tamiyo.controllers.simple import RandomController, StaticController
from esper.tamiyo.policy.action_masks import GrowthLimits, compute_action_masks
from esper.tamiyo.situation import Situation

CATALOGUE = default_catalogue()
N = len(CATALOGUE)


def situation(
    table: SlotTable | None = None, *, step: int = 10, plateau: int = 5, **changes: Any
) -> Situation:
    table = table if table is not None else SlotTable.empty(1, 3)
    table.noise[:] = 2.0
    n_envs = table.shape[0]
    column = np.zeros(n_envs)
    history = np.zeros((n_envs, 5))
    signals = TrainingSignals(
        *[column] * 8,
        plateau_epochs=np.full(n_envs, plateau),
        host_stabilized=column > 0,
        best_val_score=column,
        best_val_loss=column,
        loss_history=history,
        score_history=history,
    )
    fits = np.array([["cnn" in spec.factories for spec in CATALOGUE.specs]] * 3)
    limits = GrowthLimits(fits, np.ones((3, N), dtype=int), np.ones((3, N), dtype=int))
    running = np.ones(n_envs, dtype=bool)
    made = Situation(
        step=step,
        max_steps=25,
        keys=np.arange(n_envs),
        running=running,
        signals=signals,
        table=table,
        masks=compute_action_masks(table, limits, GrowthSettings(25), running),
        slot_config=SlotConfig.default(),
        catalogue=CATALOGUE,
        host_params=100,
        total_params=np.full(n_envs, 100),
        left=np.full(n_envs, 1.0 - step / 25),
    )
    return replace(made, **changes)


def with_seed(stage: SeedStage, *, slot: int = 0, blueprint: int = 1, **columns: Any) -> SlotTable:
    table = SlotTable.empty(1, 3)
    germinate(table, 0, slot, blueprint=blueprint, blend=0, params=1, macs=1, score=50.0)
    table.stage[0, slot] = stage
    table.epochs_total[0, slot] = 3
    for name, value in columns.items():
        getattr(table, name)[0, slot] = value
    return table


def decide(controller: HeuristicController, s: Situation) -> tuple[str, int, str]:
    actions = controller.act(s)
    assert s.masks.allows(actions).all()
    _, blueprint, _, op = actions[0]
    return LifecycleOp(op).name, int(actions[0, SLOT]), CATALOGUE.names[blueprint]


def heuristic(**settings: Any) -> HeuristicController:
    controller = HeuristicController(HeuristicConfig(**settings))
    controller.reset(1)
    return controller


def test_static_waits() -> None:
    assert StaticController().act(situation()).tolist() == [[0, 0, 0, LifecycleOp.WAIT]]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "GERMINATE"),
        ({"step": 4}, "WAIT"),
        ({"plateau": 0}, "WAIT"),
        ({"plateau": 1}, "GERMINATE"),
    ],
)
def test_heuristic_germinates_at_a_plateau(changes: dict[str, Any], expected: str) -> None:
    assert decide(heuristic(), situation(**changes))[0] == expected


def test_heuristic_walks_its_rotation_over_what_fits() -> None:
    controller = heuristic(blueprint_rotation=("mlp", "conv_light", "unknown", "norm"))
    grown = [decide(controller, situation())[2] for _ in range(3)]
    assert grown == ["conv_light", "norm", "conv_light"]


def test_heuristic_waits_when_nothing_fits() -> None:
    controller = heuristic(blueprint_rotation=("mlp", "lora"))
    assert decide(controller, situation())[0] == "WAIT"


def test_heuristic_remembers_culls_with_penalties_that_halve() -> None:
    controller = heuristic(embargo_epochs_after_cull=5)
    light = CATALOGUE.index("conv_light")
    controller.act(situation(with_seed(SeedStage.TRAINING, blueprint=light), step=10))
    empty = SlotTable.empty(1, 3)
    penalties = []
    for step in range(11, 17):
        op = decide(controller, situation(empty, step=step))[0]
        assert controller.penalty is not None
        penalties.append(controller.penalty[0, light])
        assert op == ("WAIT" if step < 16 else "GERMINATE"), step
    assert penalties == [2.0, 1.0, 0.5, 0.25, 0.125, 0.0]


def test_heuristic_passes_over_a_penalised_blueprint_or_takes_the_least() -> None:
    controller = heuristic(blueprint_rotation=("conv_light", "norm"))
    controller.act(situation(plateau=0))
    assert controller.penalty is not None
    controller.penalty[0, CATALOGUE.index("conv_light")] = 8.0
    assert decide(controller, situation())[2] == "norm"
    controller.penalty[0, CATALOGUE.index("conv_light")] = 8.0
    controller.penalty[0, CATALOGUE.index("norm")] = 9.0
    assert decide(controller, situation())[2] == "conv_light"


def test_heuristic_takes_the_least_penalised_of_those_that_fit_wherever_it_is_in_turn() -> None:
    controller = heuristic(blueprint_rotation=("mlp", "conv_light", "norm", "branch"))
    controller.act(situation(plateau=0))
    assert controller.penalty is not None
    for name, penalty in (("conv_light", 9.0), ("norm", 9.5), ("branch", 8.0)):
        controller.penalty[0, CATALOGUE.index(name)] = 2 * penalty
    assert decide(controller, situation())[2] == "branch", "mlp fits no convolution"


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"stage": SeedStage.GERMINATED}, "WAIT"),
        ({"stage": SeedStage.TRAINING, "epochs_in_stage": 5, "score": 47.9}, "CULL"),
        ({"stage": SeedStage.TRAINING, "epochs_in_stage": 4, "score": 40.0}, "WAIT"),
        ({"stage": SeedStage.BLENDING, "epochs_in_stage": 5, "score": 47.9}, "CULL"),
        ({"stage": SeedStage.BLENDING, "epochs_in_stage": 5, "score": 48.1}, "WAIT"),
        ({"stage": SeedStage.HOLDING, "contribution": 1.5, "score": 52.0}, "FOSSILIZE"),
        ({"stage": SeedStage.HOLDING, "contribution": 0.8, "score": 52.0}, "WAIT"),
        ({"stage": SeedStage.HOLDING, "contribution": 0.6, "score": 52.0}, "CULL"),
        ({"stage": SeedStage.HOLDING, "contribution": 5.0, "score": 49.0}, "CULL"),
        # A contribution that nobody measured: the change since the seed was planted decides.
        ({"stage": SeedStage.HOLDING, "contribution": np.nan, "score": 52.0}, "WAIT"),
        ({"stage": SeedStage.HOLDING, "contribution": np.nan, "score": 49.0}, "CULL"),
        ({"stage": SeedStage.FOSSILIZED}, "GERMINATE"),
    ],
)
def test_heuristic_decides_on_a_seed(columns: dict[str, Any], expected: str) -> None:
    stage = columns.pop("stage")
    table = with_seed(stage, slot=1, score_at_stage_start=50.0, score_at_birth=50.0, **columns)
    op, slot, _ = decide(heuristic(), situation(table))
    assert op == expected
    if expected in ("CULL", "FOSSILIZE"):
        assert slot == 1


def test_heuristic_decides_environments_apart() -> None:
    table = SlotTable.empty(3, 3)
    germinate(table, 1, 2, blueprint=1, blend=0, params=1, macs=1, score=50.0)
    controller = HeuristicController()
    controller.reset(3)
    actions = controller.act(situation(table))
    assert actions[:, OP].tolist() == [1, 0, 1]


def test_heuristic_config_is_validated() -> None:
    with pytest.raises(ConfigError, match="at least one blueprint"):
        HeuristicConfig(blueprint_rotation=())
    with pytest.raises(ConfigError, match="blend must be one of"):
        HeuristicConfig(blend="abrupt")


def test_settings_of_the_heuristic_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('blend = "gated"\nblueprint_rotation = ["norm", "branch"]\n')
    config = HeuristicConfig(blend="gated", blueprint_rotation=("norm", "branch"))
    named = make_controller(f"heuristic:{file}")
    assert (named.name, named.config) == (f"heuristic:{file}", config)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot be read"),
        ('bland = "linear"', r"no setting bland; did you mean blend\?"),
        ('blueprint_rotation = "norm"', "must be a list, each text, got 'norm'"),
    ],
)
def test_bad_settings_in_a_file_are_one_sentence(
    text: str | None, complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "own.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        make_controller(f"heuristic:{file}")


def test_random_is_uniform_over_ops_slots_and_blueprints() -> None:
    table = SlotTable.empty(4000, 3)
    s = situation(table)
    actions = RandomController().act(s)
    assert s.masks.allows(actions).all()
    germinate_share = (actions[:, OP] == LifecycleOp.GERMINATE).mean()
    assert germinate_share == pytest.approx(0.5, abs=0.04)
    grown = actions[actions[:, OP] == LifecycleOp.GERMINATE]
    counts = np.bincount(grown[:, SLOT], minlength=3) / len(grown)
    assert counts == pytest.approx(np.full(3, 1 / 3), abs=0.05)
    usable = [i for i, spec in enumerate(CATALOGUE.specs) if "cnn" in spec.factories]
    shares = np.bincount(grown[:, BLUEPRINT], minlength=N) / len(grown)
    assert shares[usable] == pytest.approx(np.full(len(usable), 1 / len(usable)), abs=0.04)
    assert np.delete(shares, usable).sum() == 0
    assert (actions[actions[:, OP] == LifecycleOp.WAIT][:, :OP] == 0).all()


def test_random_depends_on_seed_and_step_only() -> None:
    many = RandomController().act(situation(SlotTable.empty(50, 3)))
    one = RandomController().act(
        situation(SlotTable.empty(1, 3), keys=np.array([17]), running=np.ones(1, dtype=bool))
    )
    assert one[0].tolist() == many[17].tolist()
    later = RandomController().act(situation(SlotTable.empty(50, 3), step=11))
    assert not np.array_equal(later, many)


SCRIPT = """
# a comment
11 GERMINATE r0c2 conv_light gated   # another
12 CULL r0c2
auto FOSSILIZE
"""


def test_scripted_follows_its_lines_and_waits_otherwise() -> None:
    controller = ScriptedController(SCRIPT, "mine")
    gated = BLEND_NAMES.index("gated")
    assert controller.act(situation(step=10)).tolist() == [
        [2, CATALOGUE.index("conv_light"), gated, LifecycleOp.GERMINATE]
    ]
    assert controller.act(situation(step=5))[0, OP] == LifecycleOp.WAIT
    ready = with_seed(SeedStage.HOLDING, slot=1, contribution=3.0)
    assert controller.act(situation(ready, step=20)).tolist() == [[1, 0, 0, LifecycleOp.FOSSILIZE]]
    seed = with_seed(SeedStage.HOLDING, slot=2)
    assert controller.act(situation(seed, step=11)).tolist() == [[2, 0, 0, LifecycleOp.CULL]]


def test_scripted_says_which_line_is_not_legal() -> None:
    controller = ScriptedController(SCRIPT, "mine")
    with pytest.raises(ConfigError, match="line 4 of scripted:mine is not legal at step 12"):
        controller.act(situation(step=11))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 WAIT", "starts with a step from 1"),
        ("x WAIT", "starts with a step"),
        ("1 GROW r0c0", "one of WAIT, GERMINATE, CULL, FOSSILIZE"),
        ("1", "after the step comes an op"),
        ("1 GERMINATE r0c0", "GERMINATE takes 3 words"),
        ("1 WAIT r0c0", "WAIT takes 0 words"),
        ("1 GERMINATE r0c0 norm abrupt", "blend must be one of"),
        ("1 WAIT\n1 WAIT", "line 2 of mine: step 1 already has"),
    ],
)
def test_bad_scripts_are_refused_by_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_script(text, "mine")


@pytest.mark.parametrize("line", ["11 CULL r9c9", "11 GERMINATE r0c0 nothing linear"])
def test_names_in_a_script_are_looked_up_when_the_network_is_known(line: str) -> None:
    with pytest.raises(ConfigError, match="line 1 of scripted:mine: no "):
        ScriptedController(line, "mine").act(situation(step=10))


def test_controllers_by_name(tmp_path: Path) -> None:
    for name in ("static", "random", "heuristic", "scripted:early"):
        assert make_controller(name).name == name
    script = tmp_path / "mine.txt"
    script.write_text(SCRIPT)
    assert make_controller(f"scripted:{script}").name == f"scripted:{script}"
    with pytest.raises(ConfigError, match=r"no controller 'wise'.*heuristic"):
        make_controller("wise")
    with pytest.raises(ConfigError, match=r"no script 'nowhere'.*early"):
        make_controller("scripted:nowhere")


def test_heuristic_does_not_wait_for_a_plateau_of_hosts_that_arrive_trained() -> None:
    for step, expected in ((0, "GERMINATE"), (1, "WAIT")):
        made = situation(step=step, plateau=0, trained=True)
        assert decide(heuristic(), made)[0] == expected


@pytest.mark.parametrize(
    ("extra", "trained", "grows"),
    [(0.1, True, False), (0.3, True, True), (np.nan, True, True), (0.1, False, True)],
)
def test_heuristic_leaves_a_trained_host_alone_that_has_little_to_spend(
    extra: float, trained: bool, grows: bool
) -> None:
    made = situation(trained=trained, extra=np.array([extra]))
    assert (decide(heuristic(), made)[0] == "GERMINATE") == grows


def test_heuristic_plants_nothing_right_after_a_cull_also_as_it_was_saved() -> None:
    controller, other = heuristic(), heuristic()
    controller.act(situation(with_seed(SeedStage.TRAINING)))
    assert decide(controller, situation(step=11))[0] == "WAIT"
    other.load_state_dict(controller.state_dict())
    for each in (controller, other):
        assert decide(each, situation(step=15))[0] == "WAIT"
        assert decide(each, situation(step=16))[0] == "GERMINATE"
