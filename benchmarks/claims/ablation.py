"""What a policy of claim E reads: it plays validation hosts without some of what it sees.

    python benchmarks/claims/ablation.py --policy runs/policy-0 --episodes runs/each-0

What is taken away is shown as its mean over the hosts, slots and candidates of recorded episodes,
so that it carries no information. `same` is the share of episodes whose first seed is where
it is if all is seen.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import (
    RESULTS,
    Trials,
    append,
    compare,
    finished,
    host_numbers,
    keys_with_all,
    print_comparisons,
    print_json,
    print_table,
)
from esper.simic.recordings.episodes import Episodes, load_episodes
from esper.simic.training.policy_controller import LearnedController
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.families import find_family
from family_episodes import play_family

ALL = "sees all"
# By the block of the observation: the run's own, that of a slot, that of a candidate in a slot.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "without the scores": (
        "run",
        ("val loss", "best val loss", "val score", "best val score", "rho", "noise"),
    ),
    "without the host's size": ("run", ("host params", "host macs")),
    "without what a slot is": (
        "slot",
        (
            "position",
            "channels",
            "channels over others",
            "places",
            "params of host",
            "macs of host",
        ),
    ),
    "without what a seed costs": (
        "candidate",
        ("params", "params over host", "macs over host"),
    ),
    "without what a seed is": (
        "candidate",
        ("residual", "branch", "bypass", "mixes positions", "layers", "reach"),
    ),
}
ARMS = (ALL, *GROUPS)


def kind_of(block: str) -> str:
    return "run" if block == "the training" else "candidate" if " in " in block else "slot"


class Blind:
    """Observations of which some columns always have the same value, that of their entry."""

    def __init__(self, episodes: Episodes, group: str) -> None:
        space = episodes.space
        names = space.names([f"slot {n}" for n in range(space.num_slots)])
        kind, entries = GROUPS[group]
        first = episodes.observations[:, 0]
        self.columns, self.values = list[int](), list[float]()
        for entry in entries:
            own = [n for n, (b, e) in enumerate(names) if kind_of(b) == kind and e == entry]
            self.columns += own
            self.values += [float(first[:, own].mean())] * len(own)

    def normalize(self, values: Tensor) -> Tensor:
        seen = values.clone()
        seen[:, self.columns] = torch.tensor(self.values)
        return seen


def play(
    path: Path, policy: str, episodes: Episodes, family_name: str, hosts: int, keys: int
) -> Trials:
    settings: dict[str, Any] = {"policy": Path(policy).name, "family": family_name}
    done, family = finished(path, settings), find_family(family_name)
    data = family.task.load(data_root())
    for member in family.members("validation")[:hosts]:
        own = member.keys[:keys]
        for arm in ARMS:
            if all((arm, key) in done for key in own):
                continue
            controller = LearnedController.load(policy)
            if arm != ALL:
                controller.observations = Blind(episodes, arm)
            found = play_family(member, controller, data, data_root(), keys=own)
            rows = [{"arm": arm, "key": e.key, "val": e.val, "first": e.first} for e in found]
            append(path, [{**row, "settings": settings} for row in rows])
        print(member.number, flush=True)
    return finished(path, settings)


def table_of(trials: Trials, arms: Sequence[str], keys: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "arm": arm,
            "val": float(np.mean([trials[arm, key]["val"] for key in keys])),
            "same": float(
                np.mean([trials[arm, key]["first"] == trials[ALL, key]["first"] for key in keys])
            ),
        }
        for arm in arms
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--policy", required=True, help="folder of a policy over sets")
    parser.add_argument("--episodes", required=True, help="run of `esper train record`")
    parser.add_argument("--family", default="digits:trained")
    parser.add_argument("--hosts", type=int, default=24)
    parser.add_argument("--keys", type=int, default=2, help="of each host")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    given = parser.parse_args()
    torch.set_num_threads(1)
    episodes, name = load_episodes(given.episodes), Path(given.policy).name
    path = given.out / f"ablation-{name}.jsonl"
    trials = play(path, given.policy, episodes, given.family, given.hosts, given.keys)
    keys = keys_with_all(trials, ARMS)
    table = table_of(trials, ARMS, keys)
    print_table(table)
    hosts = host_numbers(find_family(given.family).members("validation"))
    compared = compare(trials, [(arm, ALL) for arm in GROUPS], "val", hosts)
    print_comparisons(compared)
    print_json({"n": len(keys), "arms": table, "differences": compared})


if __name__ == "__main__":
    main()
