"""Claim E: arms that are made of others, and which fixed candidate is the best."""

import importlib.util
from pathlib import Path

import pytest

# By its place: the benchmark of the policy's speed has the same name.
PLACE = Path(__file__).parents[2] / "benchmarks" / "claims" / "policy.py"


@pytest.fixture(scope="module")
def policy():
    spec = importlib.util.spec_from_file_location("policy_claim", PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(arm, key, test, val, right=False):
    more = {"params": 10, "macs": 5, "right": right}
    return (arm, key), {"arm": arm, "key": key, "test": test, "val": val, **more}


TRIALS = dict(
    [
        *(row("a@0", key, test=90 + key, val=80) for key in (1, 2)),
        *(row("b@1", key, test=91, val=70 + 30 * (key - 1)) for key in (1, 2)),
        # Only one host has this place: it is no rule for all.
        row("b@2", 1, test=99, val=99),
        *(row(name, 1, test=test, val=1, right=True) for name, test in (("x", 94), ("y", 96))),
        *(row(name, 2, test=test, val=1) for name, test in (("x", 90), ("y", 80))),
    ]
)


def test_the_best_fixed_candidate_is_one_of_every_host_by_validation(policy):
    assert policy.best_fixed(TRIALS) == "b@1"


def test_arms_that_are_made_of_others(policy):
    found = policy.with_choices(TRIALS, "b@1", ["x", "y"])
    assert [found["oracle", key]["test"] for key in (1, 2)] == [99, 92]
    assert [found["fixed", key]["test"] for key in (1, 2)] == [91, 91]
    assert [found["learned", key]["test"] for key in (1, 2)] == [95, 85]
    assert [found["learned", key]["right"] for key in (1, 2)] == [1.0, 0.0]
    assert {found["random", key]["arm"] for key in (1, 2)} <= {"a@0", "b@1", "b@2"}
