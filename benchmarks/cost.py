"""What growth costs: CPU time and memory over a plain training loop that also validates.

    python benchmarks/cost.py [row ...] [--repeats 5]
    python benchmarks/cost.py --record       all rows, written to benchmarks/results/cost.json

Each row is a function that returns its figures; what another script measures is taken from there.
`docs/pictures.py --cost` draws the recorded curves. Both sides take turns in one process, on one
thread; times are CPU times, and figures are ratios of medians. The data are noise: only the work
counts. The last line is one JSON object: each row's figures, its targets, and whether they are met.
"""

import argparse
import ctypes
import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from esper.growth.blueprints.catalogue import _seed_traits, default_catalogue
from esper.growth.devices import keyed
from esper.growth.hosts import MLPHost, TransformerHost
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.situation import wait
from esper.tolaria.engine.batches import TensorSource
from esper.tolaria.engine.objectives import LOSSES, SCORES
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.engine.run import GrowthEnv, make_env, settle

EPOCHS = 1000  # more than any run here has
Figures = dict[str, float]


def keep_freed_memory() -> None:
    """The allocator gives nothing back: to take it again may cost half as much as the work, at
    random, on either side."""
    _mallopt(M_MMAP_MAX, 0)
    _mallopt(M_TRIM_THRESHOLD, -1)


def give_freed_memory_back() -> None:
    """The allocator keeps nothing: the peak is that of what is used, without holes in between."""
    _mallopt(M_MMAP_THRESHOLD, 1 << 20)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of glibc


def _mallopt(parameter: int, value: int) -> None:
    if not ctypes.CDLL(None).mallopt(parameter, value):
        raise OSError(f"the allocator refuses setting {parameter}")


def cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def in_turn(repeats: int, *sides: Callable[[], object]) -> list[float]:
    """Median CPU seconds of each side, after one turn that is left out."""
    turns = [[cpu(side) for side in sides] for _ in range(1 + repeats)]
    return [median(times) for times in zip(*turns[1:], strict=True)]


# --- networks --------------------------------------------------------------------------------


def recipe_of(build: Callable[[], nn.Module], data: TensorSource) -> HostRecipe:
    with torch.device("meta"):
        slots = list(build().slot_modules)
    return HostRecipe(
        build,
        slots,
        data,
        LOSSES["cross_entropy"],
        SCORES["accuracy"],
        partial(AdamW, lr=1e-4),
        default_catalogue(),
    )


def gpt() -> HostRecipe:
    """867 thousand parameters."""
    with keyed(0):
        x, y = torch.randint(0, 512, (2, 320, 64))
    data = TensorSource((x[:256], y[:256]), (x[256:], y[256:]), 32)
    build = partial(
        TransformerHost, vocab=512, n_embd=128, n_head=4, n_layer=4, block_size=64, dropout=0.0
    )
    return recipe_of(build, data)


def mlp(blocks: int = 32, width: int = 128, batches: int = 96) -> HostRecipe:
    size = 64 * batches
    with keyed(0):
        x, y = torch.randn(size + size // 4, 64), torch.randint(0, 10, (size + size // 4,))
    data = TensorSource((x[:size], y[:size]), (x[size:], y[size:]), 64)
    return recipe_of(partial(MLPHost, 64, 10, hidden=width, n_layers=blocks), data)


def growing(recipe: HostRecipe, kept: int = 0, blueprint: str = "", **settings: Any) -> GrowthEnv:
    """One host after its first epoch, with kept seeds in its first slots."""
    topology = tuple((slot, recipe.catalogue.index(blueprint)) for slot in range(kept))
    env = make_env(recipe, [0], GrowthSettings(EPOCHS, topology=topology, **settings))
    env.reset()
    return env


def plain_loop(recipe: HostRecipe, model: nn.Module, optimizer: Optimizer) -> None:
    """An epoch with validation."""
    losses, scores = [], []
    model.train()
    for x, y in recipe.data.train_batches(0):
        optimizer.zero_grad()
        loss = recipe.loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        for x, y in recipe.data.val_batches():
            output = model(x)
            scores += [(recipe.loss(output, y).item(), recipe.score(output, y).item())]


def plain(recipe: HostRecipe, model: nn.Module) -> Callable[[], None]:
    return partial(plain_loop, recipe, model, recipe.optimizer(model.parameters()))


def exported(recipe: HostRecipe, env: GrowthEnv) -> Callable[[], None]:
    return plain(recipe, env.population.export(0))  # type: ignore[attr-defined]


def grow_one(env: GrowthEnv) -> None:
    env.step(wait(1))


# --- rows ------------------------------------------------------------------------------------


def kept_seeds(recipe: HostRecipe, kept: int, blueprint: str, repeats: int) -> Figures:
    """`epoch` and `settling` of a network with kept seeds, over an epoch of its exported module."""
    env = growing(recipe, kept, blueprint)
    everyone = np.ones(1, dtype=bool)
    grown, end, alone = in_turn(
        repeats,
        lambda: grow_one(env),
        lambda: settle(env, everyone, task="cost", controller="none"),
        exported(recipe, env),
    )
    return {"epoch": grown / alone, "settling": end / alone}


def gpt_kept(repeats: int) -> Figures:
    return kept_seeds(gpt(), 4, "mlp_small", repeats)


def mlp_kept(repeats: int) -> Figures:
    return kept_seeds(mlp(), 8, "lora", repeats)


def setup(repeats: int) -> Figures:
    """Making an environment over an epoch, and per slot in milliseconds of CPU time."""
    figures: Figures = {}
    for name, recipe in (("gpt", gpt()), ("mlp", mlp())):
        fresh, alone = in_turn(repeats, partial(_set_up, recipe), plain(recipe, recipe.build()))
        figures[name] = fresh / alone
    many = mlp(128, 64)
    (seconds,) = in_turn(repeats, partial(_set_up, many))
    return {**figures, "ms_per_slot": 1000 * seconds / 128}


def _set_up(recipe: HostRecipe) -> None:
    _seed_traits.cache_clear()
    make_env(recipe, [0], GrowthSettings(EPOCHS)).start()


def memory(repeats: int) -> Figures:
    """Peak memory above the plain loop, in multiples of the bytes of 25.5 million parameters."""
    rounds = [{how: peak_bytes(how) for how in ("plain", "host", "none")} for _ in range(repeats)]
    peaks = {how: median(each[how] for each in rounds) for how in rounds[0]}
    return {how: (peaks[how] - peaks["plain"]) / LARGE_BYTES for how in peaks if how != "plain"}


LARGE = partial(mlp, 6, 2255, 2)
LARGE_BYTES = 4 * 25_500_000


def _train_large(how: str, epochs: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    give_freed_memory_back()
    recipe = LARGE()
    if how == "plain":
        epoch = plain(recipe, recipe.build())
    else:
        env = growing(recipe, snapshots=how)
        epoch = partial(grow_one, env)
    for _ in range(epochs):
        epoch()
    pipe.send(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def peak_bytes(how: str, epochs: int = 5) -> int:
    """Of a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_train_large, args=(how, epochs, theirs))
    process.start()
    theirs.close()
    found = int(ours.recv())
    process.join()
    return found


def over_slots(repeats: int) -> Figures:
    """An epoch of a network of 128 blocks with 1 to 128 slots and no seed, over the plain loop."""
    recipe, figures = mlp(128, 32, 16), Figures()
    for slots in (1, 4, 16, 64, 128):
        own = replace(recipe, slots=recipe.slots[:slots])
        figures[str(slots)] = _ungrown(own, repeats)
    return figures


def _ungrown(recipe: HostRecipe, repeats: int) -> float:
    env, model = growing(recipe), recipe.build()
    grown, alone = in_turn(repeats, partial(grow_one, env), plain(recipe, model))
    return grown / alone


def over_kept(repeats: int) -> Figures:
    """An epoch with 0 to 16 kept seeds, over that of the exported module."""
    return {
        str(kept): kept_seeds(mlp(batches=32), kept, "lora", repeats)["epoch"]
        for kept in (0, 1, 2, 4, 8, 16)
    }


def over_params(repeats: int) -> Figures:
    """An epoch of networks of 0.1 to 100 million parameters and no seed, over the plain loop."""
    return {
        str(millions): _ungrown(mlp(6, width, batches), repeats if millions < 100 else 1)
        for millions, width, batches in (
            (0.1, 128, 96),
            (1, 430, 64),
            (10, 1400, 32),
            (100, 4460, 8),
        )
    }


# What the rows below need is only installed with the extra `dev`.


def export(repeats: int) -> Figures:
    """A pass at batch 1 through an export, over one through a network written by hand. The MLP has
    a norm over channels, of which the wide network has one and the export two."""
    from export_speed import measure

    return measure(alternations=3 * repeats)


def ppo_loop(repeats: int) -> Figures:
    """Environment steps per CPU second of whole rounds of PPO, over the original project."""
    from original_work import WORKS, over_the_original

    return {name: over_the_original(work, 1, repeats) for name, work in WORKS.items()}


def ppo_workers(repeats: int) -> Figures:
    from original_work import two_workers_over_one

    return {"two_over_one": two_workers_over_one(1, repeats)}


def policy(repeats: int) -> Figures:
    from policy import compare

    found = compare(repeats)
    return {name: found[name] for name in ROWS["policy"].targets}


@dataclass(frozen=True)
class Row:
    """Figures must be at most their target, or `at_least`."""

    measure: Callable[[int], Figures]
    targets: Figures
    at_least: bool = False

    def met(self, figures: Figures) -> bool:
        sign = 1 if self.at_least else -1
        return all(sign * (figures[name] - goal) >= 0 for name, goal in self.targets.items())


ROWS = {
    "gpt_kept": Row(gpt_kept, {"epoch": 1.05, "settling": 0.25}),
    "mlp_kept": Row(mlp_kept, {"epoch": 1.05, "settling": 0.25}),
    "setup": Row(setup, {"gpt": 0.15, "mlp": 0.15, "ms_per_slot": 3.0}),
    "memory": Row(memory, {"host": 3.0, "none": 0.1}),
    "export": Row(export, {"resnet": 1.03, "gpt": 1.03, "mlp": 1.10, "branch_mlp": 1.10}),
    "ppo_loop": Row(
        ppo_loop,
        {
            "cifar_none": 1.3,
            "cifar_kept": 1.6,
            "tiny_free": 4.0,
            "tiny_64_none": 10.0,
            "tiny_64_kept": 8.0,
        },
        at_least=True,
    ),
    "ppo_workers": Row(ppo_workers, {"two_over_one": 1.1}),
    "policy": Row(
        policy,
        {
            "update_flat_over_sb3": 0.1,
            "update_set_over_sb3": 0.18,
            "observe_and_act_set_over_flat": 1.25,
        },
    ),
    "over_slots": Row(over_slots, {"128": 1.05}),
    "over_kept": Row(over_kept, {"16": 1.05}),
    "over_params": Row(over_params, {"100": 1.05}),
}
RECORD = Path(__file__).parent / "results" / "cost.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", action="store_true", help=f"write to {RECORD.name}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    result = {}
    for name in given.rows:
        row = ROWS[name]
        figures = {key: round(value, 3) for key, value in row.measure(given.repeats).items()}
        result[name] = {
            "figures": figures,
            "targets": row.targets,
            "met": row.met(figures),
            "repeats": given.repeats,
        }
        print(f"{name:<11} {figures}", flush=True)
        if given.record:
            known = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
            RECORD.write_text(json.dumps({**known, **result}, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
