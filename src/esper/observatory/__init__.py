"""observatory: the one who watches and never touches.

The run directory and everything that is drawn from it: terminal, picture. Imports `leyline` only.
"""

from esper.observatory.picture import draw_growth
from esper.observatory.run_directory import RunDirectory, read_rows, write_summary
from esper.observatory.terminal import (
    PhaseProgress,
    StepProgress,
    place,
    say,
    seeds_table,
    summary_table,
)

__all__ = [
    "PhaseProgress",
    "RunDirectory",
    "StepProgress",
    "draw_growth",
    "place",
    "read_rows",
    "say",
    "seeds_table",
    "summary_table",
    "write_summary",
]
