from pathlib import Path

import pytest

import shape
from common import finished
from esper.proof.arms import host_size, training_macs
from esper.tamiyo import ScriptedController
from helpers import small_digits

STEPS = 14
SCRIPT = "1 GERMINATE r0c0 widen_double linear\nauto FOSSILIZE\n"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> shape.Bench:
    monkeypatch.setattr(shape, "HeuristicController", lambda: ScriptedController(SCRIPT, "widens"))
    return shape.Bench(*small_digits(128, 60), tmp_path / "shape.jsonl", STEPS)


def test_what_is_found_is_trained_anew_and_controls_have_the_compute_of_both(
    bench: shape.Bench,
) -> None:
    keys = [7, 8]
    bench.search(keys, test=False)
    plan = bench.control((3, 6, 12), keys)
    control = bench.run("control", keys, shape.always(plan), test=True)
    for key, row in zip(keys, control, strict=True):
        grown, anew = bench.trials[shape.GROWN, key], bench.trials[shape.ANEW, key]
        assert grown["widths"] == [2, 4, 8]
        kept = grown["seeds"] == ["widen_double@blocks.0"]
        assert anew["widths"] == ([4, 4, 8] if kept else [2, 4, 8])
        assert (anew["params"], anew["steps"], anew["seeds"]) == (grown["params"], STEPS, [])
        assert grown["test"] is None
        assert row["test"] is not None
    spent = [bench.trials[arm, key]["macs"] for arm in (shape.GROWN, shape.ANEW) for key in keys]
    macs = host_size(plan.task, bench.data)[1]
    assert {row["macs"] for row in control} == {
        training_macs(plan.task, bench.data, macs, plan.rules.steps)
    }
    assert control[0]["macs"] <= sum(spent) / 2
    assert training_macs(plan.task, bench.data, macs, plan.rules.steps + 1) > sum(spent) / 2
    assert any(bench.trials[shape.ANEW, key]["widths"] == [4, 4, 8] for key in keys)


def test_trials_on_disk_are_not_run_again(bench: shape.Bench) -> None:
    bench.search([7], test=False)
    again = shape.Bench(bench.task, bench.data, bench.path, STEPS)
    assert again.trials == bench.trials == finished(bench.path, bench.settings)

    def never(key: int) -> object:
        raise AssertionError(key)

    again.run(shape.GROWN, [7], never, test=False)  # type: ignore[arg-type]


def test_controls_keep_to_the_cap(bench: shape.Bench) -> None:
    shapes = shape.uniform_shapes(bench.task, bench.data)
    assert shapes == [(1, 2, 4), (2, 4, 8), (3, 6, 12)]
    bench.trials = {(shape.ANEW, key): {"params": 1_150} for key in (1, 2)}
    drawn = shape.drawn_shapes(bench, [1, 2])
    assert len(set(drawn)) == shape.RANDOM_SHAPES
    sizes = [host_size(bench.of_shape(widths), bench.data)[0] for widths in drawn]
    assert 1_035 <= min(sizes) <= max(sizes) <= shape.CAP
