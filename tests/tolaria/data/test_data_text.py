import sys
from dataclasses import astuple
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import ConfigError, DataMissingError
from esper.tolaria.data import catalogue
from esper.tolaria.data.text import (
    PYDOCS_SPLIT_BYTES,
    SPLITS,
    load_pydocs,
    pydocs_text,
    split_blocks,
    windows,
)

# windows and blocks


@given(text=st.binary(max_size=60), block_size=st.integers(1, 12))
def test_padded_windows_predict_every_byte_but_the_first_once(text, block_size):
    rows = windows(text, block_size, pad=0)
    predicted = bytes(rows[:, 1:].flatten().tolist())
    assert predicted[: len(text) - 1 if text else 0] == text[1:]
    assert len(predicted) - max(0, len(text) - 1) < block_size
    assert not any(predicted[max(0, len(text) - 1) :])


@given(text=st.binary(max_size=60), block_size=st.integers(1, 12))
def test_windows_without_padding_are_slices_of_the_text(text, block_size):
    rows = windows(text, block_size)
    assert len(rows) == max(0, len(text) - 1) // block_size
    for number, row in enumerate(rows.tolist()):
        assert bytes(row) == text[number * block_size :][: block_size + 1]


def test_windows_need_a_block():
    with pytest.raises(ConfigError, match="block_size is 0"):
        windows(b"abc", 0)


@given(text=st.binary(max_size=3000), block_bytes=st.integers(1, 200))
def test_runs_are_the_whole_text_each_of_one_split(text, block_bytes):
    runs = split_blocks(text, block_bytes, "test")
    assert sum(len(run) for name in SPLITS for run in runs[name]) == len(text)
    for name in SPLITS:
        assert all(run and run in text for run in runs[name])


def test_every_ten_blocks_give_one_to_validation_and_one_to_test():
    text = bytes(range(200))
    runs = split_blocks(text, 1, "test")
    held_out = {name: sorted(byte for run in runs[name] for byte in run) for name in SPLITS}
    assert sorted(chain(*held_out.values())) == list(text)
    for name in ("val", "test"):
        assert [byte // 10 for byte in held_out[name]] == list(range(20))
        assert len({byte % 10 for byte in held_out[name]}) > 3, "the index within ten is random"


# pydocs


def test_pydocs_load_for_real():
    data = load_pydocs(block_size=64)
    for x, y in (
        (data.train_x, data.train_y),
        (data.val_x, data.val_y),
        (data.test_x, data.test_y),
    ):
        assert x.dtype == torch.int64
        assert x.shape[1] == 64
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert 0 <= int(x.min()) <= int(x.max()) < 256
    total = len(data.train_x) + len(data.val_x) + len(data.test_x)
    assert total * 64 > 0.97 * len(pydocs_text())
    assert 0.08 < len(data.val_x) / total < 0.12
    assert 0.08 < len(data.test_x) / total < 0.12
    again = load_pydocs(block_size=64)
    assert all(torch.equal(a, b) for a, b in zip(astuple(data), astuple(again), strict=True))


def test_pydocs_validation_and_test_are_not_in_the_training_text():
    runs = split_blocks(pydocs_text(), PYDOCS_SPLIT_BYTES, "pydocs")

    def passages(name):
        return [run[at : at + 64] for run in runs[name] for at in range(len(run) - 63)]

    train = set(passages("train"))
    for name in ("val", "test"):
        held_out = passages(name)
        assert sum(passage in train for passage in held_out) < 0.1 * len(held_out)


def test_pydocs_without_help_texts_say_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataMissingError, match="full standard library"):
        load_pydocs()
    assert catalogue.status("pydocs", tmp_path).state == "missing"


def test_a_block_longer_than_the_text_is_refused():
    with pytest.raises(ConfigError, match="pydocs is too short"):
        load_pydocs(block_size=10_000_000)
