"""`esper grow` that is killed and continued with --resume ends as if nothing had happened."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from command_support import esper_here
from esper.api import growth_run
from esper.observatory.run_directory import RunDirectory, read_rows
from esper.tolaria.engine import cycle, gradients

RECORD = ("metrics.jsonl", "events.jsonl", "outcomes.jsonl", "actions.txt")
FRESH = "grow --steps 6 --controller scripted:early --no-compare"
TRAINED = "grow --start trained --extra 2.0 --steps 3 --controller scripted:early --no-compare"


def killed(run: Callable[[], int], checkpoints: int) -> bool:
    """Run in a child process that dies by SIGKILL after so many checkpoints of the grown arm."""
    child = os.fork()
    if child == 0:
        save, left = growth_run.save_run, checkpoints

        def save_and_die(record: RunDirectory, growth: growth_run.GrowthRun) -> None:
            nonlocal left
            save(record, growth)
            left -= growth.config["arm"] == "grown"
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        growth_run.save_run = save_and_die  # type: ignore[assignment]
        try:
            run()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize(
    ("command", "checkpoints"), [(FRESH, 3), (TRAINED, 1)], ids=["fresh", "trained"]
)
def test_a_killed_run_that_is_resumed_ends_the_same(
    command: str, checkpoints: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cycle, gradients):  # every trained host is cooled
        monkeypatch.setattr(module, "COOLING_STARVED", 2.0)
        monkeypatch.setattr(module, "COOLING_TARGET", 0.94)

    def run(out: str, *more: str) -> int:
        return esper_here(monkeypatch, *command.split(), "--out", out, *more, cwd=tmp_path)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run("whole") == 0
    assert killed(lambda: run("cut"), checkpoints)
    assert not (cut / "summary.json").exists()
    assert run("cut", "--resume") == 0
    events = [row["event"] for row in read_rows(whole / "events.jsonl")]
    assert "SeedGerminated" in events
    assert ("HostCooled" in events) is (command is TRAINED)
    for name in RECORD:
        assert (whole / name).read_bytes() == (cut / name).read_bytes(), name
    first, second = (torch.export.load(folder / "model.pt2").state_dict for folder in (whole, cut))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
