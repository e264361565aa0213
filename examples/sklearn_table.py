"""Compare a growing network with estimators of scikit-learn on a table.

    python examples/sklearn_table.py [--folds 3] [--steps 30]

The table has a row for each handwritten digit and a column for each pixel. The networks are narrow.
A share of the training data decides about growth; the scored folds are not used.
"""

import argparse

from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esper.sklearn import GrowingClassifier


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    folds, steps = options.folds, options.steps
    x, y = load_digits(return_X_y=True)
    grows = GrowingClassifier(hidden=(4,), steps=steps, random_state=0)
    common = {"learning_rate_init": 0.01, "batch_size": 32, "max_iter": steps, "random_state": 0}
    estimators = {
        "grown": grows,
        "never grown": GrowingClassifier((4,), steps=steps, controller="static", random_state=0),
        "MLPClassifier, 4 wide": MLPClassifier((4,), **common),
        "MLPClassifier, 12 wide": MLPClassifier((12,), **common),
        "logistic regression": LogisticRegression(max_iter=200),
    }
    for name, estimator in estimators.items():
        scores = cross_val_score(make_pipeline(StandardScaler(), estimator), x, y, cv=folds)
        print(f"{name:22} accuracy {100 * scores.mean():.1f} %")

    search = GridSearchCV(
        make_pipeline(StandardScaler(), grows),
        {"growingclassifier__max_params": [1.5, None]},
        cv=folds,
    )
    best = search.fit(x, y).best_estimator_[-1]
    kept = ", ".join(seed.blueprint for seed in best.outcome_.seeds) or "nothing"
    print(f"best: {search.best_params_}; kept: {kept}; {best.outcome_.params} parameters")


if __name__ == "__main__":
    main()
