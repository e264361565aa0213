"""Counter-based randomness: every draw is a pure function of a key, a purpose and counters.

There is no generator state to save or share. Draws with different purposes or counters are
independent; the same arguments give the same draw in any process and in any order.
"""

from hashlib import blake2b

import numpy as np


def draw_key(run_key: int, purpose: str, *counters: int) -> int:
    """A 63-bit key for one purpose and counters (round, environment, step, slot, ...)."""
    text = "/".join([str(int(run_key)), purpose, *(str(int(counter)) for counter in counters)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(run_key: int, purpose: str, *counters: int) -> np.random.Generator:
    """A NumPy generator that starts from `draw_key` of the same arguments."""
    return np.random.Generator(np.random.Philox(draw_key(run_key, purpose, *counters)))
