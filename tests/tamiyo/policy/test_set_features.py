"""The observation over sets: where everything stands, and that nothing can break it."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from esper.growth.blueprints.catalogue import BlueprintCatalogue
from esper.growth.slot_table import SlotTable
from esper.leyline import ActionMasks, ConfigError, LifecycleOp, SeedStage
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.policy.set_features import (
    CANDIDATE_FEATURES,
    GLOBAL_FEATURES,
    SLOT_FEATURES,
    SetLayout,
    pad_masks,
    set_features,
)
from esper.tamiyo.situation import Situation
from esper.tolaria.engine.run import make_env, play
from helpers import digits_env, small_digits

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def situations() -> list[Situation]:
    env = digits_env([1, 2], max_steps=10, on_panic="continue")
    seen: list[Situation] = []
    play(env, make_controller("scripted:early"), on_step=lambda t: seen.append(t.after))
    return seen


def parts(s: Situation, slots: int | None = None) -> tuple[dict[str, np.ndarray], ...]:
    """Columns by name: of the run [E], of slots [E, S], of candidates [E, S, B]."""
    layout = SetLayout(slots or s.slot_config.num_slots, len(s.catalogue))
    split = layout.split(torch.from_numpy(set_features(s, slots)))
    names = (GLOBAL_FEATURES, SLOT_FEATURES, CANDIDATE_FEATURES)
    return tuple(
        {name: block[..., i].numpy() for i, name in enumerate(own)}
        for own, block in zip(names, split, strict=True)
    )


def test_layout_and_bounds(situations: list[Situation]) -> None:
    for s in situations:
        x = set_features(s)
        assert x.shape == (2, SetLayout(3, len(s.catalogue)).size)
        assert x.dtype == np.float32
        assert np.isfinite(x).all()
        assert np.abs(x).max() <= 2.0
        run, slots, candidates = parts(s)
        assert run["left"] == pytest.approx(s.left)
        assert run["val_score"] == pytest.approx(s.signals.val_score / 100)
        change = np.nan_to_num(s.signals.score_delta / 10)
        assert run["score_delta"] == pytest.approx(np.clip(change, -2, 2), abs=1e-6)
        assert run["seeds"] == pytest.approx(s.table.holds_seed.sum(axis=1) / 4)
        assert (slots["present"] == 1).all()
        assert np.array_equal(slots["holds"], s.table.holds_seed)
        assert slots["alpha"] == pytest.approx(s.table.alpha)
        assert np.array_equal(slots["may_cull"], s.masks.slot[:, LifecycleOp.CULL])
        stages = [slots[stage] for stage in ("dormant", "training", "blending", "holding")]
        assert (np.sum(stages, axis=0) <= 1).all()
        planted = candidates["planted"].argmax(axis=2)
        held = s.table.holds_seed
        assert np.array_equal(planted[held], s.table.blueprint[held])
        allowed = s.masks.blueprint & s.masks.slot[:, LifecycleOp.GERMINATE, :, None]
        assert np.array_equal(candidates["allowed"], allowed)


def test_candidates_are_told_by_what_they_are(situations: list[Situation]) -> None:
    """Within a slot no two that fit look alike, and costs are those that the masks count."""
    s = situations[0]
    assert s.facts is not None
    _, slots, candidates = parts(s)
    described = np.stack([candidates[name][0] for name in CANDIDATE_FEATURES], axis=-1)
    for slot, fits in enumerate(s.facts.fits):
        rows = described[slot][fits].round(4)
        assert len(np.unique(rows, axis=0)) == len(rows) > 3
        assert (described[slot][~fits] == 0).all()
    costs = s.facts.seed_params[s.facts.fits] / s.host_params
    assert candidates["params_over_host"][0][s.facts.fits] == pytest.approx(
        np.log10(costs) / 2, abs=1e-6
    )
    kinds = {name: candidates[name][0, 0].astype(bool) for name in ("branch", "bypass")}
    assert s.catalogue.names[int(kinds["branch"].argmax())] == "branch"
    assert kinds["bypass"].sum() == 2
    assert (slots["params_of_host"] > 0).all()
    assert (slots["macs_of_host"] > 0).all()


def test_columns_that_are_computed_together_have_their_names(situations: list[Situation]) -> None:
    for number, s in enumerate(situations):
        run, slots, candidates = parts(s)
        for back, before in enumerate(situations[max(0, number - 4) : number][::-1], start=1):
            then, now = before.signals, s.signals
            fall = np.minimum(np.log1p(then.val_loss) / 2, 2) - np.log1p(now.val_loss) / 2
            assert run[f"loss_{back}_ago"] == pytest.approx(fall, abs=1e-6)
            rise = ((then.val_score - now.val_score) / 10).clip(-2, 2)
            assert run[f"score_{back}_ago"] == pytest.approx(rise, abs=1e-6)
        for stage in set(SeedStage) - {SeedStage.UNKNOWN}:
            assert np.array_equal(slots[stage.name.lower()], s.table.stage == stage)
        for b, spec in enumerate(s.catalogue.specs):
            told = {kind for kind in ("residual", "branch", "bypass") if candidates[kind][0, 0, b]}
            assert told <= {spec.kind}


def test_widths_are_seen_relative_to_the_others(situations: list[Situation]) -> None:
    s = situations[0]
    assert s.facts is not None
    narrow = replace(s, facts=replace(s.facts, channels=np.array([16, 2, 16])))
    _, slots, _ = parts(narrow)
    assert slots["channels_over_others"][0] == pytest.approx(
        np.log([16 / 9, 2 / 16, 16 / 9]).clip(-2, 2), abs=1e-6
    )


def test_absent_slots_are_zero_and_nothing_is_legal_in_them(situations: list[Situation]) -> None:
    s = situations[-1]
    own, padded = parts(s), parts(s, 5)
    for block, wide in zip(own[1:], padded[1:], strict=True):
        for name, column in block.items():
            assert np.array_equal(wide[name][:, :3], column)
            assert (wide[name][:, 3:] == 0).all()
    assert all(np.array_equal(own[0][name], padded[0][name]) for name in GLOBAL_FEATURES)
    masks = pad_masks(s.masks, 5)
    assert masks.slot.shape == (2, 4, 5)
    assert masks.blueprint.shape[1] == 5
    assert not masks.slot[..., 3:].any()
    assert not masks.blueprint[:, 3:].any()
    assert pad_masks(s.masks, 3) is s.masks
    for pad in (lambda: set_features(s, 2), lambda: pad_masks(s.masks, 2)):
        with pytest.raises(ConfigError, match="3 slots cannot be shown as one with 2"):
            pad()


def permuted(s: Situation, order: np.ndarray) -> Situation:
    """The same host with its slots listed in another order."""
    assert s.facts is not None
    facts = {f.name: getattr(s.facts, f.name) for f in fields(s.facts)}
    moved = {n: v[order] for n, v in facts.items() if isinstance(v, np.ndarray)}
    table = SlotTable(**{name: column[:, order] for name, column in vars(s.table).items()})
    masks = ActionMasks(
        s.masks.op, s.masks.slot[..., order], s.masks.blueprint[:, order], s.masks.blend
    )
    return replace(s, facts=replace(s.facts, **moved), table=table, masks=masks)


def test_permuting_slots_permutes_what_is_seen(situations: list[Situation]) -> None:
    s, order = situations[-1], np.array([2, 0, 1])
    before, after = parts(s), parts(permuted(s, order))
    assert all(np.array_equal(before[0][n], after[0][n]) for n in GLOBAL_FEATURES)
    for block in (1, 2):
        for name, column in before[block].items():
            assert np.allclose(column[:, order], after[block][name], atol=1e-6), name


def test_budgets_are_seen(situations: list[Situation]) -> None:
    told = replace(situations[0], extra=np.array([0.3, np.nan]), rho=np.array([0.5, np.nan]))
    run, _, _ = parts(told)
    assert run["extra_known"].tolist() == run["rho_known"].tolist() == [1, 0]
    assert run["extra"] == pytest.approx([np.log(0.3) / 2, 0.0])
    assert np.isfinite(set_features(told)).all()


def test_what_breaks_does_not_break_the_observation(situations: list[Situation]) -> None:
    s = situations[-1]
    for value in (np.nan, np.inf, -np.inf, 1e30, -1e30):
        signals = replace(
            s.signals,
            **{
                f.name: np.full_like(getattr(s.signals, f.name), value)
                for f in fields(s.signals)
                if getattr(s.signals, f.name).dtype.kind == "f"
            },
        )
        table = s.table.copy()
        for name in ("contribution", "gradient_norm", "gradient_ratio", "score", "noise"):
            getattr(table, name)[:] = value
        x = set_features(replace(s, signals=signals, table=table))
        assert np.isfinite(x).all()
        assert np.abs(x).max() <= 2.0


def test_any_catalogue_and_a_situation_without_facts(situations: list[Situation]) -> None:
    s = situations[0]
    assert s.facts is not None
    few = BlueprintCatalogue(s.catalogue.specs[:5])
    cut = {
        name: getattr(s.facts, name)[:, :5]
        for name in ("fits", "seed_params", "seed_macs", "seed_layers", "seed_reach")
    }
    masks = replace(s.masks, blueprint=s.masks.blueprint[..., :5])
    facts = replace(s.facts, specs=few.specs, **cut)
    x = set_features(replace(s, catalogue=few, masks=masks, facts=facts))
    assert x.shape[1] == SetLayout(3, 5).size
    with pytest.raises(ConfigError, match="slot facts"):
        set_features(replace(s, facts=None))


def test_an_extra_budget_is_seen_from_the_rules_on() -> None:
    task, data = small_digits(64)
    for extra in (0.3, None):
        env = make_env(task.recipe(data), [1], GrowthSettings(2, extra=extra))
        run, slots, _ = parts(env.reset())
        assert run["extra_known"] == (extra is not None)
        assert slots["present"].all()
