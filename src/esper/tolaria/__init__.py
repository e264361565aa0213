"""tolaria: the one who trains.

Tasks and data, populations of hosts, the vectorised growth environment, and the governor.
"""

from importlib import import_module
from typing import Any

# Loaded on first use: the data catalogue has to answer without waiting for torch.
_HOMES = {
    "Budget": "garden",
    "DataSource": "batches",
    "Evaluation": "population",
    "Garden": "garden",
    "Governor": "governor",
    "GrowthEnv": "environment",
    "HostRecipe": "population",
    "LOSSES": "objectives",
    "LoaderSource": "batches",
    "LoopedPopulation": "population",
    "Population": "population",
    "SCORES": "objectives",
    "Task": "tasks",
    "TensorSource": "batches",
    "TrainReadings": "population",
    "Transition": "transition",
    "all_tasks": "tasks",
    "find_objective": "objectives",
    "find_task": "tasks",
    "random_guess_loss": "objectives",
    "run_episode": "episode",
    "settle_outcome": "episode",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"esper.tolaria has no {name!r}")
    return getattr(import_module(f"esper.tolaria.{_HOMES[name]}"), name)
