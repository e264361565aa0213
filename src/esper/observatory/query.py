"""SQL over a run directory: its .jsonl files as tables of an in-memory DuckDB."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.observatory.run_directory import EVENTS, METRICS, OUTCOMES

TABLES = {"events": EVENTS, "metrics": METRICS, "outcomes": OUTCOMES}
ROWS, SECONDS = 1000, 60.0


@dataclass(frozen=True)
class Answer:
    """`complete` is False if there are more rows than the limit."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    complete: bool = True


def query(run: Path, sql: str, *, limit: int = ROWS, timeout: float = SECONDS) -> Answer:
    """The first `limit` rows of one SELECT over the tables events, metrics and outcomes.

    The query can read nothing but these tables. Raises ConfigError if DuckDB is not installed, the
    folder is no run, or the SQL is wrong or takes longer than `timeout` seconds.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise ConfigError(
            "queries need DuckDB; install it with: pip install 'esper-grow[query]'"
        ) from None
    if limit < 1 or not timeout > 0:
        raise ConfigError(
            f"limit and timeout must be above 0, got limit={limit} and timeout={timeout}"
        )
    if not any((run / name).is_file() for name in TABLES.values()):
        raise ConfigError(f"{run} is not a run directory: it has none of {', '.join(TABLES)}")
    with duckdb.connect(":memory:") as database:
        for table, name in TABLES.items():
            _load(database, table, run / name)
        database.execute("SET enable_external_access = false")
        database.execute("SET lock_configuration = true")
        try:
            statements = duckdb.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise ConfigError("a query must be one SELECT; a run directory is read-only")
            return _within(timeout, database, lambda: _answer(database, statements[0], limit))
        except duckdb.Error as error:
            reason = " ".join(str(error).split("LINE ")[0].split())
            raise ConfigError(f"the query failed: {reason}") from error


def _answer(database: Any, statement: Any, limit: int) -> Answer:
    result = database.execute(statement)
    columns = tuple(column[0] for column in result.description)
    rows = result.fetchmany(limit + 1)
    return Answer(columns, rows[:limit], complete=len(rows) <= limit)


def _within(seconds: float, database: Any, ask: Callable[[], Answer]) -> Answer:
    """The result of `ask`, which is interrupted by the timeout and by Ctrl-C."""
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask)
        try:
            return asked.result(seconds)
        except TimeoutError:
            raise ConfigError(
                f"the query took longer than {seconds:g} seconds; simplify it or raise --timeout"
            ) from None
        finally:
            # Leaving the block waits for the thread, so it has to end.
            while not asked.done():
                # Only a query that has begun can be interrupted, hence the repetition.
                database.interrupt()
                with suppress(TimeoutError):
                    asked.exception(0.02)


def _load(database: Any, table: str, path: Path) -> None:
    """Load the complete lines of a file; a file without lines makes no table."""
    import duckdb

    data = path.read_bytes() if path.is_file() else b""
    complete = data[: data.rfind(b"\n") + 1]
    if not complete:
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "rows.jsonl"
        copy.write_bytes(complete)
        try:
            database.execute(
                f"CREATE TABLE {table} AS SELECT * FROM read_json("
                "?, format = 'newline_delimited', sample_size = -1)",
                [str(copy)],
            )
        except duckdb.Error as error:
            raise ConfigError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
