"""The observation: where everything stands in it, and that nothing can break it."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.growth.blueprints.catalogue import BlueprintCatalogue, default_catalogue
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.policy.features import (
    FeatureExtractionContext,
    feature_names,
    feature_size,
    signals_to_features,
)
from esper.tamiyo.situation import Situation
from esper.tolaria.engine.run import play
from helpers import digits_env


def test_widths_are_computed() -> None:
    assert feature_size(3, 5) == 80
    assert feature_size(3, 5, use_telemetry=False) == 50
    assert feature_size(3, 13) == 104
    assert feature_size(3, 13, use_telemetry=False) == 74


@pytest.fixture(scope="module")
def situations() -> list[Situation]:
    env = digits_env([1, 2], max_steps=14, on_panic="continue")
    seen: list[Situation] = []
    play(
        env,
        make_controller("scripted:early"),
        on_step=lambda transition: seen.append(transition.after),
    )
    return seen


def test_layout_and_bounds(situations: list[Situation]) -> None:
    n_blueprints = len(default_catalogue())
    for s in situations:
        x = signals_to_features(FeatureExtractionContext(s))
        assert x.shape == (2, feature_size(3, n_blueprints))
        assert x.dtype == np.float32
        assert np.isfinite(x).all()
        assert np.abs(x).max() <= 2.0
        assert x[0, 0] == pytest.approx(s.step / s.max_steps)
        assert x[0, 6] == pytest.approx(s.signals.val_score[0] / 100)
        change = np.nan_to_num(s.signals.score_delta[0] / 10)
        assert x[0, 7] == pytest.approx(np.clip(change, -2, 2), abs=1e-6)
        width = 4 + n_blueprints
        for slot in range(3):
            block = x[0, 23 + slot * width : 23 + (slot + 1) * width]
            assert block[0] == float(s.table.holds_seed[0, slot])
            assert block[1] == pytest.approx(s.table.stage[0, slot] / 10)
            assert block[2] == pytest.approx(s.table.alpha[0, slot])
            assert block[4:].sum() == float(s.table.blueprint[0, slot] >= 0)
        telemetry = x[0, 23 + 3 * width :].reshape(3, 10)
        assert (telemetry[~s.table.holds_seed[0]] == 0).all()
        assert telemetry[0, 8] == pytest.approx(s.table.alpha[0, 0])


def test_every_entry_has_a_name_of_its_own(situations: list[Situation]) -> None:
    for s in situations:
        x = signals_to_features(FeatureExtractionContext(s))[1]
        names = feature_names(s.slot_config.names, s.catalogue.names)
        assert len(names) == len(set(names)) == len(x)
        named = dict(zip(names, x.tolist(), strict=True))
        signals, table = s.signals, s.table
        assert named["training", "best score / 100"] == pytest.approx(
            signals.best_val_score[1] / 100
        )
        assert named["training", "score 0 epochs ago / 100"] == pytest.approx(
            signals.val_score[1] / 100
        )
        assert named["training", "log size over the host's"] == pytest.approx(
            np.log(s.total_params[1] / s.host_params)
        )
        for slot, module in enumerate(s.slot_config.names):
            assert named[module, "alpha"] == pytest.approx(table.alpha[1, slot])
            if table.blueprint[1, slot] >= 0:
                blueprint = s.catalogue.names[table.blueprint[1, slot]]
                assert named[module, f"is {blueprint}"] == 1.0
    short = feature_names(("a", "b"), ("x",), use_telemetry=False)
    assert len(short) == feature_size(2, 1, use_telemetry=False)


def test_without_telemetry_the_rest_stays_where_it_is(situations: list[Situation]) -> None:
    whole = signals_to_features(FeatureExtractionContext(situations[-1]))
    part = signals_to_features(FeatureExtractionContext(situations[-1], use_telemetry=False))
    assert np.array_equal(whole[:, : part.shape[1]], part)


def test_five_blueprints_and_three_slots_make_eighty(situations: list[Situation]) -> None:
    five = BlueprintCatalogue(default_catalogue().specs[:5])
    x = signals_to_features(FeatureExtractionContext(replace(situations[0], catalogue=five)))
    assert x.shape == (2, 80)


@settings(max_examples=100, deadline=None)
@given(value=st.floats(allow_nan=True, allow_infinity=True, width=64))
def test_no_measurement_breaks_the_observation(situations: list[Situation], value: float) -> None:
    s = situations[-1]
    everything = {
        name: np.full_like(getattr(s.signals, name), value, dtype=np.float64)
        for name in (
            "train_loss",
            "val_loss",
            "loss_delta",
            "train_score",
            "val_score",
            "score_delta",
            "best_val_score",
            "best_val_loss",
            "loss_history",
            "score_history",
        )
    }
    table = s.table.copy()
    for column in (table.contribution, table.gradient_norm, table.gradient_health, table.score):
        column[:] = value
    odd = replace(s, signals=replace(s.signals, **everything), table=table)
    with np.errstate(all="ignore"):
        x = signals_to_features(FeatureExtractionContext(odd))
    assert np.isfinite(x).all()
    assert np.abs(x).max() <= 2.0


def test_001_l1_one_context_is_all_that_features_need(situations: list[Situation]) -> None:
    """Nothing else is looked at: the same context gives the same row, whatever came between."""
    first = signals_to_features(FeatureExtractionContext(situations[0]))
    signals_to_features(FeatureExtractionContext(situations[-1]))
    assert np.array_equal(signals_to_features(FeatureExtractionContext(situations[0])), first)


def test_001_l2_every_setting_of_the_context_changes_the_features(
    situations: list[Situation],
) -> None:
    neutral = FeatureExtractionContext(situations[-1])
    row = signals_to_features(neutral)
    for changed in (
        replace(neutral, situation=situations[0]),
        replace(neutral, use_telemetry=False),
    ):
        assert not np.array_equal(signals_to_features(changed), row)
    assert len(fields(neutral)) == 2, "the two settings above are all there are"


def test_growth_is_the_logarithm_of_the_whole_network_over_its_host(
    situations: list[Situation],
) -> None:
    doubled = replace(situations[0], total_params=np.array([2, 4]) * situations[0].host_params)
    x = signals_to_features(FeatureExtractionContext(doubled))
    assert x[:, 21] == pytest.approx(np.log([2.0, 4.0]))


def test_the_worth_of_a_seed_is_its_contribution_or_what_came_since_its_stage_began(
    situations: list[Situation],
) -> None:
    s = situations[-1]
    table = s.table.copy()
    (slot,) = np.flatnonzero(table.holds_seed[0])[:1]
    table.score_at_birth[0, slot], table.score_at_stage_start[0, slot] = 40.0, 47.0
    table.score[0, slot], table.contribution[0, slot] = 50.0, 1.5
    block = 23 + slot * (4 + len(s.catalogue))
    known = signals_to_features(FeatureExtractionContext(replace(s, table=table)))
    assert known[0, block + 3] == pytest.approx(0.15)
    table.contribution[0, slot] = np.nan
    unknown = signals_to_features(FeatureExtractionContext(replace(s, table=table)))
    assert unknown[0, block + 3] == pytest.approx(0.3)
    telemetry = 23 + 3 * (4 + len(s.catalogue)) + slot * 10
    assert unknown[0, telemetry + 6] == pytest.approx(0.3)
