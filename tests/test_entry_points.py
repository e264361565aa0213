"""Other packages can add blueprints, tasks and controllers by entry point."""

from dataclasses import replace
from typing import Any

import pytest

from esper.api import find_controller
from esper.growth.blueprints import catalogue
from esper.growth.blueprints.catalogue import BUILT_IN
from esper.tamiyo import controllers
from esper.tamiyo.controllers.simple import StaticController
from esper.tolaria import tasks
from esper.tolaria.tasks import find_task
from helpers import everywhere, exploding


class Point:
    def __init__(self, name: str, thing: Any) -> None:
        self.name, self.thing = name, thing

    def load(self) -> Any:
        return self.thing


def test_blueprints_of_other_packages_come_after_ours_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [Point(name, everywhere(name, exploding)) for name in ("zebra", "apple")]
    groups = {catalogue.ENTRY_POINT_GROUP: found}
    monkeypatch.setattr(catalogue, "entry_points", lambda group: groups[group])
    names = catalogue.default_catalogue.__wrapped__().names
    assert names == (*BUILT_IN.names, "apple", "zebra")


def test_tasks_of_other_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(find_task("digits"), name="mine")
    groups = {tasks.ENTRY_POINT_GROUP: [Point("mine", mine)]}
    monkeypatch.setattr(tasks, "entry_points", lambda group: groups[group])
    assert tasks.all_tasks.__wrapped__()["mine"] is mine


class Patient(StaticController):
    """Takes what stands behind a colon, like `scripted:FILE`."""

    name = "patient"

    def __init__(self, epochs: str = "5") -> None:
        self.epochs = int(epochs)


def test_controllers_of_other_packages_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {controllers.ENTRY_POINT_GROUP: [Point("patient", Patient)]}
    monkeypatch.setattr(controllers, "entry_points", lambda group: groups[group])
    assert controllers.controller_names()[-1] == "patient"
    for name, epochs in (("patient", 5), ("patient:7", 7)):
        found = find_controller(name)
        assert isinstance(found, Patient)
        assert found.epochs == epochs
