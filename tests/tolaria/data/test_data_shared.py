import multiprocessing
import os
import tempfile
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from esper.leyline import ConfigError
from esper.tolaria.data.splits import DataSplits, SharedSplits, share
from esper.tolaria.tasks import find_task

NAMES = [field.name for field in fields(DataSplits)]


def digits() -> DataSplits:
    return find_task("digits").load(Path("unused"))


def test_what_is_shared_is_what_was_given() -> None:
    data = digits()
    # Of an odd number of bytes, in front of numbers that take eight each.
    data = DataSplits(
        data.train_x[:3, :, :3, :3],
        data.train_y[:3],
        data.val_x[:2, :, :3, :3],
        data.val_y[:2],
        data.test_x[:1, :, :3, :3],
        data.test_y[:1],
    )
    shared = share(data)
    for name in NAMES:
        assert torch.equal(getattr(shared, name), getattr(data, name)), name
        assert getattr(shared, name).dtype == getattr(data, name).dtype


def sums_and_writes(data: DataSplits, pipe: Connection) -> None:
    pipe.send([float(getattr(data, name).double().sum()) for name in NAMES])
    data.train_x.zero_()
    pipe.send(float(data.train_x.sum()))


def test_another_process_reads_it_and_cannot_change_it_for_the_others() -> None:
    data, shared = digits(), share(digits())
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=sums_and_writes, args=(shared, theirs))
        process.start()
        assert ours.recv() == [float(getattr(data, name).double().sum()) for name in NAMES]
        assert ours.recv() == 0.0
        process.join()
        assert process.exitcode == 0
    assert torch.equal(shared.train_x, data.train_x)


def test_no_file_remains_if_processes_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a name disappears when the last process closes it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = share(digits())
    assert isinstance(shared, SharedSplits)
    assert os.fstat(shared.file.fileno()).st_nlink == 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*TMPDIR"):
        share(digits())
