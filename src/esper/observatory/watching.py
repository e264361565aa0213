"""The door to `esper watch`, which needs Textual only when it is used."""

from pathlib import Path

from esper.leyline import ConfigError
from esper.observatory.runs import is_run, look_at


def watch(folder: Path) -> None:
    """Show a run in the terminal until it is left with q.

    Raises ConfigError, in a sentence, for a folder that is no run, and without Textual.
    """
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run")
    if look_at(folder).kind == "evaluation":
        raise ConfigError(f"{folder} is an evaluation; see it with esper show, report or serve")
    try:
        from esper.observatory.watch_app import WatchApp
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"watching needs {error.name}; install it with: pip install 'esper-grow[watch]'"
        ) from None
    WatchApp(folder).run()
