import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import ConfigError
from esper.tolaria.data.splits import DataSplits, hold_out_tenth, standardise, stratified_split


def images(rows: int) -> torch.Tensor:
    return torch.zeros(rows, 1, 4, 4)


def labels(rows: int) -> torch.Tensor:
    return torch.zeros(rows, dtype=torch.int64)


def tokens(rows: int) -> torch.Tensor:
    return torch.zeros(rows, 7, dtype=torch.int64)


def test_images_and_tokens_are_accepted():
    assert len(DataSplits(images(3), labels(3), images(2), labels(2), images(1), labels(1)).val_x)
    assert len(DataSplits(*[tokens(2)] * 6).test_y) == 2


@pytest.mark.parametrize(
    ("val_x", "val_y", "complaint"),
    [
        (images(2), labels(3), "2 inputs and 3 targets"),
        (images(0), labels(0), "0 inputs"),
        (images(2), labels(2).float(), "must be torch.int64"),
        (images(2).double(), labels(2), "float32"),
        (images(2)[:, 0], labels(2), "float32"),
        (tokens(2), labels(2), "int64"),
        (tokens(2), tokens(2), "differ"),
        (torch.zeros(2, 1, 5, 4), labels(2), "differ"),
    ],
)
def test_parts_that_do_not_fit_are_refused(val_x, val_y, complaint):
    with pytest.raises(ConfigError, match=complaint):
        DataSplits(images(2), labels(2), val_x, val_y, images(2), labels(2))


@given(
    classes=st.lists(st.integers(0, 4), min_size=3, max_size=200),
    shares=st.tuples(st.floats(0.05, 0.6), st.floats(0.05, 0.39)),
)
def test_stratified_parts_are_disjoint_exact_and_proportional(classes, shares):
    y = np.array(classes)
    sizes = [max(1, int(share * len(y))) for share in shares]
    parts = stratified_split(y, sizes, "test")
    rows = np.concatenate(parts)
    assert [len(part) for part in parts] == sizes
    assert len(np.unique(rows)) == len(rows)
    for part in parts:
        for label in np.unique(y):
            expected = len(part) * np.mean(y == label)
            # A slice of the interleaved order can be off by one at each end, for every other class.
            assert abs(np.sum(y[part] == label) - expected) <= len(np.unique(y))


def test_the_draw_depends_on_purpose_and_nothing_else():
    y = np.arange(100) % 10
    first = stratified_split(y, [50, 50], "a")
    torch.manual_seed(5)
    again = stratified_split(y, [50, 50], "a")
    other = stratified_split(y, [50, 50], "b")
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_balanced_classes_stay_exactly_balanced():
    y = np.repeat(np.arange(10), 60)
    train, val = hold_out_tenth(y, "test")
    assert np.bincount(y[val]).tolist() == [6] * 10
    assert np.bincount(y[train]).tolist() == [54] * 10


@pytest.mark.parametrize("sizes", [[3, 2], [4, 0]])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ConfigError, match="4 rows"):
        stratified_split(np.zeros(4), sizes, "test")


def test_standardise_uses_training_statistics_only():
    train, other = np.array([[0, 2], [4, 6]], np.uint8), np.array([[6]], np.uint8)
    scaled, moved = standardise(train, other)
    assert scaled.mean() == pytest.approx(0)
    assert scaled.std(unbiased=False) == pytest.approx(1)
    assert moved.item() == pytest.approx(3 / np.sqrt(5))
    with pytest.raises(ConfigError, match="same value"):
        standardise(np.ones((2, 2), np.uint8))
