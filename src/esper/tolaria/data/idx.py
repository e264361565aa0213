"""mnist and fashion_mnist: 28×28 grey images in the four idx files of MNIST, plain or gzipped."""

import math
from pathlib import Path

import numpy as np
import torch

from esper.leyline import ConfigError
from esper.tolaria.data.files import cure, read
from esper.tolaria.data.splits import DataSplits, hold_out_tenth, standardise

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CLASSES = 10


def load_mnist(root: Path) -> DataSplits:
    """Handwritten digits from `root/mnist`; see `load_folder`."""
    return load_folder(root / "mnist")


def load_fashion_mnist(root: Path) -> DataSplits:
    """Articles of clothing from `root/fashion_mnist`; see `load_folder`."""
    return load_folder(root / "fashion_mnist")


def load_folder(folder: Path) -> DataSplits:
    """Images [N, 1, H, W], zero mean and unit std over the training part; ten classes.

    Validation is a fixed, stratified tenth of the official training part; test is the official
    test part. The four files may hold any number of images. Raises DataMissingError for a file that
    is not there, ConfigError for one that is damaged.
    """
    images, labels = _read_pair(folder, FILES[0], FILES[1])
    test_images, test_labels = _read_pair(folder, FILES[2], FILES[3])
    if images.shape[1:] != test_images.shape[1:]:
        raise ConfigError(
            f"{folder}: training images are {images.shape[1:]}, test images {test_images.shape[1:]}"
        )
    train, val = hold_out_tenth(labels, folder.name)
    train_x, val_x, test_x = standardise(images[train], images[val], test_images)
    train_y, val_y, test_y = (
        torch.tensor(part, dtype=torch.int64) for part in (labels[train], labels[val], test_labels)
    )
    return DataSplits(train_x, train_y, val_x, val_y, test_x, test_y)


def parse_idx(data: bytes, dimensions: int, path: Path) -> np.ndarray:
    """The uint8 array in the bytes of an idx file; read-only, it shares their memory.

    Raises ConfigError, naming `path`, for a wrong magic number or a length the header denies.
    """
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
            f"{path} has {len(data)} bytes where its header promises {expected}; "
            f"{cure(path.parent)}"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _read_pair(folder: Path, images_name: str, labels_name: str) -> tuple[np.ndarray, np.ndarray]:
    """(images [N, 1, H, W], labels [N]) as uint8."""
    images = parse_idx(read(folder, images_name, FILES), 3, folder / images_name)
    labels = parse_idx(read(folder, labels_name, FILES), 1, folder / labels_name)
    if len(images) != len(labels):
        raise ConfigError(
            f"{folder}: {images_name} has {len(images)} images and {labels_name} {len(labels)} "
            f"labels; {cure(folder)}"
        )
    if len(labels) and labels.max() >= CLASSES:
        raise ConfigError(
            f"{folder / labels_name} has the label {labels.max()}, above {CLASSES - 1}; "
            f"{cure(folder)}"
        )
    return images[:, None], labels
