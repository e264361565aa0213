"""SQL over a run directory: its .jsonl files as tables of a DuckDB that lives in memory."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.observatory.run_directory import EVENTS, METRICS, OUTCOMES

TABLES = {"events": EVENTS, "metrics": METRICS, "outcomes": OUTCOMES}


@dataclass(frozen=True)
class Answer:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def query(run: Path, sql: str) -> Answer:
    """The answer to one SELECT over the tables events, metrics and outcomes.

    The run is only read, and the query can reach nothing but the tables. Raises ConfigError, in a
    sentence, without DuckDB, for a folder that is no run, and for SQL that does not work.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise ConfigError(
            "queries need DuckDB; install it with: pip install 'esper-grow[query]'"
        ) from None
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
                raise ConfigError("a query is one SELECT; a run directory is only read")
            result = database.execute(statements[0])
            columns = tuple(column[0] for column in result.description)
            return Answer(columns, result.fetchall())
        except duckdb.Error as error:
            reason = " ".join(str(error).split("LINE ")[0].split())
            raise ConfigError(f"the query does not work: {reason}") from error


def _load(database: Any, table: str, path: Path) -> None:
    """A last line that is still being written is left out; a file without lines is no table."""
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
