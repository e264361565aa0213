"""Slot ids: r{row}c{col}, ordered by row then column. The order fixes action indices."""

import re

from esper.leyline.errors import SlotIdError

_PATTERN = re.compile(r"^r(\d+)c(\d+)$")
_RENAMED = {"early": "r0c0", "mid": "r0c1", "late": "r0c2"}


def format_slot_id(row: int, col: int) -> str:
    if row < 0 or col < 0:
        raise SlotIdError(f"row and column of a slot id must be 0 or more, got ({row}, {col})")
    return f"r{row}c{col}"


def parse_slot_id(slot_id: str) -> tuple[int, int]:
    """(row, col) of a slot id; raises SlotIdError for anything else."""
    if slot_id.lower() in _RENAMED:
        raise SlotIdError(
            f"slot {slot_id!r} is not a slot id; write {_RENAMED[slot_id.lower()]!r} instead"
        )
    match = _PATTERN.match(slot_id)
    if match is None:
        raise SlotIdError(f"slot {slot_id!r} is not of the form r<row>c<col>, such as 'r0c1'")
    return int(match[1]), int(match[2])


def validate_slot_ids(slot_ids: tuple[str, ...]) -> None:
    """Raises SlotIdError unless the ids are well formed, distinct and at least one."""
    if not slot_ids:
        raise SlotIdError("at least one slot is needed, got none")
    for slot_id in slot_ids:
        parse_slot_id(slot_id)
    if len(set(slot_ids)) != len(slot_ids):
        raise SlotIdError(f"slot ids must be distinct, got {list(slot_ids)}")
