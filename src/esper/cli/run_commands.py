"""`esper compare` and `esper query`: what they do once their words are understood."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper.observatory.comparison import compare_runs, comparison_table
from esper.observatory.query import query


def show_comparison(runs: list[str]) -> None:
    Console().print(comparison_table(compare_runs([Path(run) for run in runs])))


def show_query(run: str, sql: str) -> None:
    answer = query(Path(run), sql)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in answer.columns:
        table.add_column(escape(column), overflow="fold")
    for row in answer.rows:
        table.add_row(*("" if value is None else escape(str(value)) for value in row))
    Console().print(table)
