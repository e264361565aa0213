"""What a policy in training is worth on hosts that it does not learn from; the best one is kept."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from esper.leyline import ConfigError
from esper.leyline.sealed import write_sealed
from esper.observatory.run_directory import BEST_POLICY
from esper.proof.families import validation_score
from esper.simic.training.config import TrainingConfig
from esper.simic.training.policy_controller import LearnedController
from esper.simic.training.policy_folder import FORMAT, card_of, policy_files
from esper.simic.training.state import TrainState
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.families.base import Family
from esper.tolaria.fused.choice import PopulationKind


@dataclass(frozen=True)
class Unseen:
    """The validation hosts of a family, for the training run in the folder `run`."""

    config: TrainingConfig
    family: Family
    data: DataSplits
    run: Path

    def score(self, state: TrainState) -> float:
        """Of the policy by its most probable actions."""
        kind = cast(PopulationKind, self.config.population)
        controller = LearnedController(state)
        return validation_score(self.family, controller, self.data, data_root(), population=kind)

    def keep(self, state: TrainState) -> None:
        """Its policy is the folder `best` of the run from now on. Raises ConfigError if the disk
        does not take it; then the one before is still there."""
        assert state.best is not None, "only what was validated can be the best"
        card = card_of(state, BEST_POLICY, state.round * self.config.envs)
        told = f"validation hosts of {self.family.name}: {state.best.score:.2f}"
        folder, files = self.run / BEST_POLICY, policy_files(state, replace(card, evaluated=told))
        try:
            write_sealed(folder, files, FORMAT)
        except OSError as error:
            raise ConfigError(
                f"{folder} could not be written: {error.strerror or error}; make room and go on "
                f"with --resume {self.run}"
            ) from error
