"""What is tuned: the heuristic, or the training of a policy.

A subject plays one trial with settings that were chosen and reports validation scores as it goes;
nothing here reads test data.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from esper.api import one_thread, train_ppo
from esper.leyline import BLEND_NAMES, EpisodeOutcome
from esper.observatory import TRYING
from esper.simic.training import Hooks, TrainingConfig
from esper.tamiyo import HeuristicConfig, HeuristicController
from esper.tolaria import HostRecipe, TrialRules, make_env, play, settle
from esper.tuning.space import Chosen, Numbers, Setting, Words

# Told the number of a report, from 0, and the score; says whether the trial is to be given up.
Report = Callable[[int, float], bool]


@dataclass(frozen=True)
class Tried:
    """What a trial came to; None was not measured. `score` is of validation data."""

    score: float | None
    params: float | None
    train_macs: float | None


class Subject(Protocol):
    """reports   how often a trial reports, if nobody gives it up
    start     what the search starts from, by the names of `space`
    """

    @property
    def space(self) -> Sequence[Setting]: ...

    @property
    def start(self) -> Chosen: ...

    @property
    def reports(self) -> int: ...

    def settings(self, chosen: Chosen) -> Mapping[str, Any]:
        """All settings, flat, with those chosen in their places."""
        ...

    def play(self, chosen: Chosen, report: Report) -> Tried: ...


FIRST = "first_blueprint"  # in place of the rotation, which is turned until it comes first


@dataclass(frozen=True)
class Heuristic:
    """Hosts of all keys side by side, and how well they do in the mean."""

    base: HeuristicConfig
    task: str
    recipe: HostRecipe
    rules: TrialRules
    keys: tuple[int, ...]

    @property
    def space(self) -> tuple[Setting, ...]:
        return (
            Numbers("min_epochs_before_germinate", 0, max(1, self.rules.steps // 2)),
            Numbers("plateau_epochs_to_germinate", 0, 5),
            Numbers("cull_after_epochs_without_improvement", 1, 10),
            Numbers("cull_if_score_drops_by", 0.1, 10.0, log=True),
            Numbers("embargo_epochs_after_cull", 0, 10),
            Numbers("min_improvement_to_fossilize", 0.03, 3.0, log=True),
            Words("blend", BLEND_NAMES),
            Words(FIRST, self.base.blueprint_rotation),
        )

    @property
    def start(self) -> Chosen:
        return {**asdict(self.base), FIRST: self.base.blueprint_rotation[0]}

    @property
    def reports(self) -> int:
        return self.rules.steps

    def config(self, chosen: Chosen) -> HeuristicConfig:
        turned, own = self.base.blueprint_rotation, dict(chosen)
        if FIRST in own:
            at = turned.index(own.pop(FIRST))
            turned = turned[at:] + turned[:at]
        return replace(self.base, blueprint_rotation=turned, **own)

    def settings(self, chosen: Chosen) -> Mapping[str, Any]:
        return asdict(self.config(chosen))

    def play(self, chosen: Chosen, report: Report) -> Tried:
        controller = HeuristicController(self.config(chosen))
        with one_thread():
            env = make_env(self.recipe, self.keys, self.rules)

            def after_epoch() -> bool:
                assert env.situation is not None
                step = env.situation.step
                best = float(np.mean(env.situation.signals.best_val_score))
                return step == 0 or not report(step - 1, best)

            if not play(env, controller, after_epoch=after_epoch):
                raise KeyboardInterrupt
            everyone = np.ones(env.n_envs, dtype=bool)
            return _summed_up(settle(env, everyone, task=self.task, controller=controller.name))


def _summed_up(outcomes: Sequence[EpisodeOutcome]) -> Tried:
    scores = [outcome.val_score for outcome in outcomes if outcome.val_score is not None]
    return Tried(
        float(np.mean(scores)) if len(scores) == len(outcomes) else None,
        float(np.mean([outcome.params for outcome in outcomes])),
        float(np.mean([outcome.train_macs for outcome in outcomes])),
    )


@dataclass(frozen=True)
class Policy:
    """A training by PPO in a folder of the tuning's, which goes when it is over. Its score is the
    mean of the hosts of its last rounds, a quarter of them all."""

    base: TrainingConfig
    folder: Path
    workers: int | None = None

    @property
    def space(self) -> tuple[Setting, ...]:
        return (
            Numbers("ppo.learning_rate", 1e-4, 3e-3, log=True),
            Numbers("ppo.entropy_coef", max(0.01, self.base.ppo.entropy_coef_min), 0.3, log=True),
            Numbers("ppo.epochs", 1, 8),
            Numbers("ppo.clip_ratio", 0.1, 0.3),
            Numbers("ppo.gae_lambda", 0.9, 1.0),
            Numbers("ppo.value_coef", 0.01, 1.0, log=True),
        )

    @property
    def start(self) -> Chosen:
        return self.base.flat()

    @property
    def reports(self) -> int:
        return self.base.rounds

    def settings(self, chosen: Chosen) -> Mapping[str, Any]:
        return self.config(chosen).flat()

    def config(self, chosen: Chosen) -> TrainingConfig:
        own = {name.removeprefix("ppo."): value for name, value in chosen.items()}
        return replace(self.base, ppo=replace(self.base.ppo, **own))

    def play(self, chosen: Chosen, report: Report) -> Tried:
        rows: list[dict[str, Any]] = []
        over = False

        def on_round(number: int, row: dict[str, Any], timings: dict[str, Any]) -> None:
            nonlocal over
            rows.append(row)
            score = self._late(rows).score
            over = score is not None and report(number, score)

        out = self.folder / TRYING
        train_ppo(
            self.config(chosen),
            out,
            overwrite=True,
            workers=self.workers,
            hooks=Hooks(on_round=on_round, stop=lambda: over),
        )
        shutil.rmtree(out)
        return self._late(rows)

    def _late(self, rows: Sequence[Mapping[str, Any]]) -> Tried:
        late = rows[-max(1, self.base.rounds // 4) :]

        def mean(name: str) -> float | None:
            known = [row[name] for row in late if row[name] is not None]
            return float(np.mean(known)) if known else None

        return Tried(mean("val_score"), mean("params"), mean("train_macs"))
