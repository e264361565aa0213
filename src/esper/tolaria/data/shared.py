"""A data set in memory that several processes read, so that it is there once per machine.

It lives in a temporary file that has no name: processes find it by an open file that they are
handed when they are started, and it is gone with the last of them, however that one ended.
"""

import mmap
import tempfile
from dataclasses import dataclass, fields
from multiprocessing.reduction import DupFd
from typing import Any, BinaryIO, cast

import torch

from esper.leyline import ConfigError
from esper.tolaria.data.splits import DataSplits

# (dtype, shape, place of the first byte) of each tensor, in the order of the fields.
ALIGNMENT = 64
Layout = tuple[tuple[torch.dtype, torch.Size, int], ...]


@dataclass(frozen=True)
class SharedSplits(DataSplits):
    """Tensors in a file without a name. Can be handed to a process that is being started; what
    anybody writes into the tensors stays with them."""

    file: BinaryIO
    layout: Layout

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (DupFd(self.file.fileno()), self.layout)


def share(data: DataSplits) -> SharedSplits:
    """`data` as it can be shared; raises ConfigError if there is no room for the file."""
    tensors = [getattr(data, field.name) for field in fields(DataSplits)]
    layout, end = [], 0
    for tensor in tensors:
        layout.append((tensor.dtype, tensor.shape, end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    try:
        file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (open while it is used)
        file.truncate(end)
        for tensor, (_, _, start) in zip(tensors, layout, strict=True):
            file.seek(start)
            file.write(memoryview(tensor.contiguous().numpy()).cast("B"))
        file.flush()
    except OSError as error:
        raise ConfigError(
            f"the data ({end:,} bytes) does not fit into {tempfile.gettempdir()} "
            f"({error.strerror}); set TMPDIR to a folder with room"
        ) from error
    return _open(file, tuple(layout))


def _receive(handle: Any, layout: Layout) -> SharedSplits:
    return _open(open(handle.detach(), "rb"), layout)


def _open(file: BinaryIO, layout: Layout) -> SharedSplits:
    # Private to whoever writes, one copy for all who only read.
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors = {
        field.name: torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=start).view(
            shape
        )
        for field, (dtype, shape, start) in zip(fields(DataSplits), layout, strict=True)
    }
    return SharedSplits(**tensors, file=file, layout=layout)
