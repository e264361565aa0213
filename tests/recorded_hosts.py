"""Recorded episodes of hosts of which one slot pays, for the scripts that learn from such."""

from functools import cache

import numpy as np

from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import BLUEPRINT, OP, SLOT, LifecycleOp
from esper.simic.recordings.episodes import Episodes
from esper.simic.training.env_specs import Space

SPACE = Space.of(2, default_catalogue().names[:2], "set")
HOSTS, CANDIDATES = 40, 4


@cache
def recorded() -> Episodes:
    """Hosts whose narrower slot pays; each candidate once, and waiting."""
    count = HOSTS * (CANDIDATES + 1)
    host, pull = np.divmod(np.arange(count), CANDIDATES + 1)
    names = SPACE.names(["a", "b"])
    column = {name: number for number, name in enumerate(names)}
    width = np.random.default_rng(0).integers(1, 5, size=(HOSTS, 2))
    width[:, 1] = np.where(width[:, 1] == width[:, 0], 5, width[:, 1])
    seen = np.zeros((HOSTS, SPACE.observation_dim), dtype=np.float32)
    for slot in "ab":
        seen[:, column[slot, "present"]] = seen[:, column[slot, "may germinate"]] = 1.0
        for other in SPACE.blueprints:
            seen[:, column[f"{other} in {slot}", "fits"]] = 1.0
    seen[:, [column["a", "channels"], column["b", "channels"]]] = width / 5
    seen[:, column["the training", "noise"]] = np.arange(HOSTS) / HOSTS
    actions = np.zeros((count, 1, 4), dtype=np.int64)
    planted = pull < CANDIDATES
    actions[planted, 0, OP] = LifecycleOp.GERMINATE
    actions[planted, 0, SLOT], actions[planted, 0, BLUEPRINT] = np.divmod(pull[planted], 2)
    right = actions[:, 0, SLOT] == width[host].argmin(axis=1)
    returns = np.where(planted, np.where(right, 0.02, -0.01), 0.0) + host
    masks = {
        "op_masks": np.ones((count, 1, 4), dtype=bool),
        "slot_masks": np.ones((count, 1, 4, 2), dtype=bool),
        "blueprint_masks": np.ones((count, 1, 2, 2), dtype=bool),
        "blend_masks": np.ones((count, 1, 3), dtype=bool),
    }
    observations = np.stack([seen[host]] * 2, axis=1)
    lengths = np.ones(count, dtype=np.int64)
    return Episodes(
        SPACE,
        observations,
        **masks,
        actions=actions,
        rewards=returns[:, None],
        lengths=lengths,
        hosts=host,
    )
