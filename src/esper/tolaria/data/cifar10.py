"""cifar10: 60,000 colour photographs of 32×32 pixels, in the six standard binary batches."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from esper.leyline import ConfigError
from esper.tolaria.data.files import cure, read
from esper.tolaria.data.splits import DataSplits, hold_out_tenth, stratified_split

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
FILES = (*TRAIN_FILES, TEST_FILE)
CLASSES = 10
RECORD = 1 + 3 * 32 * 32  # one label byte, then the red, green and blue planes
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
PADDING = 4


def load(root: Path) -> DataSplits:
    """Images [N, 3, 32, 32] from `root/cifar10`, normalised by the customary MEAN and STD.

    Validation is a fixed, stratified tenth of the official training part; test is the official test
    part. Batches may hold any number of whole records. Raises DataMissingError for a file that is
    not there, ConfigError for one that is damaged. The official set takes 740 MB as float32.
    """
    records, test = _read_all(root / "cifar10")
    train_rows, val_rows = hold_out_tenth(records[:, 0], "cifar10")
    return _splits(records[train_rows], records[val_rows], test)


def load_small(root: Path, train: int, val: int) -> DataSplits:
    """Images [N, 3, 16, 16], each pixel the mean of four of the official ones: `train` and `val`
    images of the official training part, drawn once and for ever with the class shares of the
    whole, and all of the official test part. Raises as `load`, and ConfigError if there are too
    few images."""
    records, test = _read_all(root / "cifar10")
    train_rows, val_rows = stratified_split(records[:, 0], [train, val], f"cifar10/{train}/{val}")
    data = _splits(records[train_rows], records[val_rows], test)
    halves = {part: avg_pool2d(getattr(data, part), 2) for part in ("train_x", "val_x", "test_x")}
    return replace(data, **halves)


def _read_all(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Records of the official training and test parts."""
    train = np.concatenate([_read_records(folder, name) for name in TRAIN_FILES])
    return train, _read_records(folder, TEST_FILE)


def _splits(*parts: np.ndarray) -> DataSplits:
    """Of the records of training, validation and test."""
    train_x, val_x, test_x = (normalise(torch.tensor(part[:, 1:])) for part in parts)
    train_y, val_y, test_y = (torch.tensor(part[:, 0], dtype=torch.int64) for part in parts)
    return DataSplits(train_x, train_y, val_x, val_y, test_x, test_y)


def normalise(pixels: Tensor) -> Tensor:
    """float32 images [N, 3, 32, 32] of uint8 pixels of 3,072 values each, by MEAN and STD."""
    images = pixels.reshape(-1, 3, 32, 32).to(torch.float32)  # the only copy: the rest is in place
    return images.div_(255).sub_(_per_channel(MEAN)).div_(_per_channel(STD))


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Normalised images [B, 3, H, W], each shifted by up to PADDING pixels and perhaps mirrored.

    The border that a shift uncovers is black, as if padded before normalising. Advances `generator`
    by three draws per image; the same state gives the same result.
    """
    batch, channels, height, width = images.shape
    device = images.device
    black = (-_per_channel(MEAN) / _per_channel(STD)).to(device, images.dtype)
    padded = black.repeat(batch, 1, height + 2 * PADDING, width + 2 * PADDING)
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = images

    def draw(high: int) -> Tensor:
        drawn = torch.randint(high, (batch, 1), generator=generator, device=generator.device)
        return drawn.to(device)

    down, right, mirrored = draw(2 * PADDING + 1), draw(2 * PADDING + 1), draw(2)
    rows = down + torch.arange(height, device=device)
    columns = torch.arange(width, device=device)
    columns = right + torch.where(mirrored.bool(), columns.flip(0), columns)
    pixels = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
    pixels = pixels.view(batch, 1, -1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, pixels).view(images.shape)


def _per_channel(values: tuple[float, float, float]) -> Tensor:
    return torch.tensor(values).view(3, 1, 1)


def _read_records(folder: Path, name: str) -> np.ndarray:
    """uint8 [N, RECORD]: the label, then the pixels."""
    data = read(folder, name, FILES)
    if not data or len(data) % RECORD:
        raise ConfigError(
            f"{folder / name} has {len(data)} bytes, not a whole number of records of {RECORD} "
            f"bytes; {cure(folder)}"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, RECORD)
    if records[:, 0].max() >= CLASSES:
        raise ConfigError(
            f"{folder / name} has the label {records[:, 0].max()}, above {CLASSES - 1}; "
            f"{cure(folder)}"
        )
    return records
