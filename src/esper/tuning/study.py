"""The search: Optuna says what to try next and what to give up, the run directory remembers.

The rows of the run are all there is: a study is made of them anew, and what is drawn for a trial is
a function of the key and of its number, so a search that was killed goes on as if it had not been.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from esper.leyline import draw_key
from esper.observatory import BEST, RunDirectory, best_trial, write_settings
from esper.tuning.space import Setting, Words
from esper.tuning.subjects import Subject

Row = dict[str, Any]
COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"
STATES = {COMPLETE: TrialState.COMPLETE, PRUNED: TrialState.PRUNED, FAILED: TrialState.FAIL}
# Trials that are drawn at random before the others say more, and those that none is compared with.
FIRST_RANDOM, FIRST_WHOLE = 10, 5


@dataclass(frozen=True)
class Hearing:
    """on_report  the number of a trial, and how many reports it has made
    on_trial   the row of a trial that is over
    """

    on_report: Callable[[int, int], None] = lambda trial, reports: None
    on_trial: Callable[[Row], None] = lambda row: None


def search(
    subject: Subject,
    space: Sequence[Setting],
    record: RunDirectory,
    rows: Sequence[Row],
    *,
    trials: int,
    key: int,
    prune: bool,
    hearing: Hearing,
) -> list[Row]:
    """The rows of all trials, those that were there already first."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {setting.name: _distribution(setting) for setting in space}
    study = _study(subject.reports, prune)
    done = list(rows)
    for row in done:
        study.add_trial(_remembered(row, distributions))
    if (found := best_trial(done)) is not None:
        _keep(record, subject, found, distributions)  # a kill may have come between
    if not done:
        study.enqueue_trial({name: subject.start[name] for name in distributions})
    while len(done) < trials:
        began, number = time.perf_counter(), len(done)
        study.sampler = _sampler(key, number)
        row = _try(subject, study.ask(distributions), study, hearing)
        record.begin_round(number)
        record.metrics(row)
        record.timing({"seconds": time.perf_counter() - began})
        done.append({"round": number, **row})
        if best_trial(done) is done[-1]:
            _keep(record, subject, done[-1], distributions)
        hearing.on_trial(done[-1])
    return done


def _keep(
    record: RunDirectory, subject: Subject, row: Mapping[str, Any], names: Iterable[str]
) -> None:
    write_settings(record.path, BEST, subject.settings({name: row[name] for name in names}))


def _study(reports: int, prune: bool) -> optuna.Study:
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if prune:
        # The first half of a trial says little: most of growth is still to come.
        pruner = optuna.pruners.MedianPruner(FIRST_WHOLE, n_warmup_steps=reports // 2)
    return optuna.create_study(direction="maximize", pruner=pruner)


def _sampler(key: int, number: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(
        n_startup_trials=FIRST_RANDOM, seed=draw_key(key, "tune", number) % 2**32
    )


def _distribution(setting: Setting) -> BaseDistribution:
    if isinstance(setting, Words):
        return CategoricalDistribution(setting.options)
    if isinstance(setting.low, int) and isinstance(setting.high, int):
        return IntDistribution(setting.low, setting.high, log=setting.log)
    return FloatDistribution(setting.low, setting.high, log=setting.log)


def _remembered(
    row: Mapping[str, Any], distributions: Mapping[str, BaseDistribution]
) -> optuna.trial.FrozenTrial:
    state = STATES[row["state"]]
    return optuna.trial.create_trial(
        state=state,
        value=None if state is TrialState.FAIL else row["val_score"],
        params={name: row[name] for name in distributions},
        distributions=dict(distributions),
        intermediate_values=dict(enumerate(row["scores"])),
    )


def _try(subject: Subject, trial: optuna.Trial, study: optuna.Study, hearing: Hearing) -> Row:
    scores: list[float] = []
    over = False

    def report(number: int, score: float) -> bool:
        nonlocal over
        scores.append(score)
        trial.report(score, number)
        hearing.on_report(trial.number, number + 1)
        # At its last report a trial is complete.
        over = number + 1 < subject.reports and trial.should_prune()
        return over

    tried = subject.play(trial.params, report)
    state = PRUNED if over else COMPLETE if tried.score is not None else FAILED
    score = scores[-1] if over else tried.score
    if state == PRUNED:
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, score, state=STATES[state])
    return {
        "kind": "trial",
        "state": state,
        "val_score": score,
        "params": tried.params,
        "train_macs": tried.train_macs,
        **trial.params,
        "scores": scores,
    }
