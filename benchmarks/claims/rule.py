"""Claim D: what to plant, and where, is found by trial: it beats the best fixed rule and a random
choice on hosts that differ in their bottleneck, with the trials on the bill.

    python benchmarks/claims/rule.py --part development     # which fixed rule is best
    python benchmarks/claims/rule.py                        # the claim, on other hosts

Hosts are `digits` networks of random widths, trained to their end. Then every arm has 0.3 of that
cost. Fixed rules are all pairs of a place and a kind; `random` draws one of them by key.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import RESULTS, Row, append, compare, finished, print_json, print_table
from esper.growth import CNNHost, count_params
from esper.leyline import BLUEPRINT, OP, SLOT, LifecycleOp
from esper.proof import host_plan
from esper.proof import train as train_plan
from esper.tamiyo import (
    HeuristicConfig,
    HeuristicController,
    Situation,
    StaticController,
    TrialPlan,
    wait,
)
from esper.tolaria import (
    RESCUE,
    DataSplits,
    Task,
    Trained,
    data_root,
    find_task,
    train,
)

KINDS = ("conv_light", "branch", "widen_double")
EXTRA = 0.3
KEYS_PER_HOST = 4
HOSTS = {"development": (8, 7_000), "final": (24, 9_000)}  # how many, first key
LEAST, MOST = 200, 2_000  # parameters of a host
TRIAL, RANDOM, CONTINUE, ORACLE = "trial", "random", "continue-cooled", "oracle"


def shapes(part: str) -> list[tuple[int, ...]]:
    """Widths of the hosts of a part; no shape is in both."""
    drawn: list[tuple[int, ...]] = []
    generator = random.Random(12)
    wanted = sum(count for count, _ in HOSTS.values())
    while len(drawn) < wanted:
        # A last block of width 1 has a single value at the end, which no norm takes.
        widths = tuple(generator.randint(*least_most) for least_most in ((1, 6), (1, 12), (2, 16)))
        params = count_params(CNNHost(num_classes=10, in_channels=1, widths=widths))
        if widths not in drawn and LEAST <= params <= MOST:
            drawn.append(widths)
    split = HOSTS["development"][0]
    return drawn[:split] if part == "development" else drawn[split:]


@dataclass(frozen=True)
class Plant:
    """Germinates one given candidate in each environment at once, and keeps it when it may."""

    slots: np.ndarray
    blueprints: np.ndarray
    name: str = "plant"

    def reset(self, n_envs: int) -> None:
        assert n_envs == len(self.slots)

    def act(self, situation: Situation) -> np.ndarray:
        actions = wait(situation.n_envs)
        held = situation.table.holds_seed.any(axis=1)
        keep = situation.masks.slot[np.arange(len(held)), LifecycleOp.FOSSILIZE, self.slots]
        plant = situation.running & ~held & (situation.step == 0)
        for where, op in ((plant, LifecycleOp.GERMINATE), (keep, LifecycleOp.FOSSILIZE)):
            actions[where, OP], actions[where, SLOT] = op, self.slots[where]
        actions[plant, BLUEPRINT] = self.blueprints[plant]
        return actions


def by_trial(kinds: tuple[str, ...] = KINDS) -> HeuristicController:
    """As it ships but for short trials, which the budget pays for."""
    controller = HeuristicController(HeuristicConfig("trial", blueprints_to_try=kinds))
    controller.trial_plan = TrialPlan(kinds, steps=12, batch=16, val_samples=128)
    return controller


def fixed_rules(task: Task) -> list[tuple[int, str]]:
    return [(slot, kind) for slot in range(len(task.slots)) for kind in KINDS]


def trials_of_host(task: Task, data: DataSplits, keys: Sequence[int]) -> list[Row]:
    """All arms on one host, for all keys."""
    static = StaticController()
    hosts = train_plan(host_plan(task, task.steps, "fused"), data, keys)
    weights = {h.outcome.key: h.model.state_dict() for h in hosts}
    recipe = replace(task.recipe(data), weights=weights)
    budget = int(EXTRA * hosts[0].outcome.train_macs)
    rules = replace(RESCUE, steps=10 * task.steps, population="fused", max_macs=budget)
    play = partial(train, task=task.name, attribute=False)

    def rows(arm: str, found: Sequence[Trained]) -> list[Row]:
        return [
            {
                "arm": arm,
                "key": each.outcome.key,
                "widths": str(task.shape),
                "host": task.score_on(host.model, data.test_x, data.test_y),
                "test": task.score_on(each.model, data.test_x, data.test_y),
                "val": each.outcome.val_score,
                "params": each.outcome.params,
                "macs": each.outcome.train_macs,
                "seeds": [f"{seed.blueprint}@{seed.module}" for seed in each.outcome.seeds],
            }
            for host, each in zip(hosts, found, strict=True)
        ]

    found = rows(CONTINUE, play(recipe, keys, replace(rules, counterfactuals=False), static))
    found += rows(TRIAL, play(recipe, keys, rules, by_trial()))
    candidates = fixed_rules(task)
    names = recipe.catalogue.names
    every = [(pair, key) for pair in candidates for key in keys]
    plant = Plant(
        np.array([slot for (slot, _), _ in every]),
        np.array([names.index(kind) for (_, kind), _ in every]),
    )
    planted = play(recipe, [key for _, key in every], rules, plant)
    for i, (slot, kind) in enumerate(candidates):
        own = planted[i * len(keys) : (i + 1) * len(keys)]
        found += rows(f"{kind}@{slot}", own)
    return found + _drawn(found, candidates, keys)


def _drawn(
    found: Sequence[Row], candidates: Sequence[tuple[int, str]], keys: Sequence[int]
) -> list[Row]:
    """The random choice of each key, and the best one in hindsight."""
    drawn = []
    for key in keys:
        own = [
            next(row for row in found if row["arm"] == f"{kind}@{slot}" and row["key"] == key)
            for slot, kind in candidates
        ]
        drawn.append({**random.Random(key).choice(own), "arm": RANDOM})
        drawn.append({**max(own, key=lambda row: float(row["test"])), "arm": ORACLE})
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", choices=list(HOSTS), default="final")
    parser.add_argument("--hosts", type=int, default=None, help="only the first so many")
    part = parser.parse_args().part
    torch.set_num_threads(1)
    count, first_key = HOSTS[part]
    count = min(count, parser.parse_args().hosts or count)
    base = find_task("digits")
    data = base.load(data_root())
    path = RESULTS / f"rule-{part}.jsonl"
    settings = {"extra": EXTRA, "kinds": list(KINDS), "shapes": [list(s) for s in shapes(part)]}
    done = finished(path, settings)
    assert base.host_of_widths is not None
    for number, widths in enumerate(shapes(part)[:count]):
        keys = [first_key + number * KEYS_PER_HOST + i for i in range(KEYS_PER_HOST)]
        if all((TRIAL, key) in done for key in keys):
            continue
        task = replace(base, build=partial(base.host_of_widths, widths), shape=widths)
        rows = trials_of_host(task, data, keys)
        append(path, [{**row, "settings": settings} for row in rows])
        print(number, widths, {r["arm"]: round(r["test"], 1) for r in rows[:8:4]}, flush=True)
    report(finished(path, settings), base, part)


def report(trials: Mapping[tuple[str, int], Row], task: Task, part: str) -> None:
    fixed = [f"{kind}@{slot}" for slot, kind in fixed_rules(task)]
    arms = [CONTINUE, RANDOM, *fixed, TRIAL, ORACLE]
    keys = sorted({key for _, key in trials})
    mean = {arm: sum(trials[arm, key]["test"] for key in keys) / len(keys) for arm in arms}
    val = {arm: sum(trials[arm, key]["val"] for key in keys) / len(keys) for arm in fixed}
    print_table([{"arm": arm, "test": mean[arm]} for arm in arms])
    best = max(fixed, key=val.__getitem__)
    if part == "final":
        chosen = RESULTS / "rule-development.json"
        best = json.loads(Path(chosen).read_text(encoding="utf-8"))["best_fixed"]
    pairs = [(TRIAL, best), (TRIAL, RANDOM), (TRIAL, CONTINUE), (TRIAL, ORACLE)]
    table = compare(dict(trials), pairs, "test")
    print_table(table)
    result: dict[str, Any] = {"part": part, "n": len(keys), "best_fixed": best, "means": mean}
    result["differences"] = table
    if part == "development":
        chosen = RESULTS / "rule-development.json"
        chosen.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_json(result)


if __name__ == "__main__":
    main()
