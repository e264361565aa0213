from dataclasses import replace

import pytest

import depth_pydocs as depth
from esper.growth.blueprints.catalogue import count_params
from esper.tolaria.data.splits import DataSplits

BUDGET = 2 * 10**9


@pytest.fixture(scope="module")
def data() -> DataSplits:
    parts = {name: value[:64] for name, value in vars(depth.load()).items()}
    return DataSplits(**parts)


def test_every_arm_spends_its_budget_and_only_one_grows(data: DataSplits) -> None:
    rows = {
        name: depth.run(replace(arm, budget=BUDGET), 1000, data, test=True)
        for name, arm in depth.ARMS.items()
    }
    assert rows["grown 1 to 4"]["steps"] > rows["static 4"]["steps"]
    for name, row in rows.items():
        assert 0.7 * BUDGET < row["train_macs"] <= BUDGET, name
        assert 0.0 < row["test_loss"] < 5.6, name
        assert row["germinated"] == (name == "grown 1 to 4"), name
        layers = depth.ARMS[name].layers + 3 * row["seeds"]
        assert row["params"] == count_params(
            depth.task_of(replace(depth.ARMS[name], layers=layers)).build()
        )
