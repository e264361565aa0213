"""Tasks: data, host and recipe under one name. Others can add some by entry point."""

from functools import cache
from importlib.metadata import entry_points

from esper.leyline import ConfigError
from esper.tolaria.tasks import cifar10, digits, mnist, pydocs, tinystories
from esper.tolaria.tasks.base import Task, block_slots

ENTRY_POINT_GROUP = "esper.tasks"
BUILT_IN = (
    digits.TASK,
    pydocs.TASK,
    mnist.MNIST,
    mnist.FASHION_MNIST,
    cifar10.CIFAR10,
    cifar10.CIFAR10_DEEP,
    cifar10.CIFAR10_BLIND,
    cifar10.CIFAR10_2K,
    cifar10.CIFAR10_2K_WIDE,
    cifar10.CIFAR10_10K,
    tinystories.TASK,
)


@cache
def all_tasks() -> dict[str, Task]:
    """The built-in tasks, then those of installed packages, by name."""
    tasks = {task.name: task for task in BUILT_IN}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        tasks[point.name] = point.load()
    return tasks


def find_task(name: str) -> Task:
    """Raises ConfigError, listing the names, if there is no such task."""
    tasks = all_tasks()
    if name not in tasks:
        raise ConfigError(f"no task {name!r}; there are {', '.join(tasks)}")
    return tasks[name]


__all__ = ["ENTRY_POINT_GROUP", "Task", "all_tasks", "block_slots", "find_task"]
