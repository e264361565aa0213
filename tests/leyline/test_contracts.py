import itertools

import numpy as np
import pytest

from esper.leyline import (
    GATE_FOR_TARGET,
    HEAD_NAMES,
    HEAD_RELEVANCE,
    HOLDS_SEED,
    IS_ACTIVE,
    IS_BLENDED,
    IS_FULL,
    IS_LIVE,
    LEGAL_TRANSITION,
    NUM_OPS,
    RELEVANT_HEADS,
    VALID_TRANSITIONS,
    ActionMasks,
    ConfigError,
    GateLevel,
    InjectionSpec,
    LifecycleOp,
    SeedStage,
    SlotConfig,
    draw_key,
    generator,
)

EDGES = {
    ("UNKNOWN", "DORMANT"),
    ("DORMANT", "GERMINATED"),
    ("GERMINATED", "TRAINING"),
    ("GERMINATED", "CULLED"),
    ("TRAINING", "BLENDING"),
    ("TRAINING", "CULLED"),
    ("BLENDING", "HOLDING"),
    ("BLENDING", "CULLED"),
    ("HOLDING", "FOSSILIZED"),
    ("HOLDING", "CULLED"),
    ("CULLED", "EMBARGOED"),
    ("EMBARGOED", "RESETTING"),
    ("RESETTING", "DORMANT"),
}


def test_ten_stages_and_the_thirteen_legal_edges() -> None:
    assert len(SeedStage) == 10
    assert 5 not in {int(stage) for stage in SeedStage}
    legal = {
        (a.name, b.name)
        for a, b in itertools.product(SeedStage, SeedStage)
        if LEGAL_TRANSITION[a, b]
    }
    assert legal == EDGES
    assert VALID_TRANSITIONS[SeedStage.FOSSILIZED] == frozenset()


def test_the_transition_array_says_the_same_as_the_table() -> None:
    assert LEGAL_TRANSITION.sum() == 13
    for a, b in itertools.product(SeedStage, SeedStage):
        assert LEGAL_TRANSITION[a, b] == (b in VALID_TRANSITIONS[a])
    with pytest.raises(ValueError, match="read-only"):
        LEGAL_TRANSITION[0, 0] = True


def test_stage_predicates() -> None:
    order = ["GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED"]
    for table, names in (
        (HOLDS_SEED, order),
        (IS_LIVE, order[:4]),
        (IS_ACTIVE, order[1:]),
        (IS_BLENDED, order[2:]),
        (IS_FULL, order[3:]),
    ):
        assert [stage.name for stage in SeedStage if table[stage]] == names


def test_every_advance_has_a_gate_and_level_four_is_reserved() -> None:
    assert set(GATE_FOR_TARGET.values()) == set(GateLevel)
    assert 4 not in {int(level) for level in GateLevel}


def test_heads_and_their_relevance() -> None:
    assert HEAD_NAMES == ("slot", "blueprint", "blend", "op")
    expected = {
        "WAIT": [False, False, False, True],
        "GERMINATE": [True, True, True, True],
        "CULL": [True, False, False, True],
        "FOSSILIZE": [True, False, False, True],
    }
    for op in LifecycleOp:
        assert HEAD_RELEVANCE[op].tolist() == expected[op.name]
        assert {n for n, r in zip(HEAD_NAMES, HEAD_RELEVANCE[op], strict=True) if r} == set(
            RELEVANT_HEADS[op]
        )


@pytest.mark.parametrize("bad", ["", "r1", "c1r1", "r-1c0", "r0c0 ", "R0C0", "r0c0x"])
def test_malformed_slot_ids_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError):
        SlotConfig((bad,))


def test_slot_id_lists_must_be_distinct_and_not_empty() -> None:
    with pytest.raises(ConfigError, match="distinct"):
        SlotConfig(("r0c0", "r0c0"))
    with pytest.raises(ConfigError, match="at least one"):
        SlotConfig(())


def test_slot_config_grid_order_lookup_and_errors() -> None:
    grid = SlotConfig.for_grid(2, 11)
    assert grid.slot_ids[:3] == ("r0c0", "r0c1", "r0c2")
    assert grid.slot_ids.index("r0c2") < grid.slot_ids.index("r0c10") < grid.slot_ids.index("r1c0")
    assert grid.index_for_name(grid.slot_ids[17]) == 17
    with pytest.raises(ConfigError, match="no slot 'r9c9'"):
        grid.index_for_name("r9c9")


def _spec(**changes: object) -> InjectionSpec:
    settings: dict[str, object] = {
        "slot_id": "r0c0",
        "channels": 4,
        "position": 0.5,
        "module": "blocks.0",
        "topology": "cnn",
        "shape": (4, 2, 2),
    }
    return InjectionSpec(**{**settings, **changes})  # type: ignore[arg-type]


def test_slot_config_from_specs_follows_position() -> None:
    late, early = _spec(position=1.0), _spec(slot_id="r0c1", position=0.2, module="blocks.9")
    config = SlotConfig.from_specs([late, early])
    assert config.slot_ids == ("r0c1", "r0c0")
    assert config.index_for_name("blocks.9") == config.index_for_name("r0c1") == 0


def test_masks_judge_whole_actions() -> None:
    masks = ActionMasks(
        op=np.array([[True, True, False, False]]),
        slot=np.zeros((1, NUM_OPS, 2), dtype=bool),
        blueprint=np.array([[[False, True], [True, True]]]),
        blend=np.array([[True, False, True]]),
    )
    masks.slot[0, LifecycleOp.GERMINATE, 0] = True
    wait, germinate, cull = 0, 1, 2
    legal = {
        (0, 0, 0, wait): True,
        (1, 1, 1, wait): True,
        (0, 1, 0, germinate): True,
        (0, 0, 0, germinate): False,
        (1, 1, 0, germinate): False,
        (0, 1, 1, germinate): False,
        (0, 0, 0, cull): False,
    }
    for action, allowed in legal.items():
        assert masks.allows(np.array([action]))[0] == allowed, action


def test_draws_are_functions_of_their_purpose() -> None:
    assert draw_key(1, "shuffle", 2, 3) == draw_key(1, "shuffle", 2, 3)
    keys = {
        draw_key(1, "shuffle", 2, 3),
        draw_key(1, "shuffle", 23),
        draw_key(1, "noise", 2, 3),
        draw_key(12, "shuffle", 3),
        draw_key(2, "shuffle", 2, 3),
    }
    assert len(keys) == 5
    assert all(0 <= key < 2**63 for key in keys)
    assert np.array_equal(generator(5, "x").random(4), generator(5, "x").random(4))


def test_draws_are_spread_evenly() -> None:
    bits = np.array([[draw_key(0, "x", i) >> b & 1 for b in range(63)] for i in range(2000)])
    # Four standard errors of a fair coin over 2,000 throws.
    assert np.all(np.abs(bits.mean(axis=0) - 0.5) < 4 * 0.5 / np.sqrt(2000))


def test_002_low2_membership_of_heads_does_not_depend_on_order() -> None:
    assert all(isinstance(heads, frozenset) for heads in RELEVANT_HEADS.values())
    for op in LifecycleOp:
        for head, name in enumerate(HEAD_NAMES):
            assert HEAD_RELEVANCE[op, head] == (name in RELEVANT_HEADS[op])


def test_004_m10_the_default_slots_are_made_once() -> None:
    assert SlotConfig.default() is SlotConfig.default()
    assert SlotConfig.default().slot_ids == ("r0c0", "r0c1", "r0c2")
