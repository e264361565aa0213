"""What one run has grown, trained anew, and what else the same compute could have been spent on."""

from collections.abc import Sequence
from dataclasses import dataclass

from esper.proof.arms import Plan, affordable_steps, host_size, of_width, static_plan
from esper.proof.shapes import Shape, keeps_to, of_shape, random_shapes, shape_within
from esper.tolaria import Budget, DataSplits, Task, Topology, Trained

RANDOM_SHAPES = 4


@dataclass(frozen=True)
class Found:
    """The shape of a grown network: widths of the host, and seeds that it has from birth. A task
    without a family of shapes has no widths: all that was grown are seeds."""

    task: Task
    data: DataSplits
    budget: Budget
    widths: Shape
    seeds: Topology

    @staticmethod
    def of(grown: Trained, task: Task, data: DataSplits, budget: Budget) -> "Found":
        return Found(task, data, budget, *shape_within(task, data, grown.topology, budget))

    def in_words(self) -> str:
        """'blocks.0 2 -> 4 channels; branch at blocks.1'."""
        catalogue, task = self.task.recipe(self.data).catalogue, self.task
        wider = [
            f"blocks.{block} {own} -> {width} channels"
            for block, (own, width) in enumerate(zip(task.shape, self.widths, strict=True))
            if width != own
        ]
        seeds = [f"{catalogue[seed].name} at {task.slots[slot]}" for slot, seed in self.seeds]
        return "; ".join(wider + seeds) or "the host as it was"

    @property
    def shaped_task(self) -> Task:
        return of_shape(self.task, self.widths) if self.widths else self.task

    def anew(self, steps: int) -> Plan:
        return static_plan(self.shaped_task, steps, self.seeds)

    def uniform(self, macs: int) -> list[Plan]:
        """Hosts of every width that keeps to the budget, or where there is no cap is no larger than
        what was found; each with `macs` to spend. None of a task without widths."""
        tasks = [of_width(self.task, width) for width in self.task.widths]
        if self.budget == Budget():
            most, _ = host_size(self.shaped_task, self.data, self.seeds)
            tasks = [task for task in tasks if host_size(task, self.data)[0] <= most]
        return self._controls(tasks, macs)

    def random(self, macs: int) -> list[Plan]:
        """The same of random shapes that are about as large as what was found."""
        build = self.task.host_of_widths
        if build is None:
            return []
        params, _ = host_size(self.shaped_task, self.data, self.seeds)
        # More than are needed: some may be above the cap.
        shapes = random_shapes(build, self.task.shape, params, 4 * RANDOM_SHAPES)
        tasks = [of_shape(self.task, widths) for widths in shapes]
        return self._controls(tasks, macs)[:RANDOM_SHAPES]

    def _controls(self, tasks: Sequence[Task], macs: int) -> list[Plan]:
        plans = []
        for task in tasks:
            if keeps_to(self.budget, task, self.task, self.data):
                per_example = host_size(task, self.data)[1]
                steps = affordable_steps(task, self.data, per_example, macs)
                plans.append(static_plan(task, steps))
        return plans
