"""How a young seed compares with its host: gradients and activations.

A seed whose gradients or activations are orders of magnitude from its host's tends to stay a
passenger, or to disturb; parity early on goes with growth that turns out well.
"""

from typing import Any

import numpy as np

from esper.leyline import SeedStage
from esper.tamiyo import Situation


def newborn_rows(situation: Situation) -> list[dict[str, Any]]:
    """Flat rows for the recorder, one for each live seed in its first epochs.

    gradient_parity     norm of its gradient per parameter over the host's, 1 is parity
    activation_parity   size of its output over what it is added to
    None where not measured: before its first epoch of training there is nothing to compare.
    """
    table = situation.table
    return [
        {
            "kind": "newborn",
            "env": env,
            "step": situation.step,
            "slot": situation.slot_config.slot_ids[slot],
            "blueprint": situation.catalogue[table.blueprint[env, slot]].name,
            "stage": SeedStage(table.stage[env, slot]).name,
            "age": int(table.epochs_total[env, slot]),
            "gradient_parity": _measured(table.gradient_ratio[env, slot]),
            "activation_parity": _measured(table.activation_ratio[env, slot]),
        }
        for env, slot in np.argwhere(table.newborn).tolist()
    ]


def _measured(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
