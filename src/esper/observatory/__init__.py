"""observatory: the one who watches and never touches.

The run directory and everything that is drawn from it: terminal, picture, report, web page.
Imports `leyline` only.
"""

from esper.observatory.comparison import compare_runs, comparison_table
from esper.observatory.evaluation import (
    arms_table,
    at_extra,
    comparisons_table,
    evaluation_folder,
    seeds_worth_table,
    write_evaluation,
)
from esper.observatory.explained import (
    EpisodeRecord,
    explanation,
    explanation_in_words,
    is_evaluation,
    read_episode,
    read_evaluated,
)
from esper.observatory.picture import draw_growth, growth_figure, require_matplotlib
from esper.observatory.query import query
from esper.observatory.report import write_report
from esper.observatory.retelling import Story, outcome_scalars, retell, scalars_of
from esper.observatory.run_directory import (
    ARMS,
    BEST_POLICY,
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    GROWN,
    METRICS,
    MODEL,
    PROFILE,
    TRACKED,
    RunDirectory,
    read_rows,
    write_summary,
)
from esper.observatory.runs import find_runs
from esper.observatory.serving import serve
from esper.observatory.story import in_words, is_told
from esper.observatory.summaries import run_as_json, runs_as_json, runs_table, show_run
from esper.observatory.terminal import (
    PhaseProgress,
    StepProgress,
    epoch_progress,
    growth_in_words,
    say,
    seeds_table,
    summary_table,
)
from esper.observatory.training_progress import RoundProgress
from esper.observatory.watching import watch

__all__ = [
    "ARMS",
    "BEST_POLICY",
    "CHECKPOINTS",
    "CONFIG",
    "EVENTS",
    "GROWN",
    "METRICS",
    "MODEL",
    "PROFILE",
    "TRACKED",
    "EpisodeRecord",
    "PhaseProgress",
    "RoundProgress",
    "RunDirectory",
    "StepProgress",
    "Story",
    "arms_table",
    "at_extra",
    "compare_runs",
    "comparison_table",
    "comparisons_table",
    "draw_growth",
    "epoch_progress",
    "evaluation_folder",
    "explanation",
    "explanation_in_words",
    "find_runs",
    "growth_figure",
    "growth_in_words",
    "in_words",
    "is_evaluation",
    "is_told",
    "outcome_scalars",
    "query",
    "read_episode",
    "read_evaluated",
    "read_rows",
    "require_matplotlib",
    "retell",
    "run_as_json",
    "runs_as_json",
    "runs_table",
    "say",
    "scalars_of",
    "seeds_table",
    "seeds_worth_table",
    "serve",
    "show_run",
    "summary_table",
    "watch",
    "write_evaluation",
    "write_report",
    "write_summary",
]
