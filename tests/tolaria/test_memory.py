"""A process that keeps its memory asks the system for it once."""

import platform
import subprocess
import sys

import pytest

from esper.tolaria import memory

# Two features of a batch at a time, freed in the order in which a backward pass frees them.
WORK = """
import resource, sys
import torch
from esper.tolaria import keep_memory
if sys.argv[1] == "keep":
    assert keep_memory()
def batch():
    one = torch.ones(1_000_000)
    two = one + 1
    del two, one
for _ in range(10):
    batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", WORK, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_pages_are_not_asked_for_again_and_again():
    # 1,000 pages for each of two tensors, twenty times; huge pages may make it fewer.
    assert faults("keep") < 200 < faults("as it is")


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert memory.keep_memory() is False
