"""Image data sets: digits, mnist, fashion_mnist, cifar10. All have ten classes.

Every loader takes the data folder and raises DataMissingError for a file that is missing,
ConfigError for one that is damaged. Files may contain any number of images.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from esper.leyline import ConfigError
from esper.tolaria.data.catalogue import CIFAR10_FILES, IDX_FILES, missing_error
from esper.tolaria.data.fetch import cure, read
from esper.tolaria.data.splits import DataSplits, hold_out_tenth, standardise, stratified_split

CLASSES = 10
DIGITS_SIZES = (1200, 297, 300)  # train, validation, test
CIFAR10_RECORD = 1 + 3 * 32 * 32  # one label byte, then the red, green and blue planes
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
PADDING = 4


def load_digits(root: Path | None = None) -> DataSplits:
    """Images [N, 1, 8, 8] from scikit-learn, standardised; `root` is not used."""
    if find_spec("sklearn") is None:
        raise missing_error("digits")
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = pixels.reshape(-1, 1, 8, 8).astype(np.float32)
    splits = stratified_split(labels, DIGITS_SIZES, "digits")
    return _splits(standardise(*(images[rows] for rows in splits)), (labels[r] for r in splits))


def load_mnist(root: Path, name: str = "mnist") -> DataSplits:
    """Images [N, 1, H, W] of the four idx files in `root/name`, standardised.

    Validation is a fixed, stratified tenth of the official training set; test is the official test
    set.
    """
    folder = root / name
    images, labels = _read_idx_pair(folder, *IDX_FILES[:2])
    test_images, test_labels = _read_idx_pair(folder, *IDX_FILES[2:])
    if images.shape[1:] != test_images.shape[1:]:
        raise ConfigError(
            f"{folder}: training images are {images.shape[1:]}, test images {test_images.shape[1:]}"
        )
    train, val = hold_out_tenth(labels, name)
    return _splits(
        standardise(images[train], images[val], test_images),
        (labels[train], labels[val], test_labels),
    )


def load_cifar10(root: Path) -> DataSplits:
    """Images [N, 3, 32, 32] from `root/cifar10`, normalised by the customary mean and deviation.

    Split as mnist. The official set takes 740 MB as float32.
    """
    records, test = _read_cifar10(root / "cifar10")
    train, val = hold_out_tenth(records[:, 0], "cifar10")
    return _cifar10_splits(records[train], records[val], test)


def load_small_cifar10(root: Path, train: int, val: int) -> DataSplits:
    """Images [N, 3, 16, 16], each pixel the mean of four official ones: `train` and `val` images of
    the official training set, a fixed stratified draw, and the official test set."""
    records, test = _read_cifar10(root / "cifar10")
    rows = stratified_split(records[:, 0], [train, val], f"cifar10/{train}/{val}")
    data = _cifar10_splits(*(records[each] for each in rows), test)
    halves = {name: avg_pool2d(getattr(data, name), 2) for name in ("train_x", "val_x", "test_x")}
    return replace(data, **halves)


def augment_cifar10(images: Tensor, generator: torch.Generator) -> Tensor:
    """Normalised images [B, 3, H, W], each shifted by up to PADDING pixels and perhaps mirrored.

    The border that a shift uncovers is black, as if padded before normalising. Advances `generator`
    by three draws per image; the same state gives the same result.
    """
    batch, channels, height, width = images.shape
    device = images.device
    black = (-_per_channel(CIFAR10_MEAN) / _per_channel(CIFAR10_STD)).to(device, images.dtype)
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


def normalise_cifar10(pixels: Tensor) -> Tensor:
    """float32 images [N, 3, 32, 32] of uint8 pixels, 3,072 values per image."""
    images = pixels.reshape(-1, 3, 32, 32).to(torch.float32)  # the only copy: the rest is in place
    return images.div_(255).sub_(_per_channel(CIFAR10_MEAN)).div_(_per_channel(CIFAR10_STD))


def _per_channel(values: tuple[float, float, float]) -> Tensor:
    return torch.tensor(values).view(3, 1, 1)


def _splits(images: Iterable[Tensor], labels: Iterable[np.ndarray]) -> DataSplits:
    targets = (torch.tensor(each, dtype=torch.int64) for each in labels)
    return DataSplits(*(each for pair in zip(images, targets, strict=True) for each in pair))


def _cifar10_splits(*records: np.ndarray) -> DataSplits:
    images = (normalise_cifar10(torch.tensor(each[:, 1:])) for each in records)
    return _splits(images, (each[:, 0] for each in records))


def _read_cifar10(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [N, CIFAR10_RECORD]: the records of the official training and test sets."""
    batches = []
    for name in CIFAR10_FILES:
        data, path = read(folder, name), folder / name
        if not data or len(data) % CIFAR10_RECORD:
            raise ConfigError(
                f"{path} has {len(data)} bytes, not a whole number of records of {CIFAR10_RECORD} "
                f"bytes; {cure(folder)}"
            )
        batches.append(np.frombuffer(data, np.uint8).reshape(-1, CIFAR10_RECORD))
        _check_labels(batches[-1][:, 0], path)
    return np.concatenate(batches[:-1]), batches[-1]


def _read_idx_pair(
    folder: Path, images_name: str, labels_name: str
) -> tuple[np.ndarray, np.ndarray]:
    """(images [N, 1, H, W], labels [N]) as uint8."""
    images = _parse_idx(read(folder, images_name), 3, folder / images_name)
    labels = _parse_idx(read(folder, labels_name), 1, folder / labels_name)
    if len(images) != len(labels):
        raise ConfigError(
            f"{folder}: {images_name} has {len(images)} images and {labels_name} {len(labels)} "
            f"labels; {cure(folder)}"
        )
    _check_labels(labels, folder / labels_name)
    return images[:, None], labels


def _parse_idx(data: bytes, dimensions: int, path: Path) -> np.ndarray:
    """The uint8 array in the bytes of an idx file; read-only, it shares their memory."""
    magic = bytes([0, 0, 8, dimensions])  # 8: unsigned bytes
    header = 4 + 4 * dimensions
    if data[:4] != magic or len(data) < header:
        raise ConfigError(
            f"{path} is not an idx file of {dimensions}-dimensional bytes (it starts with "
            f"{data[:4].hex() or 'nothing'}, not {magic.hex()}); {cure(path.parent)}"
        )
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", dimensions, offset=4))
    expected = header + math.prod(shape)
    if len(data) != expected:
        raise ConfigError(
            f"{path} has {len(data)} bytes, but its header says {expected}; {cure(path.parent)}"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _check_labels(labels: np.ndarray, path: Path) -> None:
    if len(labels) and labels.max() >= CLASSES:
        raise ConfigError(
            f"{path} has the label {labels.max()}, above {CLASSES - 1}; {cure(path.parent)}"
        )
