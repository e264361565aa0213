"""A data set in memory that several processes share.

It is in a temporary file without a name. Processes receive the open file when they are started; it
disappears with the last of them, even if that one is killed.
"""

import mmap
import tempfile
from dataclasses import dataclass, fields
from multiprocessing.reduction import DupFd
from typing import Any, BinaryIO, cast

import torch

from esper.leyline import ConfigError
from esper.tolaria.data.splits import DataSplits

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
