from typing import Any

from esper.leyline.events import SeedCulled


def test_automatic_culls_say_so() -> None:
    life: dict[str, Any] = {
        "env": 0,
        "step": 1,
        "slot_id": "r0c0",
        "blueprint": "norm",
        "epochs_total": 1,
        "epochs_in_stage": 1,
        "improvement": None,
        "counterfactual": None,
        "params": 5,
    }
    assert SeedCulled(**life, reason="holding_timeout").automatic
    assert not SeedCulled(**life, reason="controller").automatic
