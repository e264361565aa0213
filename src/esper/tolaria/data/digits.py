"""digits: 1,797 handwritten digits of 8×8 pixels, embedded in scikit-learn."""

from pathlib import Path

import numpy as np
import torch

from esper.leyline import DataMissingError
from esper.tolaria.data.catalogue import CATALOGUE
from esper.tolaria.data.splits import DataSplits, standardise, stratified_split

SIZES = (1200, 297, 300)  # train, validation, test


def load(root: Path | None = None) -> DataSplits:
    """Images [N, 1, 8, 8], zero mean and unit std over the training part; ten classes.

    `root` is not used: the data lies in scikit-learn. Raises DataMissingError without it.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "sklearn":
            raise
        raise DataMissingError(f"data set digits: {CATALOGUE['digits'].how_to_get}") from None

    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 1, 8, 8).astype(np.float32)
    parts = stratified_split(labels, SIZES, "digits")
    train_x, val_x, test_x = standardise(*(images[rows] for rows in parts))
    train_y, val_y, test_y = (torch.tensor(labels[rows], dtype=torch.int64) for rows in parts)
    return DataSplits(train_x, train_y, val_x, val_y, test_x, test_y)
