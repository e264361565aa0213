"""Rows and run directories as a run would write them."""

import json
from pathlib import Path
from typing import Any


def row(step: int, stage: str = "DORMANT", module: str = "blocks.0", **changes: Any) -> dict:
    return {
        "kind": "step",
        "env": 0,
        "step": step,
        "op": "WAIT",
        "slot": None,
        "blueprint": None,
        "blend": None,
        "val_score": 50.0 + step,
        f"{module}.stage": stage,
        f"{module}.blueprint": None if stage == "DORMANT" else "conv_light",
        **changes,
    }


def outcome(**changes: Any) -> dict[str, Any]:
    row = {"task": "digits", "controller": "random", "val_score": 90.0, "params": 500}
    row |= {"macs": 10, "train_macs": 2_000_000, "germinated": 2, "fossilized": 1, "culled": 1}
    return row | {"rollbacks": 0, "total_reward": 0.1} | changes


def write_run(path: Path, outcomes: list[dict[str, Any]], tail: str = "") -> Path:
    path.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in outcomes)
    (path / "outcomes.jsonl").write_text(lines + tail)
    (path / "metrics.jsonl").write_text(
        "".join(
            json.dumps(
                {"kind": "step", "step": i, "blocks.0.stage": "DORMANT", "val_score": 1.5 * i}
            )
            + "\n"
            for i in range(4)
        )
    )
    (path / "events.jsonl").write_text("")
    return path
