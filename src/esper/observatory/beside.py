"""Several runs beside each other: their curves, and differences on the keys that they share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.observatory.described import MOST_POINTS, MOST_ROWS, lines_of, rounds_of
from esper.observatory.looks import presentable
from esper.observatory.reading import number, whole
from esper.observatory.run_directory import METRICS, OUTCOMES
from esper.observatory.runs import glance, kind_of


def side_by_side(folders: Sequence[Path], names: Sequence[str]) -> dict[str, Any]:
    """Curves of several runs, and differences on the keys that pairs of them share."""
    curves, scores = [], []
    for folder, name in zip(folders, names, strict=True):
        seen = glance(folder)
        with lines_of(folder / METRICS) as lines:
            if kind_of(seen.config) == "training":
                rounds = rounds_of(lines)
                x, y, over = rounds["round"], rounds["val_score"], "round"
            else:
                rows = [row for row in lines.sample(MOST_POINTS) if row.get("kind") == "step"]
                x = [whole(row, "step") for row in rows]
                y, over = [number(row, "val_score") for row in rows], "epoch"
        curves.append({"name": name, "over": over, "x": x, "y": y})
        scores.append(_by_key(folder))
    pairs = [
        _paired(names[a], names[b], scores[a], scores[b])
        for a in range(len(folders))
        for b in range(a + 1, len(folders))
    ]
    return presentable({"curves": curves, "pairs": [pair for pair in pairs if pair["n"]]})


def _by_key(folder: Path) -> dict[tuple[str, Any], float]:
    """Validation score by (task, key); the latest, if a key was played twice."""
    scores: dict[tuple[str, Any], float] = {}
    with lines_of(folder / OUTCOMES) as lines:
        for row in lines.sample(MOST_ROWS):
            score = number(row, "val_score")
            if score is not None and isinstance(row.get("key"), int):
                scores[str(row.get("task")), row["key"]] = score
    return scores


def _paired(
    a: str, b: str, first: Mapping[Any, float], second: Mapping[Any, float]
) -> dict[str, Any]:
    differences = [first[key] - second[key] for key in first.keys() & second.keys()]
    n = len(differences)
    mean = sum(differences) / n if n else None
    error = None
    if mean is not None and n > 1:
        error = (sum((d - mean) ** 2 for d in differences) / (n - 1) / n) ** 0.5
    return {"a": a, "b": b, "n": n, "mean": mean, "error": error}
