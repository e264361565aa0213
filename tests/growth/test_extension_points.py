"""A blueprint, a controller or a measurement of seeds is added by one entry, for any population."""

import numpy as np
import pytest
from torch import nn

from esper.api import find_controller
from esper.growth.blueprints.catalogue import BlueprintSpec, default_catalogue
from esper.growth.slot_table import COLUMNS, Column
from esper.leyline import BLUEPRINT, OP, SLOT, History, LifecycleOp
from esper.tamiyo.controllers import BUILT_IN, controller_names, make_controller
from esper.tamiyo.policy.features import (
    FeatureExtractionContext,
    feature_names,
    signals_to_features,
)
from esper.tamiyo.policy.set_features import SetLayout, set_feature_names, set_features
from esper.tamiyo.situation import Situation, wait
from esper.tolaria.engine.run import GrowthEnv, GrowthSettings, make_env, play_run
from helpers import small_digits

MODULES = ("blocks.0", "blocks.1", "blocks.2")
POPULATIONS = pytest.mark.parametrize("population", ["looped", "fused"])


def env_with(catalogue: object, population: str, history: History) -> GrowthEnv:
    task, data = small_digits(64, 32)
    rules = GrowthSettings(4, population=population)  # type: ignore[arg-type]
    return make_env(task.recipe(data, catalogue), [1, 2], rules, history)  # type: ignore[arg-type]


def germinate(blueprint: int) -> np.ndarray:
    """In the first slot of both environments."""
    actions = wait(2)
    actions[:, [OP, BLUEPRINT]] = LifecycleOp.GERMINATE, blueprint
    return actions


@POPULATIONS
def test_a_blueprint_is_one_entry_of_the_catalogue(population: str) -> None:
    mine = BlueprintSpec("mine", "residual", {"cnn": lambda c: nn.Conv2d(c, c, 1)}, "mine")
    catalogue, history = default_catalogue().with_blueprint(mine), History()
    index, names = catalogue.index("mine"), catalogue.names
    env = env_with(catalogue, population, history)
    before = env.reset()
    assert before.masks.blueprint[:, 0, index].all()
    after = env.step(germinate(index)).after
    assert {row["blocks.0.blueprint"] for row in history.rows[-2:]} == {"mine"}
    flat = signals_to_features(FeatureExtractionContext(after))
    column = feature_names(MODULES, names).index(("blocks.0", "is mine"))
    assert flat[:, column].tolist() == [1.0, 1.0]
    over_sets = set_features(after)
    assert over_sets.shape[1] == SetLayout(3, len(names)).size
    column = set_feature_names(MODULES, names).index(("mine in blocks.0", "planted"))
    assert over_sets[:, column].tolist() == [1.0, 1.0]


class Impatient:
    """Grows at the first step, in the last slot."""

    name = "impatient"

    def reset(self, n_envs: int) -> None:
        pass

    def act(self, situation: Situation) -> np.ndarray:
        actions = wait(situation.n_envs)
        if situation.masks.slot[:, LifecycleOp.GERMINATE, 2].all():
            blueprint = situation.masks.blueprint[0, 2].argmax()
            actions[:, [OP, SLOT, BLUEPRINT]] = LifecycleOp.GERMINATE, 2, blueprint
        return actions


@POPULATIONS
def test_a_controller_is_one_entry_of_the_built_in_ones(
    population: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILT_IN, "impatient", Impatient)
    assert "impatient" in controller_names()
    task, data = small_digits(64, 32)
    rules, history = GrowthSettings(2, population=population), History()  # type: ignore[arg-type]
    controller = make_controller("impatient")
    found = play_run(task.recipe(data), [1, 2], rules, controller, task="digits", recorder=history)
    assert [each.outcome.controller for each in found] == ["impatient"] * 2
    grown = [row["slot"] for row in history.rows if row["op"] == "GERMINATE"]
    assert grown == ["blocks.2"] * 2


def test_a_controller_is_found_by_its_name_in_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "impatient", Impatient)
    assert isinstance(find_controller("impatient"), Impatient)


@POPULATIONS
def test_a_measurement_is_one_column_of_the_slot_table(
    population: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Column(in_metrics=True, measure=lambda reading: 2.0 * reading.norm)
    monkeypatch.setitem(COLUMNS, "mine", mine)
    history = History()
    env = env_with(None, population, history)
    env.reset()
    env.step(germinate(default_catalogue().index("conv_light")))
    table = env.step(wait(2)).after.table
    assert (table.mine[:, 0] > 0).all()
    np.testing.assert_allclose(table.mine, 2.0 * table.gradient_norm)
    for env_index, row in enumerate(history.rows[-2:]):
        assert row["blocks.0.mine"] == table.mine[env_index, 0]
        assert row["blocks.1.mine"] is None
