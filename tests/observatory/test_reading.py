"""Reading rows by offset agrees with reading them all, whatever state the file is in."""

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.observatory import reading as reading_module
from esper.observatory.reading import (
    MAX_COST,
    JsonLines,
    UnreadableError,
    is_locked,
    number,
    open_regular,
    parse_json,
    read_json,
    read_text,
)
from esper.observatory.run_directory import RunDirectory

ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.text(max_size=20), st.sampled_from([1, 40, 5000])), max_size=60
)


def rounds_of(steps: list[tuple[int, str, int]]) -> list[dict]:
    """Rows whose rounds never fall, of very different lengths."""
    rows, round_ = [], 0
    for further, text, times in steps:
        round_ += further
        row = {"round": round_, "kind": "round" if further else "step", "text": text * times}
        # Rows that others write may have the round anywhere.
        rows.append(row if times == 1 else dict(reversed(row.items())))
    return rows


@settings(max_examples=25, deadline=None)
@given(steps=ROWS, tail=st.binary(max_size=30).filter(lambda t: b"\n" not in t))
def test_rows_by_offset_are_the_rows_of_the_file(tmp_path_factory, steps, tail):
    rows = rounds_of(steps)
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode() + tail)
    with pytest.MonkeyPatch.context() as patched, JsonLines(path) as lines:
        patched.setattr(lines, "_left", 10**12)  # it is read very often here
        assert list(lines.rows()) == rows
        assert lines.last() == (rows[-1] if rows else None)
        offsets = {0}
        for number_ in range(rows[-1]["round"] + 2 if rows else 2):
            begin = lines.start_of_round(number_)
            assert list(lines.rows(begin)) == [r for r in rows if r["round"] >= number_]
            offsets.add(begin)
        marked = [row for row in rows if row["kind"] == "round"]
        found = lines.last_with(b'"kind": "round"', 0, lines.end)
        assert found == (marked[-1] if marked else None)
        sample = lines.sample(5)
        assert len(sample) <= max(7, 5 * 2 + 1) or len(sample) == len(rows)
        assert [row for row in rows if row in sample][-1:] == rows[-1:]
        assert lines.damaged == 0


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff\xfe\n[1, 2]\n{"a": \n{"a": NaN}\n{"a": 2}\n{"half')
    with JsonLines(path) as lines:
        assert list(lines.rows()) == [{"a": 1}, {"a": None}, {"a": 2}]
        assert lines.damaged == 3
        assert lines.last() == {"a": 2}
    path.write_bytes(b'{"a": 1}\n' + b"nonsense\n" * 3)
    with JsonLines(path) as lines:
        assert lines.last() == {"a": 1}


def test_a_file_that_is_cut_while_it_is_read_ends_earlier(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' * 1000)
    with JsonLines(path) as lines:
        os.truncate(path, 9 * 10)
        assert len(list(lines.rows())) == 10
        assert lines.last() is None or lines.last() == {"a": 1}
        assert {"a": 1} in lines.sample(20)
        lines.start_of_round(3)


def test_a_look_reads_little_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"kind": "step", "text": "x" * 500})
    with path.open("w") as file:
        for i in range(40_000):
            file.write(f'{{"round": {i // 100}, {line[1:]}\n')
    reads, real = [], os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        reads.append(length)
        return real(descriptor, length, offset)

    monkeypatch.setattr(reading_module.os, "pread", counted)
    with JsonLines(path) as lines:
        assert lines.last()["round"] == 399
        assert len(lines.sample(100)) in range(95, 102)
        assert lines.start_of_round(200) > 0
    assert sum(reads) < 0.1 * path.stat().st_size


def test_only_plain_files_are_opened(tmp_path: Path):
    (tmp_path / "secret").write_text('{"a": 1}\n')
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe"):
        with pytest.raises(UnreadableError, match=name):
            open_regular(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        JsonLines(tmp_path / "nothing")
    with pytest.raises(UnreadableError, match="link"):
        read_text(tmp_path / "link")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(UnreadableError, match="not text"):
        read_text(tmp_path / "bytes")
    (tmp_path / "long").write_text("1" * 300_000)
    with pytest.raises(UnreadableError, match="longer than"):
        read_text(tmp_path / "long")
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(UnreadableError, match="damaged"):
        read_json(tmp_path / "deep")


def test_what_is_no_number_was_not_measured():
    row = {"a": 1.5, "b": "1", "c": True, "d": None, "e": 10**400, "f": float("nan")}
    assert [number(row, name) for name in "abcdefg"] == [1.5, None, None, None, None, None, None]


def test_the_lock_tells_who_writes_and_asking_does_not_stand_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert not is_locked(tmp_path / ".lock")
    with RunDirectory.create(tmp_path / "run", {"key": 0}):
        assert is_locked(tmp_path / "run" / ".lock")
    assert not is_locked(tmp_path / "run" / ".lock")
    # A view asks at the very moment when a run begins: the run waits for it.
    view = os.open(tmp_path / "run" / ".lock", os.O_RDONLY)
    fcntl.flock(view, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _: os.close(view))
    with RunDirectory(tmp_path / "run"):
        assert is_locked(tmp_path / "run" / ".lock")


def bytes_handled(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that are read or parsed by one use of each kind."""
    handled = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            handled.append(len(arguments[0]) if len(arguments) == 1 else arguments[1])
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr("esper.observatory.reading.os.pread", counted(os.pread))
        patch.setattr("esper.observatory.reading.parse_json", counted(parse_json))
        with JsonLines(path) as lines:
            lines.last()
            lines.sample(1200)
            lines.start_of_round(3)
            lines.last_with(b'"kind": "round"', 0, lines.end)
            list(lines.rows())
            assert lines.damaged
    return sum(handled)


@pytest.mark.parametrize("valid", [True, False])
def test_a_line_of_ten_megabytes_is_left_out_at_little_cost(
    tmp_path: Path, valid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    long = '{"a": "' + "x" * 10_000_000 + '"}' if valid else "[" * 10_000_000
    path.write_text('{"a": 1}\n' * 100 + long + "\n" + '{"a": 2}\n' * 100)
    assert 0 < bytes_handled(path, monkeypatch) <= 2 * MAX_COST
    with JsonLines(path) as lines:
        assert lines.last() == {"a": 2}
        assert {"a": 1} in (sample := lines.sample(1200))
        assert {"a": 2} in sample
        assert {len(row["a"]) for row in lines.rows() if isinstance(row["a"], str)} == set()


@pytest.mark.parametrize("end", [b"", b"\n", b'\n{"a": 1}\n'])
def test_a_sparse_file_of_five_gigabytes_is_left_at_little_cost(
    tmp_path: Path, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.seek(5 << 30)
        file.write(end or b"\0")
    assert 0 < bytes_handled(path, monkeypatch) <= 2 * MAX_COST
    with JsonLines(path) as lines:
        assert lines.last() == ({"a": 1} if len(end) > 1 else None)
