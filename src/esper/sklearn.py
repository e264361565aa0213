"""Estimators of scikit-learn for tabular data.

`GrowingClassifier` and `GrowingRegressor` are small networks that `esper.grow` trains and grows.
They hold out a share of the data for validation, which decides about growth.
"""

from collections.abc import Sequence
from copy import deepcopy
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from esper.api import grow
from esper.leyline import ConfigError, PackageMissingError
from esper.leyline.growth_settings import Budget, GrowthSettings

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise PackageMissingError("esper.sklearn needs scikit-learn 1.6 or later", "sklearn") from None

FEWEST_ROWS = 4
MOST_KEY = 2**31 - 1


def host(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """The network before it grows: a module for each hidden layer, which is a slot, and a linear
    output layer. Weights are drawn from torch's global generator."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers.append(nn.Sequential(nn.Linear(inputs, width), nn.ReLU()))
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class _Growing(BaseEstimator):
    """Parameters: hidden, widths of the hidden layers; steps, epochs; learning_rate, of AdamW;
    batch_size; validation_fraction, share of the rows that decides about growth and chooses the
    best network; controller, which decides about growth ("static" never grows); max_params, most
    parameters of the grown network, as a multiple of the initial size or, above 100, a number;
    patience, epochs without a better score after which training ends; random_state.

    After fit: module_, the grown network as a plain nn.Module; outcome_, seeds that were tried and
    kept, and the cost; history_, a row for each epoch; n_features_in_.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (32,),
        *,
        steps: int = 50,
        learning_rate: float = 1e-2,
        batch_size: int = 32,
        validation_fraction: float = 0.2,
        controller: Any = "heuristic",
        max_params: float | None = None,
        patience: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.hidden = hidden
        self.steps = steps
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.controller = controller
        self.max_params = max_params
        self.patience = patience
        self.random_state = random_state

    def _grow(self, rows: np.ndarray, y: np.ndarray, outputs: int, loss: str, score: str) -> None:
        """`y` are targets for the loss: class indices or numbers."""
        self._check_params()
        key = int(check_random_state(self.random_state).randint(MOST_KEY))
        parts = train_test_split(
            np.arange(len(rows)),
            test_size=self.validation_fraction,
            random_state=key,
            stratify=self._strata(y),
        )
        x, targets = torch.as_tensor(rows, dtype=torch.float32), torch.as_tensor(y)
        train, val = (TensorDataset(x[part], targets[part]) for part in parts)
        # torch's global generator is left as it was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            grown = grow(
                host(rows.shape[1], self.hidden, outputs),
                DataLoader(train, self.batch_size, shuffle=True),
                DataLoader(val, len(val)),
                slots=[str(layer) for layer in range(len(self.hidden))],
                steps=self.steps,
                optimizer=lambda params: torch.optim.AdamW(params, lr=self.learning_rate),
                controller=self.controller,
                budget=Budget(params=self.max_params),
                key=key,
                loss=loss,
                score=score,
                settings=GrowthSettings(patience=self.patience, progress=False),
            )
        self.module_ = grown.export()
        self.outcome_, self.history_ = grown.outcome, grown.history

    def _check_params(self) -> None:
        widths = self.hidden
        if not isinstance(widths, Sequence | np.ndarray) or len(widths) == 0:
            raise ConfigError(f"hidden must list the widths of hidden layers, got {widths!r}")
        for name, values in (("hidden", widths), ("batch_size", [self.batch_size])):
            for value in values:
                if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                    raise ConfigError(f"{name} must be whole numbers above 0, got {value!r}")
        share, rate = self.validation_fraction, self.learning_rate
        if not isinstance(share, Real) or not 0 < share < 1:
            raise ConfigError(f"validation_fraction must be between 0 and 1, got {share!r}")
        if not isinstance(rate, Real) or not 0 < rate < np.inf:
            raise ConfigError(f"learning_rate must be a number above 0, got {rate!r}")

    def _strata(self, y: np.ndarray) -> np.ndarray | None:
        """Stratify by class, if both parts have rows for every class."""
        if not np.issubdtype(y.dtype, np.integer):
            return None
        counts, share = np.bincount(y), self.validation_fraction
        parts = np.floor(len(y) * np.array([share, 1 - share]))
        return y if counts.min() >= 2 and parts.min() >= len(counts) else None

    def _output(self, X: Any) -> Tensor:
        """[n, outputs], in double precision: a row's output does not depend on the other rows."""
        check_is_fitted(self)
        x = validate_data(self, X, reset=False)
        with torch.inference_mode():
            return deepcopy(self.module_).eval().double()(torch.as_tensor(x, dtype=torch.float64))


class GrowingClassifier(ClassifierMixin, _Growing):
    __doc__ = f"A classifier that grows while it trains.\n\n{_Growing.__doc__}"

    def fit(self, X: Any, y: Any) -> Self:
        """Raises ConfigError for invalid parameters, and if y has a single class."""
        x, y = validate_data(self, X, y, ensure_min_samples=FEWEST_ROWS)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ConfigError(f"y needs at least two classes, got only {self.classes_[0]!r}")
        self._grow(x, codes, len(self.classes_), "cross_entropy", "accuracy")
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """[n, classes], columns in the order of `classes_`."""
        return np.asarray(self._output(X).softmax(dim=1))

    def predict(self, X: Any) -> np.ndarray:
        chosen = np.asarray(self._output(X).argmax(dim=1))
        return np.asarray(self.classes_[chosen])


class GrowingRegressor(RegressorMixin, _Growing):
    __doc__ = f"A regressor that grows while it trains.\n\n{_Growing.__doc__}"

    def fit(self, X: Any, y: Any) -> Self:
        """Raises ConfigError for invalid parameters."""
        x, y = validate_data(self, X, y, ensure_min_samples=FEWEST_ROWS, y_numeric=True)
        # The network learns targets of mean 0 and deviation 1.
        self.target_mean_, self.target_scale_ = float(y.mean()), float(y.std()) or 1.0
        targets = ((y - self.target_mean_) / self.target_scale_).astype(np.float32)[:, None]
        self._grow(x, targets, 1, "mse", "negative_mse")
        return self

    def predict(self, X: Any) -> np.ndarray:
        return np.asarray(self._output(X)[:, 0]) * self.target_scale_ + self.target_mean_
