"""Run directories and their views: terminal, picture, report, web page. Imports `leyline` only."""

from esper.observatory.explain import explain, explanation_in_words
from esper.observatory.formatting import in_words, is_listed
from esper.observatory.picture import draw_growth, growth_figure
from esper.observatory.query import query
from esper.observatory.report import write_report
from esper.observatory.run_directory import read_rows
from esper.observatory.runs import find_runs
from esper.observatory.summaries import compare_runs, run_as_json
