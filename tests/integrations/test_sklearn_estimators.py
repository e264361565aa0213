"""The estimators are what scikit-learn wants, and grow as `esper.grow` does."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.leyline import ConfigError, PackageMissingError
from esper.sklearn import GrowingClassifier, GrowingRegressor

KINDS = [GrowingClassifier, GrowingRegressor]


def table(kind: type) -> tuple[np.ndarray, np.ndarray]:
    x, y = (load_iris if kind is GrowingClassifier else load_diabetes)(return_X_y=True)
    return StandardScaler().fit_transform(x), y


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_is_content(kind: type) -> None:
    results = check_estimator(kind(steps=10, batch_size=16, learning_rate=0.02), on_skip=None)
    passed = [result["check_name"] for result in results if result["status"] == "passed"]
    assert len(passed) > 45
    assert not [r for r in results if r["status"] not in ("passed", "skipped")]


@pytest.mark.parametrize("kind", KINDS)
def test_it_grows_as_a_plain_call_of_grow_does(kind: type) -> None:
    """The same network, rows and order of batches, written down once more from the docs."""
    x, y = table(kind)
    estimator = kind(hidden=(8, 6), steps=14, random_state=np.random.RandomState(4)).fit(x, y)
    key = int(np.random.RandomState(4).randint(2**31 - 1))
    classifies = kind is GrowingClassifier
    targets = torch.as_tensor(y if classifies else ((y - y.mean()) / y.std())[:, None])
    targets = targets if classifies else targets.float()
    parts = train_test_split(
        torch.as_tensor(x, dtype=torch.float32),
        targets,
        test_size=0.2,
        random_state=key,
        stratify=y if classifies else None,
    )
    torch.manual_seed(key)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(x.shape[1], 8), nn.ReLU()),
        nn.Sequential(nn.Linear(8, 6), nn.ReLU()),
        nn.Linear(6, 3 if classifies else 1),
    )
    grown = esper.grow(
        model,
        DataLoader(TensorDataset(parts[0], parts[2]), 32, shuffle=True),
        DataLoader(TensorDataset(parts[1], parts[3]), len(parts[1])),
        slots=["0", "1"],
        loss="cross_entropy" if classifies else "mse",
        score="accuracy" if classifies else "negative_mse",
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        steps=14,
        key=key,
        settings=esper.GrowthSettings(progress=False),
    )
    assert grown.outcome.germinated > 0
    ours, theirs = estimator.outcome_, grown.outcome
    assert (ours.germinated, ours.culled, ours.params) == (
        theirs.germinated,
        theirs.culled,
        theirs.params,
    )
    for own, other in zip(estimator.history_, grown.history, strict=True):
        assert own["op"] == other["op"]
        assert own["val_score"] == pytest.approx(other["val_score"], abs=1e-5)
        assert own["train_loss"] == pytest.approx(other["train_loss"], abs=1e-5)
    with torch.no_grad():
        output = grown.export()(torch.as_tensor(x, dtype=torch.float32)).numpy()
    expected = output.argmax(axis=1) if classifies else output[:, 0] * y.std() + y.mean()
    np.testing.assert_allclose(estimator.predict(x), expected, rtol=1e-4, atol=1e-3)


def test_it_works_in_pipelines_and_searches() -> None:
    x, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    estimator = GrowingClassifier((8,), steps=15, batch_size=16, random_state=0)
    grows = make_pipeline(StandardScaler(), estimator)
    assert cross_val_score(grows, x, names, cv=3).min() > 0.8
    search = GridSearchCV(grows, {"growingclassifier__controller": ["static", "heuristic"]}, cv=2)
    search.fit(x, names)
    grown = {True: 0, False: 0}
    for controller in ("static", "heuristic"):
        estimator = clone(grows).set_params(growingclassifier__controller=controller)
        outcome = estimator.fit(x, names)[-1].outcome_
        grown[controller == "heuristic"] = outcome.germinated
    assert grown[True] > 0
    assert grown[False] == 0
    proba = search.predict_proba(x)
    np.testing.assert_allclose(proba.sum(axis=1), 1.0)
    assert (search.classes_[proba.argmax(axis=1)] == search.predict(x)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_states_are_equal_estimators_and_nobody_elses_draws_change(kind: type) -> None:
    x, y = table(kind)
    torch.manual_seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, second, third = (
        kind(steps=9, random_state=state).fit(x, y).predict(x) for state in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, third) or kind is GrowingClassifier
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002


def test_a_regressor_does_not_mind_units() -> None:
    x, y = table(GrowingRegressor)
    small = GrowingRegressor(steps=9, random_state=0).fit(x, y)
    large = GrowingRegressor(steps=9, random_state=0).fit(x, 1e6 * y - 5e8)
    np.testing.assert_allclose(large.predict(x), 1e6 * small.predict(x) - 5e8, rtol=1e-3)
    assert small.score(x, y) > 0.3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hidden": ()}, "hidden must list the widths of hidden layers, got ()"),
        ({"hidden": 32}, "hidden must list the widths of hidden layers, got 32"),
        ({"hidden": (8, 0)}, "hidden must be whole numbers above 0, got 0"),
        ({"batch_size": 1.5}, "batch_size must be whole numbers above 0, got 1.5"),
        ({"validation_fraction": 1.0}, "validation_fraction must be between 0 and 1, got 1.0"),
        ({"learning_rate": -1}, "learning_rate must be a number above 0, got -1"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"controller": "wise"}, "wise"),
        ({"max_params": "many"}, "many"),
    ],
)
def test_bad_settings_are_one_sentence(settings: dict[str, Any], said: str) -> None:
    x, y = table(GrowingClassifier)
    with pytest.raises(ConfigError) as error:
        GrowingClassifier(**settings).fit(x, y)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_one_class_is_no_choice() -> None:
    with pytest.raises(ConfigError, match="two classes"):
        GrowingClassifier().fit(np.ones((9, 2)), np.ones(9))


def test_without_scikit_learn_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "esper.sklearn")
    with pytest.raises(PackageMissingError, match=r"pip install 'esper-grow\[sklearn\]'"):
        import esper.sklearn  # noqa: F401
