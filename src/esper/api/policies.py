"""Policies to be given to others: exported from the runs that trained them."""

import tomllib
from pathlib import Path

from esper.api.checks import checked
from esper.leyline import ConfigError
from esper.leyline.policy_card import PolicyCard, check_policy_name
from esper.observatory.run_directory import CONFIG
from esper.simic.training.checkpoint import load_state
from esper.simic.training.policy_folder import card_of, write_policy
from esper.simic.training.state import TrainState


@checked()
def export_policy(run: str | Path, name: str, out: str | Path) -> tuple[Path, PolicyCard]:
    """Write the newest policy of a run into the folder `out`/`name`: its weights, and a card with
    what the run knows. Raises ConfigError if there is no policy, or such a folder already."""
    check_policy_name(name)
    state, folder = load_state(run), Path(out) / name
    card = card_of(state, name, _episodes(Path(run), state))
    try:
        write_policy(folder, state, card)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error
    return folder, card


def _episodes(run: Path, state: TrainState) -> int | None:
    """How many were played or imitated for it, where that is known."""
    if state.round > 0:
        return state.round * int(state.settings["envs"])
    try:
        found = tomllib.loads((run / CONFIG).read_text(encoding="utf-8")).get("episodes")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, int) else None
