"""docs/review-findings.md lists every finding once, with tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
NOT_OURS = "does not apply: "


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(1, count + 1)]


# By the heading of their table, the ids as the reviews give them, or as the page says.
EXPECTED = {
    "Review 000": [
        *numbered("H", 3), *numbered("M", 6), *numbered("L", 5), *numbered("A", 6), "GAE", "PPO",
    ],
    "Review 001": [*numbered("H", 2), *numbered("M", 4), *numbered("L", 5), "KEPT"],
    "Review 002": [
        *numbered("CRIT-", 2), *numbered("HIGH-", 3), *numbered("MED-", 5), *numbered("LOW-", 5),
        *numbered("CONCERN-", 3),
    ],
    "Review 003": [
        *numbered("PPO-M", 2), "PPO-L1", *numbered("PPO-R", 4),
        "NETWORKS-H1", *numbered("NETWORKS-M", 2), "NETWORKS-L1", *numbered("NETWORKS-R", 4),
        *numbered("BUFFERS-M", 2), "BUFFERS-L1", *numbered("BUFFERS-R", 3), "KEPT",
    ],
    "Review 004": [
        *numbered("C", 7), *numbered("H", 14), *numbered("M", 23), *numbered("GAP", 7),
    ],
    "Known defects": numbered("D", 33),
}  # fmt: skip


def listed() -> dict[str, list[tuple[str, str]]]:
    """(id, what covers it) of every row, by the heading of its table."""
    text = (ROOT / "docs" / "review-findings.md").read_text(encoding="utf-8")
    tables = {}
    for section in text.split("\n## ")[1:]:
        rows = re.findall(r"^\| ([A-Z][\w-]*) \| .+ \| (.+) \|$", section, re.MULTILINE)
        tables[re.split(r"[:\n]", section)[0]] = rows
    return tables


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("review", EXPECTED)
def test_every_finding_is_listed_once_and_no_other(review):
    assert list(listed()) == list(EXPECTED)
    assert [name for name, _ in listed()[review]] == EXPECTED[review]


def test_every_finding_has_tests_that_exist_or_a_reason():
    for review, rows in listed().items():
        for name, covered in rows:
            tests = TEST.findall(covered)
            assert tests or len(covered) > len(NOT_OURS), (review, name)
            assert covered.startswith(NOT_OURS if NOT_OURS in covered else "`tests/"), (
                review,
                name,
            )
            assert covered.count("::") == len(tests), (review, name)
            for path, test in tests:
                assert test in functions(path), (review, name, test)


def test_every_test_that_carries_an_id_is_listed_at_that_id():
    tables = {review.removeprefix("Review "): dict(rows) for review, rows in listed().items()}
    carrying = 0
    for file in sorted(Path(__file__).parent.rglob("test_*.py")):
        path = file.relative_to(ROOT).as_posix()
        for test in functions(path):
            match = re.match(r"test_(\d{3}_|(?=d\d))", test)
            if match is None:
                continue
            rows = tables[match[1].rstrip("_") or "Known defects"]
            rest = test[match.end() :]
            named = [n for n in rows if re.match(n.lower().replace("-", "_?") + "_", rest)]
            assert len(named) == 1, f"{test} carries no id of its review"
            assert (path, test) in TEST.findall(rows[named[0]]), f"{test} is not listed"
            carrying += 1
    assert carrying > 150
