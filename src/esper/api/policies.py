"""Policies of training runs: exported for other users, and evaluated on validation hosts."""

from dataclasses import dataclass, replace
from pathlib import Path

from esper.api.checks import checked
from esper.leyline import ConfigError
from esper.leyline.policy_card import PolicyCard, check_policy_name
from esper.leyline.sealed import write_sealed
from esper.observatory.run_directory import BEST_POLICY
from esper.proof.families import validation_score
from esper.simic.training.checkpoint import load_state
from esper.simic.training.config import TrainingConfig
from esper.simic.training.policy_controller import LearnedController
from esper.simic.training.policy_folder import card_of, policy_files, write_policy
from esper.simic.training.state import TrainState
from esper.simic.training.versions import VERSION
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.families.base import Family


@checked()
def export_policy(run: str | Path, name: str, out: str | Path) -> tuple[Path, PolicyCard]:
    """Write the newest policy of a run to the folder `out`/`name`: its weights, and a card with
    facts about the run. Raises ConfigError if the run has no policy, or if the folder exists."""
    check_policy_name(name)
    state, folder = load_state(run), Path(out) / name
    card = card_of(state, name, _episodes(state))
    try:
        write_policy(folder, state, card)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error
    return folder, card


def _episodes(state: TrainState) -> int | None:
    """How many episodes the policy was trained on; None if that is not known."""
    if state.round > 0:
        return state.round * int(state.settings["envs"])
    return state.settings.get("episodes")


@dataclass(frozen=True)
class ValidationHosts:
    """The validation hosts of a family, for the training run in the folder `run`."""

    config: TrainingConfig
    family: Family
    data: DataSplits
    run: Path

    def score(self, state: TrainState) -> float:
        """The mean score with the policy's most probable actions."""
        kind = self.config.growth.population
        assert kind != "auto", "a run has chosen its population"
        controller = LearnedController(state)
        return validation_score(self.family, controller, self.data, data_root(), population=kind)

    def keep(self, state: TrainState) -> None:
        """Write the policy to the folder `best` of the run. Raises ConfigError, and keeps the
        previous one, if it cannot be written."""
        assert state.best is not None, "only a policy that was validated can be the best"
        card = card_of(state, BEST_POLICY, state.round * self.config.envs)
        evaluated = f"validation hosts of {self.family.name}: {state.best.score:.2f}"
        files = policy_files(state, replace(card, evaluated=evaluated))
        folder = self.run / BEST_POLICY
        try:
            write_sealed(folder, files, VERSION)
        except OSError as error:
            raise ConfigError(
                f"{folder} could not be written: {error.strerror or error}; free some disk space "
                f"and continue with --resume {self.run}"
            ) from error
