"""Rows and run directories as a run would write them."""

import json
from pathlib import Path
from typing import Any

from esper.observatory.run_directory import RunDirectory


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


def lines_of(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


STAGES = ("DORMANT", "GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED")


def write_growth(path: Path, steps: int = 12, module: str = "blocks.0", **config: Any) -> Path:
    """A finished run of `esper grow`, as its folder would be, with one seed that is kept."""
    settings = {"task": "digits", "controller": "heuristic", "key": 3, "steps": steps}
    settings |= {"compare": False, "arm": "grown"} | config
    rows = [
        row(i, STAGES[min(i // 2, 5)], module, **{f"{module}.alpha": min(1.0, i / 10)})
        | {"params": 500 + 10 * (i > 1), "macs": 3000, "train_macs": 1e6, "train_score": 60.0 + i}
        | {f"{module}.contribution": 2.5 if i > 7 else None}
        for i in range(steps + 1)
    ]
    seed = {"module": module, "slot_id": "r0c0", "blueprint": "conv_light", "params": 10}
    names = {"env": 0, "module": module, "slot_id": "r0c0", "blueprint": "conv_light"}
    events = [{"event": "SeedGerminated", "step": 2, **names, "blend": "linear", "params": 10}]
    events += [{"event": "SeedFossilized", "step": 10, **names, "counterfactual": 2.5}]
    end = outcome(key=3, controller="heuristic", env=0, ended="finished", best_step=steps)
    end |= {"germinated": 1, "culled": 0, "seeds": [seed | {"contribution": 2.5, "shapley": 2.5}]}
    with RunDirectory.create(path, settings) as record:
        (path / "metrics.jsonl").write_text(lines_of(rows))
        (path / "events.jsonl").write_text(lines_of(events))
        (path / "outcomes.jsonl").write_text(lines_of([end]))
        assert record.path == path
    return path


def write_training(path: Path, rounds: int = 3, envs: int = 4, planned: int | None = None) -> Path:
    """A run of `esper train ppo` with `rounds` of `planned` rounds played."""
    settings = {"task": "digits", "rounds": planned or rounds, "envs": envs, "key": 0, "steps": 5}
    metrics, outcomes = [], []
    for n in range(rounds):
        for step in range(6):
            for env in range(envs):
                metrics.append({"round": n} | row(step, STAGES[step]) | {"env": env, "params": 500})
                metrics[-1]["op"] = "GERMINATE" if step == 1 else "WAIT"
        outcomes += [{"round": n, "env": env, "total_reward": 0.1 * env} for env in range(envs)]
        metrics.append(
            {"round": n, "kind": "round", "return": 0.1 * n, "val_score": 80.0 + n, "params": 500.0}
            | {"entropy": 0.5, "approx_kl": 0.01, "anomalies": None}
        )
    with RunDirectory.create(path, settings):
        (path / "metrics.jsonl").write_text(lines_of(metrics))
        (path / "outcomes.jsonl").write_text(lines_of([outcome() | row for row in outcomes]))
    return path


def write_evaluation_folder(path: Path, arms: tuple[str, ...] = ("static", "heuristic")) -> Path:
    numbers = {"macs": 3000.0, "train_macs": 2e8, "cpu_seconds": 1.0, "learning_rate": 0.01}
    numbers |= {"germinated": 1.0, "fossilized": 1.0, "culled": 0.0, "rollbacks": 0.0}
    lines = [
        {
            "arm": arm,
            "control_of": None,
            "width": None,
            "shape": None,
            "test_score": 90.0 + i,
            "val_score": 91.0,
        }
        | {"params": 500.0 + 300 * i, **numbers}
        for i, arm in enumerate(arms)
    ]
    report = {
        "task": "digits", "score": "accuracy", "steps": 5, "keys": [0, 1], "keys_wanted": 2,
        "extra": [], "crossover": None,
        "learning_rates": [0.01], "reference": arms[-1], "arms": lines,
        "comparisons": [
            {"arm": arms[-1], "versus": arms[0], "n": 2, "mean": 1.0, "low": -0.5, "high": 2.5,
             "p": 0.5, "p_holm": 0.5}
        ],
        "trials": [
            {"arm": arm, "key": key, "test_score": 90.0 + i + key, "params": 500, "seeds": []}
            for key in (0, 1)
            for i, arm in enumerate(arms)
        ],
    }  # fmt: skip
    path.mkdir(parents=True)
    (path / "evaluation.json").write_text(json.dumps(report))
    return path
