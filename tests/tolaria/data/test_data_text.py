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
    load_tinystories,
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


# tinystories

STORIES = [f"Once there was a cat, number {number}.\nIt slept." for number in range(40)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tinystories").mkdir()
    return tmp_path / "tinystories"


def stream(x: torch.Tensor, y: torch.Tensor) -> str:
    """The text of a part, from the windows' first byte and all their targets."""
    return bytes([int(x[0, 0]), *y.flatten().tolist()]).decode().rstrip("\0")


def test_stories_are_split_whole_with_a_zero_byte_after_each(folder):
    path = folder / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(STORIES), newline="\r\n")
    data = load_tinystories(folder.parent, block_size=16)
    assert data.train_x.shape[1] == 16
    assert stream(data.train_x, data.train_y) == "\0".join(STORIES[:36])
    assert stream(data.val_x, data.val_y) == "\0".join(STORIES[36:38])
    assert stream(data.test_x, data.test_y) == "\0".join(STORIES[38:])


def test_repeated_stories_are_dropped(folder):
    path = folder / "stories.txt"
    path.write_text("<|endoftext|>".join(STORIES))
    plain = load_tinystories(folder.parent)
    path.write_text("<|endoftext|>".join([*STORIES[:5], *STORIES, ""]))
    assert all(
        torch.equal(a, b)
        for a, b in zip(astuple(plain), astuple(load_tinystories(folder.parent)), strict=True)
    )


def test_only_whole_stories_within_the_limit_are_read(folder):
    (folder / "stories.txt").write_text("<|endoftext|>".join(STORIES))
    ten = sum(len(story) for story in STORIES[:10])
    for limit, last in ((ten - 1, 8), (ten, 9), (ten + len(STORIES[10]) - 1, 9)):
        data = load_tinystories(folder.parent, block_size=8, max_bytes=limit)
        assert stream(data.test_x, data.test_y) == STORIES[last]


def test_missing_stories_say_what_to_put_where(tmp_path):
    with pytest.raises(DataMissingError, match=r"put one \.txt") as error:
        load_tinystories(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert catalogue.status("tinystories", tmp_path).state == "missing"
    with pytest.raises(DataMissingError, match=r"put one \.txt"):
        catalogue.get("tinystories", tmp_path)


def test_two_files_are_ambiguous(folder):
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("x")
    with pytest.raises(ConfigError, match=r"a\.txt, b\.txt; keep exactly one"):
        load_tinystories(folder.parent)
    assert catalogue.status("tinystories", folder.parent).state == "damaged"


def test_text_without_separators_is_refused(folder):
    (folder / "book.txt").write_text("One long book.\n\n" * 100)
    with pytest.raises(ConfigError, match=r"1 different stories.*<\|endoftext\|>"):
        load_tinystories(folder.parent)
    assert catalogue.status("tinystories", folder.parent).state == "present"
