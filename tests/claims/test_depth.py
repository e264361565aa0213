from dataclasses import replace

import pytest

import depth
from esper.tolaria.data.splits import DataSplits


@pytest.fixture(scope="module")
def data() -> DataSplits:
    parts = {name: value[:64] for name, value in vars(depth.load()).items()}
    return DataSplits(**parts)


def test_every_arm_spends_its_budget_and_only_one_grows(data: DataSplits) -> None:
    rows = {
        name: depth.run(replace(arm, budget=20 * 10**9), 1000, data, test=True)
        for name, arm in depth.ARMS.items()
    }
    grown, static = rows["grown 1 to 4"], rows["static 4"]
    assert grown["seeds"] == 1
    assert grown["params"] == static["params"]
    assert grown["steps"] > static["steps"]
    for name, row in rows.items():
        assert 0.85 * 20e9 < row["train_macs"] <= 20e9, name
        assert 0.0 < row["test_loss"] < 5.6, name
        assert row["seeds"] == (name == "grown 1 to 4"), name
