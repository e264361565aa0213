"""What the next epoch of a loop depends on, whoever runs it: hosts, controller, optimiser."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from esper.growth.optimizer import group_settings
from esper.tamiyo.situation import Controller
from esper.tolaria.engine.cycle import GrowthCycle
from esper.tolaria.engine.saved_state import cycle_state, load_cycle_state


def loop_state(env: GrowthCycle, controller: Controller, optimizer: Optimizer) -> dict[str, Any]:
    """Tensors and plain values; the optimiser's own state is with the hosts."""
    remembers = getattr(controller, "state_dict", None)
    return {
        "cycle": cycle_state(env),
        "controller": None if remembers is None else remembers(),
        "groups": group_settings(optimizer),
    }


def load_loop_state(
    env: GrowthCycle, controller: Controller, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Raises ConfigError, before anything is changed, if the state is of other hosts."""
    load_cycle_state(env, state["cycle"])
    if state["controller"] is not None:
        controller.load_state_dict(state["controller"])  # type: ignore[attr-defined]
    for group, settings in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(settings)
