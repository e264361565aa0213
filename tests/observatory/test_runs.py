"""Every run of a folder in its state, also those that are cut, damaged, deleted or replaced."""

import json
import os
import shutil
from pathlib import Path

import pytest

from esper.leyline import events
from esper.observatory import formatting
from esper.observatory.describe import describe, episode, summary_as_dict
from esper.observatory.formatting import STAGE_COLOURS, safe_text, sanitize, stage_name
from esper.observatory.report import write_report
from esper.observatory.run_directory import RunDirectory
from esper.observatory.runs import find_runs, fingerprint, summarize_run
from esper.observatory.summaries import compare_curves
from view_support import outcome, row, write_evaluation_folder, write_growth, write_training

NASTY = "<script>alert(1)</script>\x1b[31m\u202eevil" + "x" * 10_000


def test_states(tmp_path: Path):
    write_growth(tmp_path / "finished")
    write_training(tmp_path / "stopped", rounds=2, planned=5)
    write_evaluation_folder(tmp_path / "deeper" / "evaluation")
    (write_growth(tmp_path / "broken") / "config.toml").write_text("a = = 1")
    (tmp_path / "no run").mkdir()
    with RunDirectory.create(tmp_path / "running", {"task": "digits", "steps": 4}) as record:
        record.metrics(row(2))
        lines = find_runs(tmp_path)
    found = {line.id: (line.kind, line.state, line.done, line.total) for line in lines}
    assert found == {
        "running": ("growth", "running", 2, 4),
        "finished": ("growth", "finished", 12, 12),
        "stopped": ("training", "stopped", 2, 5),
        "deeper/evaluation": ("evaluation", "finished", 2, 2),
        "broken": ("growth", "broken", 12, None),
    }
    assert lines[0].id == "running"
    assert summarize_run(tmp_path / "running").state == "stopped"


@pytest.mark.parametrize(
    ("harm", "state", "why"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "broken", "metrics.jsonl is missing"),
        (lambda run: (run / "config.toml").unlink(), "broken", "config.toml is missing"),
        (lambda run: (run / "outcomes.jsonl").write_text(""), "stopped", "its process ended"),
        (lambda run: os.truncate(run / "metrics.jsonl", 700), "finished", ""),
        (lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\n" * 9), "broken", "damaged"),
        (lambda run: (run / "summary.json").write_text("7"), "broken", "summary.json is damaged"),
        (lambda run: shutil.rmtree(run), "broken", "config.toml is missing"),
        (
            lambda run: (run / "outcomes.jsonl").write_text(
                json.dumps(outcome(ended="interrupted")) + "\n"
            ),
            "stopped",
            "interrupted",
        ),
    ],
)
def test_a_run_that_was_harmed_says_so(tmp_path: Path, harm, state: str, why: str):
    run = write_growth(tmp_path / "run")
    harm(run)
    line = summarize_run(run)
    assert line.state == state
    assert why in line.why
    if run.exists():
        assert describe(run)["run"]["state"] == state


def test_a_training_run_shows_the_score_of_its_last_round(tmp_path: Path):
    run = write_training(tmp_path / "run", rounds=2, planned=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 2} | row(1)) + "\n")
        file.write(json.dumps({"round": 2, "kind": "layer"}) + "\n")
    line = summarize_run(run)
    assert (line.val_score, line.params, line.done, line.left) == (81.0, 500.0, 2, None)
    (run / "timings.jsonl").write_text('{"round": 0, "seconds": 9.0}\n{"round": 1, "seconds": 7}\n')
    with RunDirectory(run):
        assert summarize_run(run).left == 7.0


def test_recorded_and_imitated_runs_have_states_too(tmp_path: Path):
    settings = {"command": "record", "controller": "random", "task": "digits", "episodes": 4}
    with RunDirectory.create(tmp_path / "recorded", settings):
        pass
    assert summarize_run(tmp_path / "recorded").state == "stopped"
    (tmp_path / "recorded" / "episodes.safetensors").write_bytes(b"")
    assert summarize_run(tmp_path / "recorded").state == "finished"
    data = describe(tmp_path / "recorded")
    assert data["run"]["kind"] == "offline"
    assert data["reproduce"] == (
        "esper train record --controller random --task digits --episodes 4 --out runs/repeated"
    )
    with RunDirectory.create(tmp_path / "cloned", {**settings, "command": "imitate"}):
        (tmp_path / "cloned" / "checkpoints").mkdir()
    assert summarize_run(tmp_path / "cloned").state == "finished"
    assert describe(tmp_path / "cloned")["reproduce"] is None


def test_links_are_not_followed(tmp_path: Path):
    outside = write_growth(tmp_path / "outside" / "run")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "link").symlink_to(outside)
    assert find_runs(tmp_path / "served") == []
    inside = write_growth(tmp_path / "served" / "inside")
    for name in ("metrics.jsonl", "config.toml", "outcomes.jsonl", "events.jsonl"):
        (inside / name).unlink()
        (inside / name).symlink_to(outside / name)
    (inside / "arms").symlink_to(tmp_path / "outside")
    data = json.dumps(describe(inside))
    assert "conv_light" not in data
    assert describe(inside)["compared"] == []


def test_the_stamp_changes_with_the_run(tmp_path: Path):
    run = write_growth(tmp_path / "run")
    before = fingerprint(run)
    assert fingerprint(run) == before
    with RunDirectory(run):
        assert fingerprint(run) != before
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    changed = fingerprint(run)
    assert changed != before
    shutil.rmtree(run)
    assert fingerprint(run) != changed


def test_an_episode_has_a_frame_per_epoch_and_its_events_in_words(tmp_path: Path):
    data = episode(write_growth(tmp_path / "run", module="layer1"), None, 0)
    assert data["modules"] == ["layer1"]
    assert [frame["step"] for frame in data["frames"]] == list(range(13))
    assert data["frames"][6]["slots"] == [["BLENDING", "conv_light", 0.6, None]]
    assert data["frames"][12]["slots"] == [["FOSSILIZED", "conv_light", 1.0, 2.5]]
    assert [event["text"] for event in data["events"]] == [
        "conv_light in layer1 planted, 10 parameters",
        "conv_light in layer1 kept, contribution +2.5 points",
    ]


def test_every_event_has_words():
    kinds, found = [events.Event], []
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        found += [kind.__name__] if not kind.__subclasses__() else []
    assert "SeedCulled" in found
    for name in found:
        assert name in formatting.HIDDEN or formatting.in_words({"event": name}) != name, name


def test_a_training_run_is_described_by_rounds_environments_and_choices(tmp_path: Path):
    data = describe(write_training(tmp_path / "run", rounds=3, envs=4))
    assert data["rounds"]["round"] == [0, 1, 2]
    assert data["rounds"]["val_score"] == [80.0, 81.0, 82.0]
    assert data["rounds"]["grad_norm"] == [None] * 3
    assert [env["return"] for env in data["environments"]] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert data["environments"][1]["stages"] == ["FOSSILIZED"]
    assert data["policy"]["steps"] == [1, 2, 3, 4, 5]
    assert data["policy"]["ops"]["GERMINATE"] == [12, 0, 0, 0, 0]
    assert data["episode"]["round"] == 2
    first = episode(tmp_path / "run", 1, 3)
    assert (first["round"], first["env"], len(first["frames"])) == (1, 3, 6)
    assert episode(tmp_path / "run", 99, 3)["frames"] == []


def test_pairs_are_of_the_keys_that_two_runs_share(tmp_path: Path):
    runs = [write_growth(tmp_path / name) for name in ("a", "b", "c")]
    scores = [[(1, 90.0), (2, 92.0), (5, 1.0)], [(1, 89.0), (2, 88.0)], [(7, 3.0)]]
    for run, own in zip(runs, scores, strict=True):
        rows = [outcome(key=key, val_score=score) for key, score in own]
        (run / "outcomes.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = compare_curves(runs, ["a", "b", "c"])
    # Differences 1 and 4: mean 2.5, standard error 1.5.
    assert data["pairs"] == [{"a": "a", "b": "b", "n": 2, "mean": 2.5, "error": 1.5}]
    assert [len(curve["x"]) for curve in data["curves"]] == [13, 13, 13]


def test_names_are_text(tmp_path: Path):
    run = write_growth(tmp_path / "run", module=NASTY, task=NASTY, controller=NASTY)
    data = json.dumps(describe(run), ensure_ascii=False)
    for bad in ("\x1b", "\u202e", "x" * 300):
        assert bad not in data
    assert describe(run)["run"]["task"].startswith("<script>")  # to be shown, not obeyed
    assert safe_text("a\x1b[0m\u2066b\n") == "a\\u001b[0m\\u2066b\\u000a"
    assert safe_text("a\x1b[0m") == "a\\u001b[0m", "ASCII only"
    assert safe_text("x" * 500, 10) == "x" * 9 + "…"
    assert safe_text("naïve 数字 é") == "naïve 数字 é"
    assert sanitize({"key": 2**60, "score": float("inf"), "n": [True, 1]}) == {
        "key": str(2**60),
        "score": None,
        "n": [True, 1],
    }
    assert summary_as_dict(summarize_run(run))["id"] == str(run)


def test_what_stands_where_a_number_should_is_harmless(tmp_path: Path):
    run = write_training(tmp_path / "run", rounds=1)
    bad = {"round": 0, "kind": "step", "env": "0", "step": [], "op": {}, "val_score": "x"}
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(bad | more) + "\n" for more in ({}, {"kind": 7, "env": 1e999}))
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": ["x"], "env": 0, "checks_failed": 3, "round": 0}) + "\n")
        file.write(json.dumps({"event": "SeedGateEvaluated", "env": 0, "checks_failed": 3}) + "\n")
    (run / "outcomes.jsonl").write_text('{"seeds": 3, "env": null, "round": "a"}\n')
    (run / "summary.json").write_text('[1, {"arm": 3, "seeds": {}}]')
    assert json.dumps(describe(run))
    grown = write_growth(tmp_path / "grown")
    worth = {"arm": "grown", "test_score": "high", "params": [], "seeds": [{"params": {}}, 3]}
    (grown / "summary.json").write_text(json.dumps([worth]))
    assert write_report(grown).exists()
    folder = write_evaluation_folder(tmp_path / "evaluated")
    whole = json.loads((folder / "evaluation.json").read_text())
    for part in ("arms", "comparisons", "trials", "keys", "task", "score"):
        for harmed in ({k: v for k, v in whole.items() if k != part}, whole | {part: [{}]}):
            (folder / "evaluation.json").write_text(json.dumps(harmed))
            assert part == "keys" or summarize_run(folder).state == "broken", part
            assert json.dumps(describe(folder))
            assert write_report(folder).exists()


def test_stages_stay_apart_for_colour_blind_eyes():
    """Machado, Oliveira and Fernandes (2009), severity 1; distances in CIELAB."""
    deficiencies = [
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]],
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
         [0.004733, 0.691367, 0.303900]],
    ]  # fmt: skip
    for matrix in deficiencies:
        seen = {stage: _lab(colour, matrix) for stage, colour in STAGE_COLOURS.items()}
        for a in seen:
            for b in seen:
                distance = sum((x - y) ** 2 for x, y in zip(seen[a], seen[b], strict=True)) ** 0.5
                assert stage_name(a) == stage_name(b) or distance > 10, (a, b, distance, matrix)


def _lab(colour: str, matrix: list[list[float]]) -> tuple[float, float, float]:
    bytes_ = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in bytes_]
    r, g, b = (
        min(1.0, max(0.0, sum(m * c for m, c in zip(line, linear, strict=True)))) for line in matrix
    )
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)
