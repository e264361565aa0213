"""The life of a seed: its stages, and the only moves between them."""

from enum import IntEnum

import numpy as np


class SeedStage(IntEnum):
    """Where a slot and the seed in it stand. Value 5 is reserved and never used."""

    UNKNOWN = 0
    DORMANT = 1
    GERMINATED = 2
    TRAINING = 3
    BLENDING = 4
    HOLDING = 6
    FOSSILIZED = 7
    CULLED = 8
    EMBARGOED = 9
    RESETTING = 10


VALID_TRANSITIONS: dict[SeedStage, frozenset[SeedStage]] = {
    SeedStage.UNKNOWN: frozenset({SeedStage.DORMANT}),
    SeedStage.DORMANT: frozenset({SeedStage.GERMINATED}),
    SeedStage.GERMINATED: frozenset({SeedStage.TRAINING, SeedStage.CULLED}),
    SeedStage.TRAINING: frozenset({SeedStage.BLENDING, SeedStage.CULLED}),
    SeedStage.BLENDING: frozenset({SeedStage.HOLDING, SeedStage.CULLED}),
    SeedStage.HOLDING: frozenset({SeedStage.FOSSILIZED, SeedStage.CULLED}),
    SeedStage.FOSSILIZED: frozenset(),
    SeedStage.CULLED: frozenset({SeedStage.EMBARGOED}),
    SeedStage.EMBARGOED: frozenset({SeedStage.RESETTING}),
    SeedStage.RESETTING: frozenset({SeedStage.DORMANT}),
}

TERMINAL_STAGES = frozenset({SeedStage.FOSSILIZED})
FAILURE_STAGES = frozenset({SeedStage.CULLED, SeedStage.EMBARGOED, SeedStage.RESETTING})
ACTIVE_STAGES = frozenset(
    {SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED}
)
# A live seed still has to prove itself and can be culled.
LIVE_STAGES = frozenset(
    {SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING}
)
# A blended seed acts on the network's output, so it has a counterfactual.
BLENDED_STAGES = frozenset({SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED})
# Fully blended in: alpha is 1, and a gated blend needs its valve no more.
FULL_STAGES = frozenset({SeedStage.HOLDING, SeedStage.FOSSILIZED})

_VALUES = range(max(SeedStage) + 1)


def _lookup(stages: frozenset[SeedStage]) -> np.ndarray:
    """Read-only bool array to index with an array of stage values: is each one in `stages`?"""
    table = np.array([value in stages for value in _VALUES])
    table.setflags(write=False)
    return table


IS_ACTIVE = _lookup(ACTIVE_STAGES)
IS_LIVE = _lookup(LIVE_STAGES)
IS_BLENDED = _lookup(BLENDED_STAGES)
IS_FULL = _lookup(FULL_STAGES)
HOLDS_SEED = _lookup(LIVE_STAGES | TERMINAL_STAGES)
# LEGAL_TRANSITION[from, to], the same thirteen edges as an array.
LEGAL_TRANSITION = np.stack(
    [_lookup(VALID_TRANSITIONS.get(value, frozenset())) for value in _VALUES]  # type: ignore[call-overload]
)
LEGAL_TRANSITION.setflags(write=False)


def is_valid_transition(current: SeedStage, target: SeedStage) -> bool:
    return target in VALID_TRANSITIONS[current]


def is_terminal_stage(stage: SeedStage) -> bool:
    return stage in TERMINAL_STAGES


def is_active_stage(stage: SeedStage) -> bool:
    return stage in ACTIVE_STAGES


def is_failure_stage(stage: SeedStage) -> bool:
    return stage in FAILURE_STAGES
