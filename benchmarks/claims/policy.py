"""Claim E: a policy that has learnt on a family of hosts grows others better than a rule does.

    python benchmarks/claims/policy.py --policies runs/a runs/b          # the claim, on test hosts
    python benchmarks/claims/policy.py --family digits:bottleneck ...    # does it read its host?
    python benchmarks/claims/policy.py --split validation                # the best fixed rule
    python benchmarks/claims/policy.py --split fresh --hosts 48 ...      # hosts never played before

Arms on each host and key: nothing grows; one candidate (a place and a kind), the same everywhere,
drawn by key, or the best in hindsight; the heuristic; each policy. The best fixed candidate is
chosen by validation score on validation hosts. `learned` is the mean of all policies, by host and
key. A policy takes its most probable actions. Differences are paired over hosts: the keys of a host
are averaged first.

Where a block was made narrow, `right` is the share of episodes whose first seed is planted there.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from common import (
    FIXED,
    LEARNED,
    ORACLE,
    RANDOM,
    RESULTS,
    STATIC,
    Row,
    Trials,
    append,
    best_fixed,
    compare,
    finished,
    host_numbers,
    keys_with_all,
    print_comparisons,
    print_json,
    print_table,
    with_choices,
)
from esper.api import find_controller
from esper.leyline import BLUEPRINT, OP, SLOT, LifecycleOp
from esper.tamiyo.situation import Controller, Situation, wait
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.families import find_family
from esper.tolaria.families.base import Family, Member, Split
from esper.tolaria.families.digits import BUILT_IN, CLAIM_D
from family_episodes import FamilyResult, play_family

HEURISTIC = "heuristic"
KINDS = ("conv_light", "branch", "widen_double")  # where the family names none


MOST_FRESH = 100


def members_of(family: Family, split: str) -> list[Member]:
    """The members of a split. `fresh` are further members of the test split: their shapes are in no
    split of any built-in family, and claim D was not tested on them."""
    if split != "fresh":
        return list(family.members(split))  # type: ignore[arg-type]
    used = {
        member.widths
        for known in BUILT_IN.values()
        for each in get_args(Split)
        for member in known.members(each)
    }
    wider = replace(family, sizes={**family.sizes, "test": MOST_FRESH})
    return [each for each in wider.members("test") if each.widths not in used | set(CLAIM_D)]


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


def candidates(member: Member, kinds: Sequence[str]) -> list[tuple[int, str]]:
    return [(slot, kind) for slot in range(len(member.widths)) for kind in kinds]


def planted(
    member: Member, kinds: Sequence[str], data: DataSplits, keys: Sequence[int]
) -> list[Row]:
    """Every candidate on every key, side by side."""
    pairs, names = candidates(member, kinds), member.family.catalogue.names
    plant = Plant(
        np.repeat([slot for slot, _ in pairs], len(keys)),
        np.repeat([names.index(kind) for _, kind in pairs], len(keys)),
    )
    found = play_family(member, plant, data, data_root(), keys=[*keys] * len(pairs))
    arms = [f"{kind}@{slot}" for slot, kind in pairs for _ in keys]
    return [_row(arm, each, member) for arm, each in zip(arms, found, strict=True)]


def _row(arm: str, trial: FamilyResult, member: Member) -> Row:
    row: Row = {"arm": arm, **asdict(trial), "member": member.number, "widths": str(member.widths)}
    if member.bottleneck is not None:
        row["right"] = trial.first == member.task.slots[member.bottleneck]
    return row


def run(
    path: Path,
    settings: dict[str, Any],
    members: Iterable[Member],
    arms: dict[str, Controller],
    kinds: Sequence[str],
    data: DataSplits,
    keys: int,
) -> Trials:
    """All trials, host by host; those that are in the file are not run again."""
    done = finished(path, settings)
    for member in members:
        own = member.keys[:keys]

        def lacks(arm: str, own: Sequence[int] = own) -> bool:
            return not all((arm, key) in done for key in own)

        if any(lacks(f"{kind}@{slot}") for slot, kind in candidates(member, kinds)):
            keep(path, settings, planted(member, kinds, data, own))
        for arm, controller in arms.items():
            if lacks(arm):
                found = play_family(member, controller, data, data_root(), keys=own)
                keep(path, settings, [_row(arm, each, member) for each in found])
        print(member.number, member.widths, flush=True)
    return finished(path, settings)


def keep(path: Path, settings: dict[str, Any], rows: Iterable[Row]) -> None:
    append(path, [{**row, "settings": settings} for row in rows])


def report(trials: Trials, fixed: str, policies: Sequence[str], hosts: Mapping[int, int]) -> None:
    trials = with_choices(trials, fixed, policies)
    arms = [STATIC, RANDOM, FIXED, HEURISTIC, *policies, LEARNED, ORACLE]
    arms = [arm for arm in arms if any(name == arm for name, _ in trials)]
    keys = keys_with_all(trials, arms)
    columns = [
        name for name in ("test", "val", "params", "right") if name in trials[STATIC, keys[0]]
    ]
    rows = [
        {"arm": arm, **{n: sum(trials[arm, k][n] for k in keys) / len(keys) for n in columns}}
        for arm in arms
    ]
    print_table(rows)
    first = LEARNED if LEARNED in arms else HEURISTIC
    others = [arm for arm in (STATIC, RANDOM, FIXED, HEURISTIC, ORACLE) if arm != first]
    pairs = [(first, other) for other in others]
    table = compare(trials, pairs, "test", hosts)
    print_comparisons(table)
    return {"n": len(keys), "fixed": fixed, "arms": rows, "differences": table}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--family", default="digits:trained")
    parser.add_argument("--split", choices=["validation", "test", "fresh"], default="test")
    parser.add_argument("--hosts", type=int, help="default: all")
    parser.add_argument("--keys", type=int, default=4, help="of each host")
    parser.add_argument("--policies", nargs="*", default=[], help="folders of training runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    given = parser.parse_args()
    torch.set_num_threads(1)
    family = find_family(given.family)
    data = family.task.load(data_root())
    kinds = tuple(family.blueprints or KINDS)

    def play(split: str, arms: dict[str, Controller], hosts: int | None = None) -> Trials:
        name = f"policy-{family.name.replace(':', '-')}-{split}.jsonl"
        settings = {"family": family.name, "split": split, "kinds": list(kinds)}
        members = members_of(family, split)[:hosts]
        return run(given.out / name, settings, members, arms, kinds, data, given.keys)

    arms = {STATIC: find_controller("static"), HEURISTIC: find_controller("heuristic")}
    arms |= {each: find_controller(each) for each in given.policies}
    fixed = best_fixed(play("validation", arms if given.split == "validation" else {}))
    print(f"best fixed candidate, on validation hosts: {fixed}", flush=True)
    trials = play(given.split, arms, given.hosts)
    found = report(trials, fixed, given.policies, host_numbers(members_of(family, given.split)))
    print_json(found)
    name = f"policy-{family.name.replace(':', '-')}-{given.split}.json"
    (given.out / name).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
