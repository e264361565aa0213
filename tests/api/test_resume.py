"""A run of `grow` that is killed and taken up ends with the same bits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import esper
from esper.leyline import ConfigError, files
from resume_support import EPOCHS, Own, Remembering, kill_in, own_run

RECORD = ("metrics.jsonl", "events.jsonl", "outcomes.jsonl", "actions.txt", "config.toml")
ALL_PLANS = (
    *("batch:2", "write:1", "epoch:1", "write:5", "rename:1", "batch:20"),
    *("epoch:3", "rename:2", "write:7", "epoch:2", "batch:12"),
)


def assert_same_run(one: Path, a: esper.Grown, other: Path, b: esper.Grown) -> None:
    for name in RECORD:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    states = (g.model.state_dict() for g in (a, b))
    first, second = states
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert a.outcome == b.outcome
    assert a.history == b.history
    assert a.events == b.events


def killed_again_and_again(folder: Path, plans: Sequence[str], **settings: Any) -> None:
    whole, cut = folder / "whole", folder / "cut"
    reference = own_run(whole, **settings)
    assert reference.outcome.germinated > 0, "or the test shows little"
    deaths = [kill_in(plan, cut, **settings) for plan in plans]
    assert all(deaths), deaths
    assert_same_run(whole, reference, cut, own_run(cut, **settings))


@pytest.mark.parametrize("controller", ["heuristic", "random", Remembering()])
def test_two_kills(controller: Any, tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, ("write:8", "batch:30"), controller=controller)


@pytest.mark.soak
@pytest.mark.parametrize("controller", ["heuristic", "random"])
def test_eleven_kills(controller: str, tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, ALL_PLANS, controller=controller)


def test_a_finished_run_that_is_taken_up_ends_the_same(tmp_path: Path) -> None:
    first = own_run(tmp_path / "run")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in RECORD}
    again = own_run(tmp_path / "run")
    assert again.outcome == first.outcome
    assert before == {name: (tmp_path / "run" / name).read_bytes() for name in RECORD}


def test_a_run_that_is_out_of_time_can_be_given_more(tmp_path: Path) -> None:
    first = own_run(tmp_path / "run", max_time=1e-9)
    assert (first.outcome.ended, len(first.history)) == ("max_time", 1)
    again = own_run(tmp_path / "run", max_time=1e-9)
    assert (again.outcome.ended, len(again.history)) == ("max_time", 1)
    whole = own_run(tmp_path / "run")
    assert whole.outcome == own_run(tmp_path / "whole").outcome


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": EPOCHS + 1}, f"steps={EPOCHS}, not {EPOCHS + 1}"),
        ({"key": 1}, "started with key=0"),
        ({"controller": "static"}, "started with controller='heuristic'"),
        ({"max_grad_norm": 1.0}, "started with max_grad_norm=None"),
        ({"slots": ["head"]}, "started with slots='body'"),
        ({"resume": False}, "already holds a run"),
    ],
)
def test_other_settings_are_refused(changes: Any, message: str, tmp_path: Path) -> None:
    assert kill_in("epoch:3", tmp_path / "run")
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(ConfigError, match=message):
        own_run(tmp_path / "run", **changes)
    assert before == sorted(path for path in (tmp_path / "run").rglob("*"))


def test_another_model_is_refused(tmp_path: Path) -> None:
    assert kill_in("epoch:3", tmp_path / "run")
    train = [(torch.randn(9, 6), torch.arange(9) % 3)]

    class Wider(Own):
        def __init__(self) -> None:
            super().__init__()
            self.extra = torch.nn.Linear(2, 2)

    Wider.__name__ = "Own"
    with pytest.raises(ConfigError, match=r"does not fit this model: extra\.weight"):
        esper.grow(
            Wider(),
            train,
            train,
            slots=["body"],
            steps=EPOCHS,
            out=tmp_path / "run",
            resume=True,
            optimizer=(None, lambda optimizer: CosineAnnealingLR(optimizer, EPOCHS)),
        )


def test_a_run_without_checkpoints_is_left_alone(tmp_path: Path) -> None:
    own_run(tmp_path / "run")
    for path in files.sealed_series(tmp_path / "run" / "checkpoints", "epoch"):
        files.discard(path)
    with pytest.raises(ConfigError, match="no checkpoint of an epoch"):
        own_run(tmp_path / "run")
    assert (tmp_path / "run" / "outcomes.jsonl").stat().st_size > 0
    with pytest.raises(ConfigError, match="out=DIR"):
        own_run(None)  # type: ignore[arg-type]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert kill_in("epoch:6", tmp_path / "run")
    newest = files.sealed_series(tmp_path / "run" / "checkpoints", "epoch")[0]
    (newest / "tensors.safetensors").write_bytes(b"damaged")
    found = own_run(tmp_path / "run")
    assert "checksum" in caplog.text
    assert found.outcome == own_run(tmp_path / "whole").outcome
