"""What a long command would take, measured on a little of the real thing.

Every network is trained for all its epochs, but on a few batches; that says what would be trained,
and how many multiply-adds it takes. Then the first epochs on all data are timed. Nothing is
written, and the test part of the data is not read.
"""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from esper.cli.printing import consoles, print_json

if TYPE_CHECKING:
    from torch import Tensor

    from esper.tamiyo import Controller
    from esper.tolaria import DataSplits, HostRecipe, Task, Trained, TrialRules

DRY_RUN = "Say what would run, for how long and with how much memory; write nothing."
BATCHES = 2  # that a rehearsal trains on
# One epoch of a small host is over before the others on a busy machine have had their turn.
TIMED_SECONDS, MOST_TIMED_EPOCHS = 3.0, 10


@dataclass(frozen=True)
class Estimate:
    """would  what would be done
    out      the folder that would be written
    seconds, memory_bytes   None where nobody can know; memory is the peak of all processes
    how      how that was found out
    """

    would: str
    out: str
    seconds: float | None
    memory_bytes: int | None
    how: str


def show_estimate(estimate: Estimate, *, quiet: bool, as_json: bool) -> None:
    """Print it."""
    from esper.observatory import clock, say

    if as_json:
        print_json({"dry_run": True, **asdict(estimate)})
        return
    _, result = consoles(quiet, as_json)
    seconds, memory = estimate.seconds, estimate.memory_bytes
    for name, text in (
        ("would", estimate.would),
        ("folder", f"{estimate.out}, not written"),
        ("time", "not known" if seconds is None else f"about {clock(seconds)}"),
        ("memory", "not known" if memory is None else f"about {memory / 1e6:,.0f} MB"),
        ("measured", estimate.how),
    ):
        say(result, f"{name:<9}{text}", whole=True)


@contextmanager
def measuring(quiet: bool, as_json: bool) -> Iterator[None]:
    """Somebody who waits is told why."""
    console, _ = consoles(quiet, as_json)
    with console.status("measuring"):
        yield


def little_of(task: "Task", data: "DataSplits") -> "tuple[DataSplits, float]":
    """A few batches of an epoch and as small a part of validation, and how many times as much the
    whole is. Where a network would be tested it finds validation again."""
    from esper.tolaria import DataSplits

    epoch = task.recipe(data).data.size().train
    assert epoch is not None, "tasks have their data in memory"
    rows = min(epoch, BATCHES * task.batch)
    share = rows / epoch
    held_out = max(1, round(share * len(data.val_x)))

    def first(count: int, *parts: "Tensor") -> "list[Tensor]":
        return [part[:count] for part in parts]

    val = first(held_out, data.val_x, data.val_y)
    return DataSplits(*first(rows, data.train_x, data.train_y), *val, *val), 1.0 / share


def rehearsed(
    task: "Task", data: "DataSplits", controller: "Controller", rules: "TrialRules", key: int
) -> "tuple[Trained, float]":
    """A network that was trained on a little of the data, and the multiply-adds of its training on
    all of it."""
    from esper.tolaria import train

    little, factor = little_of(task, data)
    alone = replace(rules, population="looped")
    (trained,) = train(
        task.recipe(little), [key], alone, controller, task=task.name, attribute=False
    )
    return trained, factor * trained.outcome.train_macs


def seconds_per_mac(
    recipe: "HostRecipe",
    hosts: int,
    rules: "TrialRules",
    controller: "Controller",
    device: str = "cpu",
) -> float:
    """Of the first epochs on all data, after one that nobody times. Looped hosts take their turns,
    so one stands for all; fused ones are timed together."""
    from esper.tolaria import decide, make_env

    env = make_env(recipe, range(hosts if rules.population == "fused" else 1), rules, device=device)
    controller.reset(env.n_envs)
    env.reset()
    spent, began = env.garden.train_macs.sum(), time.perf_counter()
    for _ in range(min(MOST_TIMED_EPOCHS, rules.steps)):
        env.step(decide(env, controller))
        seconds = time.perf_counter() - began
        if seconds > TIMED_SECONDS:
            break
    return float(seconds / (env.garden.train_macs.sum() - spent))


def peak_bytes(workers: int = 0) -> int:
    """The most memory that this process has held, with as many workers as the largest that has
    ended."""
    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return unit * (own + workers * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
