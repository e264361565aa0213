"""The families of static networks that tasks come with."""

from dataclasses import replace

import pytest

from esper.leyline import ConfigError
from esper.tolaria.tasks import all_tasks


@pytest.mark.parametrize("name", [n for n, task in all_tasks().items() if task.widths])
def test_families_hold_the_host_itself_and_grow_with_width(name: str) -> None:
    task = all_tasks()[name]
    assert task.host_of_width is not None

    def size(module: object) -> int:
        return sum(p.numel() for p in module.parameters())  # type: ignore[attr-defined]

    sizes = [size(task.host_of_width(width)) for width in task.widths]
    assert sizes == sorted(set(sizes))
    assert size(task.build()) in sizes


def test_a_family_needs_its_widths() -> None:
    with pytest.raises(ConfigError, match="both host_of_width and widths"):
        replace(all_tasks()["digits"], widths=())
