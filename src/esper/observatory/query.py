"""SQL over a run directory: its .jsonl files as tables of an in-memory DuckDB."""

import importlib.util
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
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
    if importlib.util.find_spec("duckdb") is None:
        raise ConfigError("queries need DuckDB; install it with: pip install 'esper-grow[query]'")
    if limit < 1 or not 0 < timeout <= threading.TIMEOUT_MAX:
        raise ConfigError(
            f"limit and timeout must be above 0, got limit={limit} and timeout={timeout}"
        )
    if not any((run / name).is_file() for name in TABLES.values()):
        raise ConfigError(f"{run} is not a run directory: it has none of {', '.join(TABLES)}")
    # DuckDB cannot interrupt every function, so the query runs in a process that can be killed.
    command = [sys.executable, "-P", "-c", PROCESS, *sys.path]
    question = pickle.dumps((run, sql, limit, timeout))
    try:
        done = subprocess.run(
            command, input=question, capture_output=True, timeout=timeout, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the query took longer than {timeout:g} seconds; simplify it or raise --timeout"
        ) from None
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").splitlines()
        reason = lines[-1] if lines else f"its process ended with code {done.returncode}"
        raise ConfigError(f"the query failed: {reason}")
    answer = pickle.loads(done.stdout)
    if isinstance(answer, str):
        raise ConfigError(answer)
    return Answer(*answer)


# The arguments are the folders from which the first process imports.
PROCESS = "import sys; sys.path[:] = sys.argv[1:]; from esper.observatory.query import main; main()"


def main() -> None:
    """Answer the question on stdin: an error is a text."""
    run, sql, limit, timeout = pickle.load(sys.stdin.buffer)
    # Should the first process be killed, this one ends by itself.
    signal.setitimer(signal.ITIMER_REAL, timeout + 5)
    try:
        answer: object = _answer(run, sql, limit)
    except ConfigError as error:
        answer = str(error)
    pickle.dump(answer, sys.stdout.buffer)


def _answer(run: Path, sql: str, limit: int) -> tuple[Any, ...]:
    """The fields of an `Answer`."""
    import duckdb

    with duckdb.connect(":memory:") as database:
        for table, name in TABLES.items():
            _load(database, table, run / name)
        database.execute("SET enable_external_access = false")
        database.execute("SET lock_configuration = true")
        try:
            statements = duckdb.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise ConfigError("a query must be one SELECT; a run directory is read-only")
            result = database.execute(statements[0])
            columns = tuple(column[0] for column in result.description)
            rows = result.fetchmany(limit + 1)
            return columns, rows[:limit], len(rows) <= limit
        except (duckdb.Error, MemoryError) as error:
            reason = " ".join(str(error).split("LINE ")[0].split())
            raise ConfigError(f"the query failed: {reason}") from error


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
