"""Training, validation and test split of a data set, the draws behind them, and splits that several
processes share in memory."""

import mmap
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from multiprocessing.reduction import DupFd
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from esper.leyline import ConfigError, draw_key

SPLIT_SEED = 0  # never that of a run: every run has the same validation and test splits


@dataclass(frozen=True)
class DataSplits:
    """Training, validation and test tensors; row i of `*_x` belongs to row i of `*_y`.

    Images are float32 [N, C, H, W], normalised, with int64 targets [N]. Text is int64 tokens
    [N, T] with int64 targets [N, T], the next token of each. Raises ConfigError if not so.
    """

    train_x: Tensor
    train_y: Tensor
    val_x: Tensor
    val_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def __post_init__(self) -> None:
        for name in ("train", "val", "test"):
            _check_split(name, getattr(self, f"{name}_x"), getattr(self, f"{name}_y"))
        for kind in ("x", "y"):
            rows = [getattr(self, field.name) for field in fields(self) if field.name[-1] == kind]
            if len({(row.dtype, row.shape[1:]) for row in rows}) != 1:
                raise ConfigError(f"the three splits of {kind} differ in dtype or shape per row")


def _check_split(name: str, x: Tensor, y: Tensor) -> None:
    if len(x) == 0 or len(x) != len(y):
        raise ConfigError(f"{name} has {len(x)} inputs and {len(y)} targets; give as many of both")
    if y.dtype != torch.int64:
        raise ConfigError(f"{name} targets are {y.dtype}; they must be torch.int64")
    images = x.dtype == torch.float32 and x.dim() == 4 and y.dim() == 1
    tokens = x.dtype == torch.int64 and x.dim() == 2 and y.shape == x.shape
    if not images and not tokens:
        raise ConfigError(
            f"{name} has inputs {x.dtype} {tuple(x.shape)} and targets {tuple(y.shape)}; they must "
            "be float32 [N, C, H, W] with [N], or int64 [N, T] with [N, T]"
        )


def draw_order(count: int, purpose: str, *counters: int) -> np.ndarray:
    """The numbers below `count` in a random order that is fixed for this purpose.

    It is made of hashes, because NumPy's permutations may change between versions.
    """
    keys = [draw_key(SPLIT_SEED, f"split/{purpose}", *counters, row) for row in range(count)]
    return np.argsort(np.array(keys, dtype=np.int64), kind="stable")


def stratified_split(labels: np.ndarray, sizes: Sequence[int], purpose: str) -> list[np.ndarray]:
    """Disjoint sets of exactly `sizes` rows, each with the class shares of the whole.

    `labels` is [N]; returns one ascending array of row indices per size. The draw depends on the
    labels, the sizes and `purpose` only. Raises ConfigError if there are too few rows.
    """
    if min(sizes) < 1 or sum(sizes) > len(labels):
        raise ConfigError(f"{len(labels)} rows cannot be split into sets of {list(sizes)}")
    order = draw_order(len(labels), purpose)
    # The rank of each row within its class, as a fraction of the class: sorting by it interleaves
    # the classes evenly, so that every slice of the result has their shares.
    rank = np.empty(len(labels))
    for label in np.unique(labels):
        rows = order[labels[order] == label]
        rank[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
    interleaved = order[np.argsort(rank[order], kind="stable")]
    ends = np.cumsum([0, *sizes])
    return [np.sort(interleaved[start:end]) for start, end in pairwise(ends)]


def hold_out_tenth(labels: np.ndarray, purpose: str) -> tuple[np.ndarray, np.ndarray]:
    """(training rows, validation rows): a fixed, stratified tenth, at least one row, held out."""
    held_out = max(1, round(len(labels) / 10))
    train, val = stratified_split(labels, [len(labels) - held_out, held_out], purpose)
    return train, val


def standardise(train: np.ndarray, *others: np.ndarray) -> list[Tensor]:
    """float32 tensors of all arrays, scaled so that `train` has mean 0 and standard deviation 1."""
    mean, std = float(train.mean(dtype=np.float64)), float(train.std(dtype=np.float64))
    if std == 0:
        raise ConfigError("every training pixel has the same value; check the image files")
    return [
        torch.tensor(array, dtype=torch.float32).sub_(mean).div_(std) for array in (train, *others)
    ]


ALIGNMENT = 64
# (dtype, shape, offset of the first byte) of each tensor, in the order of the fields.
Layout = tuple[tuple[torch.dtype, torch.Size, int], ...]


@dataclass(frozen=True)
class SharedSplits(DataSplits):
    """Tensors in a file without a name, which can be pickled for a process that is being started.
    What one process writes into the tensors, the others do not see."""

    file: BinaryIO
    layout: Layout

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (DupFd(self.file.fileno()), self.layout)


def share(data: DataSplits) -> SharedSplits:
    """A copy that can be shared; raises ConfigError if there is no space for the file."""
    tensors = [getattr(data, field.name) for field in fields(DataSplits)]
    layout, end = [], 0
    for tensor in tensors:
        layout.append((tensor.dtype, tensor.shape, end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    try:
        file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115
        file.truncate(end)
        for tensor, (_, _, start) in zip(tensors, layout, strict=True):
            file.seek(start)
            file.write(memoryview(tensor.contiguous().numpy()).cast("B"))
        file.flush()
    except OSError as error:
        raise ConfigError(
            f"the data ({end:,} bytes) does not fit into {tempfile.gettempdir()} "
            f"({error.strerror}); set TMPDIR to a folder with more space"
        ) from error
    return _open(file, tuple(layout))


def _receive(handle: Any, layout: Layout) -> SharedSplits:
    return _open(open(handle.detach(), "rb"), layout)


def _open(file: BinaryIO, layout: Layout) -> SharedSplits:
    # Copy on write: one copy in memory for all processes that only read.
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors = {
        field.name: torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=start).view(
            shape
        )
        for field, (dtype, shape, start) in zip(fields(DataSplits), layout, strict=True)
    }
    return SharedSplits(**tensors, file=file, layout=layout)
