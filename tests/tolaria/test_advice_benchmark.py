"""The benchmark counts advice as right as it says."""

from types import SimpleNamespace
from typing import Any

import pytest

from advice import CONTINUE, GROW, RETRAIN, summary


def said(verdict: str) -> Any:
    return SimpleNamespace(
        verdict=verdict, findings=SimpleNamespace(rho=0.1, plateaued=True), share=0.1
    )


def test_advice_is_right_within_half_a_point_of_the_best() -> None:
    found = {
        CONTINUE: [90.0, 90.0, 90.0],
        GROW: [91.0, 90.5, 92.0],
        RETRAIN: [50.0, 60.0, 93.0],
    }
    result = summary([said(GROW), said(CONTINUE), said(GROW)], found)
    assert result["right"] == 2
    assert result["verdicts"] == {GROW: 2, CONTINUE: 1}
    assert result["advised"] == pytest.approx((91.0 + 90.0 + 92.0) / 3)
    assert result["best in hindsight"] == pytest.approx((91.0 + 90.5 + 93.0) / 3)
    assert result["always retrain wider"] == pytest.approx(203.0 / 3)
