"""A count of what is read from the device."""

from collections import Counter

import pytest
import torch


@pytest.fixture
def transfers(monkeypatch):
    """How often tensors are read out: item, tolist, cpu, numpy and conversions to Python."""
    count = Counter()
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, _name=name, _original=original, **kwargs):
            count[_name] += 1
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spy)
    return count
