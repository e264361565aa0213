"""Two growths that should be one."""

from typing import Any

import pytest
import torch

import esper


def check_close(mine: dict[str, Any], other: dict[str, Any], most: float = 1e-5) -> None:
    assert list(mine) == list(other)
    for name, value in other.items():
        wanted = pytest.approx(value, abs=most, rel=most) if isinstance(value, float) else value
        assert mine[name] == wanted, name


def check_same_growth(found: esper.Body, wanted: esper.Body) -> None:
    for mine, other in zip(found.history, wanted.history, strict=True):
        check_close(mine, other)
    for event, another in zip(found.recorder.events, wanted.recorder.events, strict=True):
        check_close(event.row(), another.row())
    states = found.model.host.state_dict(), wanted.model.host.state_dict()
    for mine, other in zip(*(state.values() for state in states), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
