"""Counting multiply-adds."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def flop_counter() -> FlopCounterMode:
    """Counts what runs inside it: two for every multiply-add, the same on every device.

    Torch's own counter does not know the attention kernel of the CPU, and would take attention
    for free there. Like for the other kernels, positions that a mask hides are counted.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={kernel: _attention})


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)
