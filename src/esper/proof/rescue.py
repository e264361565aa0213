"""One trained host and some more compute: the ways to spend it, side by side."""

from dataclasses import replace
from itertools import product

from esper.proof.arms import (
    DO_NOTHING,
    Plan,
    extra_budget,
    first_epoch_macs,
    host_size,
    of_width,
    training_macs,
)
from esper.proof.scenarios import going_on, plan_within
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.run import Trained
from esper.tolaria.tasks.base import Task

# What the best network from scratch may choose from, on validation, besides its width.
SCRATCH_RATES = (1.0, 3.0)


class Ways:
    """What can be done with a host of a task, trained for `steps`, for `extra` of what that costs.

    Raises ConfigError if the extra budget does not pay for an epoch.
    """

    def __init__(self, task: Task, data: DataSplits, steps: int, extra: float) -> None:
        self.task, self.data, self.extra = task, data, extra
        _, self.macs = host_size(task, data)
        cost = training_macs(task, data, self.macs, steps)
        self.budget = extra_budget(task, data, self.macs, cost, extra)

    def going_on(
        self, host: Trained, controller: Controller = DO_NOTHING, *, cooling: bool = True
    ) -> Plan:
        """The trained host, with what the controller makes of it."""
        task, rate = self.task, self.task.learning_rate
        how = going_on(controller, cooling, self.extra)
        plan = plan_within(
            self.budget, task, self.data, self.macs, controller, rate, "looped", **how
        )
        return replace(plan, weights={host.outcome.key: host.model.state_dict()})

    def from_scratch(self) -> dict[tuple[int, float], Plan]:
        """New networks of every width that the budget pays for, at every rate."""
        plans = {}
        for width, factor in product(self.task.widths, SCRATCH_RATES):
            task, rate = of_width(self.task, width), factor * self.task.learning_rate
            _, macs = host_size(task, self.data)
            if first_epoch_macs(task, self.data, macs) <= self.budget:
                plans[width, rate] = plan_within(
                    self.budget,
                    task,
                    self.data,
                    macs,
                    DO_NOTHING,
                    rate,
                    "looped",
                    counterfactuals=False,
                )
        return plans
