"""A table, no PyTorch: a network that grows, beside others of scikit-learn.

    python examples/sklearn_table.py [--folds 3]

A share of every training part decides about growth; the folds that are scored are not seen.
"""

import argparse

from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esper.sklearn import GrowingClassifier


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folds", type=int, default=3)
    folds = parser.parse_args().folds
    x, y = load_breast_cancer(return_X_y=True)
    grows = GrowingClassifier(hidden=(4,), steps=20, max_params=4.0, random_state=0)
    estimators = {
        "grown": grows,
        "the same, never grown": GrowingClassifier(
            hidden=(4,), steps=20, controller="static", random_state=0
        ),
        "MLPClassifier": MLPClassifier((4,), max_iter=500, random_state=0),
        "logistic regression": LogisticRegression(),
    }
    for name, estimator in estimators.items():
        scores = cross_val_score(make_pipeline(StandardScaler(), estimator), x, y, cv=folds)
        print(f"{name:22} accuracy {100 * scores.mean():.1f} %")

    search = GridSearchCV(
        make_pipeline(StandardScaler(), grows),
        {"growingclassifier__max_params": [1.5, 4.0]},
        cv=folds,
    )
    best = search.fit(x, y).best_estimator_[-1]
    kept = ", ".join(seed.blueprint for seed in best.outcome_.seeds) or "nothing"
    print(f"best: {search.best_params_}, kept: {kept}; {best.outcome_.params} parameters")
    print(best.module_)


if __name__ == "__main__":
    main()
