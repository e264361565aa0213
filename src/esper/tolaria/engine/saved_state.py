"""Save and load the state of a growth cycle, as a tree of tensors and plain values.

A cycle that loads the state of another one, with the same hosts and rules, continues like it.
"""

from typing import Any

import numpy as np
import torch

from esper.growth.slot_table import SlotTable
from esper.growth.snapshot import HostSnapshot, check_fits, snapshot_from_tree, snapshot_tree
from esper.leyline import ConfigError, TrainingSignals
from esper.tolaria.engine.cycle import GrowthCycle
from esper.tolaria.engine.garden import SavedHost


def cycle_state(cycle: GrowthCycle) -> dict[str, Any]:
    """For hosts whose snapshots are `HostSnapshot`s; call it between two steps."""
    assert cycle.situation is not None, "call it after the first epoch"
    garden = cycle.garden
    everyone = np.arange(cycle.n_envs)
    now = [
        SavedHost(cycle.step_count, host, garden.table.row(env))
        for env, host in enumerate(cycle.population.snapshot(everyone))
    ]
    return {
        "slots": list(garden.event_log.slots.names),
        "blueprints": list(garden.event_log.catalogue.names),
        "counters": {name: value for name, value in vars(cycle).items() if type(value) is int},
        "counts": _tensors(garden.counts),
        **{name: _tensors(vars(owner)) for name, owner in _with_arrays(cycle).items()},
        "signals": _tensors(vars(cycle.situation.signals)),
        "now": [_saved_tree(saved) for saved in now],
        "healthy": [_saved_tree(saved) for saved in cycle.governor.saved],
        "best": [_saved_tree(saved) for saved in cycle.best],
    }


def load_cycle_state(cycle: GrowthCycle, state: dict[str, Any]) -> None:
    """Raises ConfigError, and changes nothing, if the state is of other hosts."""
    garden = cycle.garden
    for what, mine in (
        ("slots", garden.event_log.slots.names),
        ("blueprints", garden.event_log.catalogue.names),
    ):
        if list(mine) != state[what]:
            raise ConfigError(
                f"the saved state has the {what} {', '.join(state[what])}, but here they are "
                f"{', '.join(mine)}"
            )
    now, healthy, best = ([_saved(tree) for tree in state[k]] for k in ("now", "healthy", "best"))
    current = [saved for saved in now if saved is not None]
    for saved in current:
        assert isinstance(saved.host, HostSnapshot)
        check_fits(cycle.population.template, saved.host)
    for name, value in state["counters"].items():
        setattr(cycle, name, value)
    garden.counts = {name: _array(count) for name, count in state["counts"].items()}
    for owner_name, owner in _with_arrays(cycle).items():
        for name, value in state[owner_name].items():
            setattr(owner, name, _array(value))
    cycle.governor.saved, cycle.best = healthy, best
    garden.restore(np.arange(cycle.n_envs), current)
    cycle.resume(TrainingSignals(**{k: _array(v) for k, v in state["signals"].items()}))


def _with_arrays(cycle: GrowthCycle) -> dict[str, Any]:
    """The objects whose arrays are saved."""
    return {
        "cycle": cycle,
        "garden": cycle.garden,
        "tracker": cycle.tracker,
        "governor": cycle.governor,
        "compute_budget": cycle.compute_budget,
    }


def _tensors(values: dict[str, Any]) -> dict[str, Any]:
    """The arrays among the values, copied to tensors."""
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().copy()


def _saved_tree(saved: SavedHost | None) -> dict[str, Any] | None:
    if saved is None:
        return None
    assert saved.host is None or isinstance(saved.host, HostSnapshot)
    host = None if saved.host is None else snapshot_tree(saved.host)
    return {**vars(saved), "host": host, "row": _tensors(vars(saved.row))}


def _saved(tree: dict[str, Any] | None) -> SavedHost | None:
    if tree is None:
        return None
    row = SlotTable(**{name: _array(column) for name, column in tree["row"].items()})
    host = None if tree["host"] is None else snapshot_from_tree(tree["host"])
    return SavedHost(**{**tree, "host": host, "row": row})
