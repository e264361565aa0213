"""The main effect of every claim, from the stored rows.

    python benchmarks/claims/summary.py

Prints one line per effect: mean, 95 % interval (BCa), p after Holm over the family of the claim,
and what the pairs are. `docs/pictures.py` draws the same as a forest plot.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    FIXED,
    LEARNED,
    ORACLE,
    RANDOM,
    RESULTS,
    STATIC,
    Trials,
    best_fixed,
    compare,
    with_choices,
)

TRIAL = "heuristic:trial"
FIVE = tuple(f"runs/policy-{key}" for key in range(5))
PPO = tuple(f"runs/ppo-{key}/policies/round-{16 if key < 3 else 24}" for key in range(1, 6))


@dataclass(frozen=True)
class Effect:
    """`first` minus `second` in points of test accuracy; `units` says what the pairs are."""

    claim: str
    what: str
    n: int
    units: str
    mean: float
    low: float
    high: float
    p: float

    @property
    def in_words(self) -> str:
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def rows(path: Path) -> Trials:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {(row["arm"], row["key"]): row for row in map(json.loads, lines)}


def hosts(trials: Trials, trait: str) -> dict[int, Any]:
    return {key: str(row[trait]) for (_, key), row in trials.items()}


def of(claim: str, what: str, units: str, row: Mapping[str, Any]) -> Effect:
    return Effect(
        claim,
        what,
        row["n"],
        units,
        *(float(row[name]) for name in ("mean", "low", "high", "p_holm")),
    )


def evaluated(claim: str, what: str, folder: str, arm: str, versus: str) -> Effect:
    """A comparison of an evaluation, whose keys are the pairs."""
    report = json.loads((RESULTS / folder / "evaluation.json").read_text(encoding="utf-8"))
    (row,) = [r for r in report["comparisons"] if (r["arm"], r["versus"]) == (arm, versus)]
    return of(claim, what, "keys", row)


def played(
    claim: str,
    name: str,
    policies: Sequence[str],
    shown: Mapping[str, str],
    folder: Path = RESULTS,
    family: Sequence[str] = (TRIAL, FIXED, RANDOM, STATIC),
) -> list[Effect]:
    """Comparisons of policies with other arms on the hosts of a family, which are the pairs."""
    hosts_of, _, _ = name.rpartition("-")
    fixed = best_fixed(rows(folder / f"policy-{hosts_of}-validation.jsonl"))
    trials = with_choices(rows(folder / f"policy-{name}.jsonl"), fixed, policies)
    others = [arm for arm in (TRIAL, FIXED, RANDOM, STATIC) if any(a == arm for a, _ in trials)]
    table = compare(trials, [(LEARNED, other) for other in others], "test", hosts(trials, "member"))
    return [
        of(claim, shown[row["second"]], "hosts", row) for row in table if row["second"] in shown
    ]


def effects() -> list[Effect]:
    """In the order of docs/claims.md."""
    grown, cooled = "heuristic +0.3", "continue-cooled +0.3"
    rule = rows(RESULTS / "rule-final.jsonl")
    best = best_fixed(rows(RESULTS / "rule-development.jsonl"))
    pairs = [("trial", other) for other in (best, "random", "continue-cooled", "oracle")]
    tried = compare(rule, pairs, "test", hosts(rule, "widths"))
    shape = {place: row for place, row in rows(RESULTS / "shape.jsonl").items() if row["test"]}
    found = "found, anew"
    shaped = compare(
        shape, [(found, "best uniform"), (found, "best random shape"), (found, "grown")], "test"
    )
    depth, deep = rows(RESULTS / "depth.jsonl"), "grown 1 to 4"
    arms = ("static 1", "static 2", "static 3", "static 4 full", "static 4")
    layers = compare(depth, [(deep, arm) for arm in arms], "test_score")
    test = "digits-trained-test"
    against = {TRIAL: "learned - trial rule", FIXED: "learned - best constant"}
    return [
        evaluated("A", "digits: grown - cooled", "rescue-digits", grown, cooled),
        evaluated("A", "cifar10_2k: grown - cooled", "rescue-cifar10_2k", grown, cooled),
        evaluated("A", "cifar10_2k_wide: grown - cooled", "rescue-cifar10_2k_wide", grown, cooled),
        *(
            evaluated("B", f"grown - not grown, {extra}", "harm-cifar10_10k", *own)
            for extra, own in (
                ("0.1", ("heuristic +0.1", "continue +0.1")),
                ("0.3", (grown, "continue +0.3")),
            )
        ),
        *(
            evaluated("C", f"grown - static, equal {what}", "deficit-digits", "heuristic", arm)
            for what, arm in (
                ("parameters", "best-static-equal-params"),
                ("compute", "best-static-equal-compute"),
            )
        ),
        of("D", "trial rule - best fixed rule", "hosts", tried[0]),
        *played("E", test, FIVE, against),
        *played("E", test, PPO, {TRIAL: "PPO - trial rule"}),
        *played(
            "E",
            "digits-bottleneck-test",
            ["runs/bottleneck-0"],
            {FIXED: "bottleneck: learned - constant"},
        ),
        of("F", "found shape - best uniform", "keys", shaped[0]),
        of("G", "grown - 4 layers from the start", "keys", layers[3]),
        *played(
            "H",
            "digits-trained-fresh",
            ["policies/digits-trained"],
            {FIXED: "shipped - best constant", STATIC: "shipped - not growing"},
            RESULTS / "shipped",
            (STATIC, RANDOM, FIXED, "heuristic", ORACLE),
        ),
    ]


def main() -> None:
    for each in effects():
        p = "< 0.001" if each.p < 0.001 else f"{each.p:.3f}"
        print(f"{each.claim}  {each.what}: {each.in_words}, {each.n} {each.units}, p (Holm) {p}")


if __name__ == "__main__":
    main()
