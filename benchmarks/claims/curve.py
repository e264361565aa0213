"""What PPO learns on a family: scores of its policy on validation hosts, by episodes.

    python benchmarks/claims/curve.py --config benchmarks/claims/ppo.toml --out runs/ppo-scratch
    python benchmarks/claims/curve.py --draw runs/ppo-scratch --picture curve.png

A run is trained `--every` rounds further at a time; the policy of that moment is kept in the folder
`policies` of the run, and plays the validation hosts of the family with its most probable actions.
Rows are on disk as soon as a host is played; asked for the same again it goes on. `--draw` shows
existing runs and the arms of claim E on the same hosts and keys. Validation scores: what
was kept was chosen by them in every arm alike, and the test part stays unread.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch

from common import (
    RESULTS,
    Trials,
    append,
    compare,
    finished,
    host_numbers,
    means,
    print_comparisons,
    print_json,
    print_table,
)
from esper.api import export_policy, find_controller
from esper.api.training import resume_ppo, train_ppo
from esper.simic.training.checkpoint import is_run
from esper.simic.training.config import TrainingConfig, load_config
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.families import find_family
from family_episodes import play_family

RULES = ("static", "heuristic")
FIXED, BEST = "best fixed", "best in hindsight"


def policy_at(rounds: int, config: TrainingConfig, run: Path) -> Path:
    """The policy after so many rounds; the run is trained so far first if it has to be."""
    folder = run / "policies" / f"round-{rounds}"
    if not folder.exists():
        if is_run(run):
            resume_ppo(run, rounds=rounds)
        else:
            train_ppo(config, run)
        export_policy(run, folder.name, folder.parent)
    return folder


def play(policy: Path, arm: str, path: Path, family_name: str, hosts: int, keys: int) -> None:
    """The policy on validation hosts; what the file has is not played again."""
    settings = {"family": family_name}
    done, family = finished(path, settings), find_family(family_name)
    data, controller = family.task.load(data_root()), find_controller(str(policy))
    for member in family.members("validation")[:hosts]:
        own = member.keys[:keys]
        if all((arm, key) in done for key in own):
            continue
        found = play_family(member, controller, data, data_root(), keys=own)
        rows = [{"arm": arm, "key": e.key, "val": e.val, "first": e.first} for e in found]
        append(path, [{**row, "settings": settings} for row in rows])


def reference_arms(family_name: str, keys: set[int], folder: Path = RESULTS) -> Trials:
    """The arms of claim E on the same hosts: rules, and of the single candidates the one that is
    best on all of them and the best of each."""
    kinds = list(find_family(family_name).blueprints or ())
    settings = {"family": family_name, "split": "validation", "kinds": kinds}
    path = folder / f"policy-{family_name.replace(':', '-')}-validation.jsonl"
    trials = {place: row for place, row in finished(path, settings).items() if place[1] in keys}
    single = sorted({arm for arm, _ in trials if "@" in arm})
    fixed = max(single, key=lambda arm: sum(trials[arm, key]["val"] for key in keys))
    shown: Trials = {place: row for place, row in trials.items() if place[0] in RULES}
    for key in keys:
        shown[FIXED, key] = trials[fixed, key]
        shown[BEST, key] = max((trials[arm, key] for arm in single), key=lambda row: row["val"])
    return shown


def along(trials: Trials, run: str) -> list[tuple[int, str]]:
    """(episodes, arm) of a run, in order."""
    arms = {arm for arm, _ in trials if arm.startswith(f"{run}@")}
    return sorted((int(arm.rpartition("@")[2]), arm) for arm in arms)


def paint(trials: Trials, runs: Sequence[str], others: Trials, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7.2, 4.0))
    for run in runs:
        points = along(trials, run)
        found = means(trials, [arm for _, arm in points], ["val"])
        values = [found[arm]["val"] for _, arm in points]
        axis.plot([n for n, _ in points], values, marker="o", markersize=3, label=run)
    right_of_axis = axis.get_yaxis_transform()
    for arm, row in means(others, [*RULES, FIXED, BEST], ["val"]).items():
        axis.axhline(row["val"], color="0.7", linewidth=0.8, zorder=0)
        axis.text(
            1.01, row["val"], arm, transform=right_of_axis, va="center", fontsize=8, color="0.4"
        )
    axis.set(xlabel="episodes", ylabel="score on validation hosts, %")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.06))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def report(trials: Trials, runs: Sequence[str], family_name: str, picture: Path | None) -> None:
    keys = {key for _, key in trials}
    others = reference_arms(family_name, keys)
    rows: list[dict[str, Any]] = []
    for run in runs:
        found = means(trials, [arm for _, arm in along(trials, run)], ["val"])
        rows += [{"run": run, "episodes": n, **found[arm]} for n, arm in along(trials, run)]
    print_table(rows)
    levels = means(others, [*RULES, FIXED, BEST], ["val"])
    print_table({"arm": arm, **row} for arm, row in levels.items())
    ends = [(along(trials, run)[-1][1], along(trials, run)[0][1]) for run in runs]
    pairs = [(last, other) for last, _ in ends for other in (*RULES, FIXED)]
    pairs += [(last, first) for last, first in ends if last != first]
    hosts = host_numbers(find_family(family_name).members("validation"))
    compared = compare({**trials, **others}, pairs, "val", hosts)
    print_comparisons(compared)
    if picture is not None:
        paint(trials, runs, others, picture)
    print_json({"n": len(keys), "curve": rows, "references": levels, "differences": compared})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", help="settings of the training; needs --out")
    parser.add_argument("--out", type=Path, help="the run")
    parser.add_argument("--key", type=int, default=0, help="of the training")
    parser.add_argument("--rounds", type=int, help="in all, if not as the settings say")
    parser.add_argument("--every", type=int, default=8, help="rounds")
    parser.add_argument("--hosts", type=int, default=24)
    parser.add_argument("--keys", type=int, default=2, help="of each host")
    parser.add_argument("--draw", nargs="+", type=Path, default=[], help="runs that are there")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    if not given.draw and (given.config is None or given.out is None):
        parser.error("name the settings and the run (--config, --out), or runs to --draw")
    torch.set_num_threads(1)
    path = RESULTS / "curve.jsonl"
    family = "digits:trained"
    if not given.draw:
        whole = load_config(given.config)
        family = whole.family or family
        for rounds in range(given.every, (given.rounds or whole.rounds) + 1, given.every):
            part = load_config(given.config, {"rounds": given.every, "key": given.key})
            policy = policy_at(rounds, part, given.out)
            arm = f"{given.out.name}@{rounds * whole.envs}"
            play(policy, arm, path, family, given.hosts, given.keys)
            print(arm, flush=True)
    runs = [run.name for run in given.draw] or [given.out.name]
    trials = {
        place: row
        for place, row in finished(path, {"family": family}).items()
        if place[0].rpartition("@")[0] in runs
    }
    report(trials, runs, family, given.picture)


if __name__ == "__main__":
    main()
