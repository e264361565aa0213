"""Tasks: data, host and training recipe under one name."""

from esper.tolaria.tasks.built_in import all_tasks, find_task

__all__ = ["all_tasks", "find_task"]
