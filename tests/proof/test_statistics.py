"""Paired differences against SciPy's own answers, closed forms, and Holm by hand."""

from itertools import product
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from esper.leyline.reports import few_pairs
from esper.proof.report import AVERAGED, summary
from esper.proof.statistics import holm, paired_difference


def exact_sign_flip_p(differences: list[float]) -> float:
    """Share of all sign patterns whose mean is at least as far from 0."""
    observed = abs(fmean(differences))
    means = [
        abs(fmean(sign * d for sign, d in zip(signs, differences, strict=True)))
        for signs in product((-1, 1), repeat=len(differences))
    ]
    return sum(mean >= observed - 1e-12 for mean in means) / len(means)


@pytest.mark.parametrize("key", range(4))
def test_p_is_the_share_of_sign_flips(key: int) -> None:
    rng = np.random.default_rng(key)
    first, second = rng.normal(0.4, 1, 8), rng.normal(0, 1, 8)
    found = paired_difference(first.tolist(), second.tolist())
    assert found.p == pytest.approx(exact_sign_flip_p((first - second).tolist()), abs=1e-12)
    assert found.mean == pytest.approx(float(np.mean(first - second)))


def test_p_of_equal_signs_is_two_over_all_patterns() -> None:
    found = paired_difference([2.0, 3.0, 4.0, 5.0, 6.0], [1.0] * 5)
    assert found.p == pytest.approx(2 / 2**5)


def test_many_pairs_agree_with_the_t_test() -> None:
    rng = np.random.default_rng(0)
    differences = rng.normal(0.3, 1, 60)
    found = paired_difference(differences.tolist(), [0.0] * 60)
    assert found.p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=0.015)
    assert found.low is not None
    assert found.high is not None
    t_interval = stats.t.interval(
        0.95, 59, loc=differences.mean(), scale=differences.std(ddof=1) / 60**0.5
    )
    assert (found.low, found.high) == pytest.approx(t_interval, abs=0.06)


def test_interval_is_scipys_bca_and_not_the_percentile_one() -> None:
    skewed = np.random.default_rng(1).exponential(1.0, 15)
    found = paired_difference(skewed.tolist(), [0.0] * 15, key=3)
    for method, same in (("BCa", True), ("percentile", False)):
        expected = stats.bootstrap(
            (skewed,), np.mean, n_resamples=9999, method=method, rng=np.random.default_rng(3)
        ).confidence_interval
        assert ((found.low, found.high) == pytest.approx(tuple(expected), abs=1e-9)) is same


def test_bca_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(60):
        found = paired_difference(rng.normal(1.0, 1.0, 20).tolist(), [0.0] * 20)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 1.0 <= found.high
    assert hits >= 50  # of 60; 57 expected


def test_the_same_key_gives_the_same_answer() -> None:
    first, second = list(np.random.default_rng(0).normal(size=(2, 16)))
    assert paired_difference(list(first), list(second)) == paired_difference(
        list(first), list(second)
    )


def test_one_pair_says_nothing_about_certainty() -> None:
    found = paired_difference([3.0], [1.0])
    assert (found.mean, found.low, found.high, found.p) == (2.0, None, None, None)


@pytest.mark.parametrize("shift", [0.0, 1.5])
def test_equal_differences_have_no_interval(shift: float) -> None:
    base = [0.1, 0.7, 0.3, 0.9]
    found = paired_difference([x + shift for x in base], base)
    assert (found.low, found.high) == (None, None)
    assert found.p == pytest.approx(1.0 if shift == 0 else 2 / 2**4)


@pytest.mark.parametrize("comparisons", [1, 3])
def test_few_pairs_are_said_to_show_nothing_exactly_where_they_do(comparisons: int) -> None:
    """The best case: all differences point the same way, in every comparison."""
    for pairs in range(2, 12):
        best = paired_difference([2.0 + n for n in range(pairs)], [1.0] * pairs).p
        adjusted = holm([best] * comparisons)[0]
        assert adjusted is not None
        note = few_pairs(pairs, comparisons)
        assert (note is None) == (adjusted < 0.05), pairs
        if note is not None:
            assert f"p-value is {adjusted:.2g}" in note


def test_one_pair_is_said_to_have_no_interval() -> None:
    assert "no p-value" in (few_pairs(1, 1) or "")
    assert few_pairs(1, 0) is None, "nothing is compared"


def test_a_permutation_test_of_scipy_agrees_for_hosts() -> None:
    differences = np.random.default_rng(2).normal(0.5, 1.0, 9)
    expected = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    found = paired_difference(differences.tolist(), [0.0] * 9)
    assert found.p == pytest.approx(float(expected.pvalue))


def test_series_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        paired_difference([1.0, 2.0], [1.0])


def test_holm_by_hand() -> None:
    # Sorted: .01 x4, .02 x3, .03 x2 -> .06 (as large as before), .5 x1
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_leaves_out_what_has_no_p() -> None:
    assert holm([None, 0.02, None, 0.04]) == [None, pytest.approx(0.04), None, pytest.approx(0.04)]


def test_the_row_of_an_arm_has_means_over_its_keys_of_what_was_measured() -> None:
    def result(arm: str, value: float, val_score: float | None) -> Any:
        return SimpleNamespace(arm=arm, **dict.fromkeys(AVERAGED, value) | {"val_score": val_score})

    results = [result("a", 2.0, None), result("a", 4.0, 7.0), result("b", 90.0, 90.0)]
    chosen = ("name", "extra", "control_of", "learning_rate", "width", "shape")
    arm: Any = SimpleNamespace(label="a", **dict.fromkeys(chosen))
    row = summary(arm, results)
    assert row["val_score"] == 7.0
    assert {row[name] for name in AVERAGED if name != "val_score"} == {3.0}
    assert summary(arm, results[:1])["val_score"] is None
