"""Masks of both encodings of an action, compared with every combination."""

from itertools import product

import numpy as np
import pytest

from esper.gym.problem import FactoredActions, FlatActions
from esper.leyline import HEAD_RELEVANCE, NUM_OPS, ActionMasks, LifecycleOp

SIZES = (3, 4, 3, NUM_OPS)
EVERY_ROW = np.array(list(product(*map(range, SIZES))))


def random_masks(seed: int, n_envs: int = 8) -> ActionMasks:
    """WAIT is always legal, an op where some slot is, germination where some blueprint fits."""
    draw = np.random.default_rng(seed)
    share = draw.random((n_envs, 1, 1))
    blueprint = draw.random((n_envs, *SIZES[:2])) < share
    slot = draw.random((n_envs, NUM_OPS, SIZES[0])) < share
    slot[:, LifecycleOp.WAIT] = True
    slot[:, LifecycleOp.GERMINATE] &= blueprint.any(axis=2)
    blend = np.ones((n_envs, SIZES[2]), dtype=bool)
    return ActionMasks(slot.any(axis=2), slot, blueprint, blend)


def legal_rows(masks: ActionMasks, env: int) -> np.ndarray:
    one = ActionMasks(
        *(part[[env]].repeat(len(EVERY_ROW), axis=0) for part in vars(masks).values())
    )
    return EVERY_ROW[one.allows(EVERY_ROW)]


@pytest.mark.parametrize("seed", range(20))
def test_a_factored_mask_allows_what_occurs_in_a_legal_decision(seed: int) -> None:
    masks = random_masks(seed)
    parts = np.split(FactoredActions(SIZES).mask(masks), np.cumsum(SIZES)[:-1], axis=1)
    for env in range(8):
        legal = legal_rows(masks, env)
        relevant = HEAD_RELEVANCE[legal[:, 3]]
        for head, part in enumerate(parts):
            occurs = set(legal[relevant[:, head], head].tolist())
            assert set(np.flatnonzero(part[env]).tolist()) == (occurs or {0})


@pytest.mark.parametrize("seed", range(20))
def test_a_flat_mask_allows_exactly_the_legal_decisions(seed: int) -> None:
    masks, choices = random_masks(seed), FlatActions(SIZES)
    mask = choices.mask(masks)
    for env in range(8):
        legal = legal_rows(masks, env)
        # Heads that the op does not make relevant are 0 in the table.
        distinct = np.unique(legal * HEAD_RELEVANCE[legal[:, 3]], axis=0)
        allowed = np.unique(choices.rows(np.flatnonzero(mask[env])), axis=0)
        np.testing.assert_array_equal(allowed, distinct)


def test_every_number_is_another_decision() -> None:
    table = FlatActions(SIZES).table
    assert len(np.unique(table, axis=0)) == len(table) == 1 + 3 * 4 * 3 + 2 * 3
    assert table[0].tolist() == [0, 0, 0, LifecycleOp.WAIT]
