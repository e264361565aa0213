"""Tune from Python: what is searched, and the record of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from esper.leyline import ConfigError
from esper.leyline.settings import check_types, read_toml
from esper.observatory import BASE, CONFIG, HISTORY, RunDirectory, read_trials, write_settings
from esper.proof import FIRST_TUNING_KEY
from esper.simic.training import TrainingConfig, load_config
from esper.tamiyo import HeuristicConfig
from esper.tolaria import Budget, TrialRules, choose_population, data_root, find_task
from esper.tuning.space import searched
from esper.tuning.study import Hearing, Row, search
from esper.tuning.subjects import Heuristic, Policy, Subject

What = Literal["heuristic", "ppo"]
COMMAND = "tune"
# Settings that a training has in its base.
OF_THE_HEURISTIC = ("keys", "steps", "max_params", "max_macs")


@dataclass(frozen=True)
class Plan:
    """A search.

    what        heuristic: how the heuristic grows hosts; ppo: how a policy is trained
    settings    the names of those that are searched; none: all that can be
    prune       give up trials that are worse than most were at the same point
    keys        of the heuristic: on how many hosts each trial is played, always the same ones,
                which no evaluation uses
    steps, max_params, max_macs   of the heuristic, as in `esper grow`
    """

    what: What = "heuristic"
    task: str = "digits"
    trials: int = 50
    key: int = 0
    settings: tuple[str, ...] = ()
    prune: bool = True
    keys: int = 8
    steps: int | None = None
    max_params: float | None = None
    max_macs: float | None = None

    def __post_init__(self) -> None:
        if self.what not in get_args(What):
            raise ConfigError(f"heuristic or ppo can be tuned, got {self.what!r}")
        for name in ("trials", "keys"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in OF_THE_HEURISTIC if self.what == "ppo" else ():
            if getattr(self, name) != getattr(Plan, name):
                raise ConfigError(f"{name} is of the heuristic; a training takes it from its file")

    def flat(self) -> dict[str, Any]:
        """As the run's config.toml has it."""
        own = {name: value for name, value in asdict(self).items() if name != "what"}
        return {"command": COMMAND, "controller": self.what, **own}


Base = HeuristicConfig | TrainingConfig


def tune(
    plan: Plan,
    out: str | Path,
    base: Base | None = None,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    hearing: Hearing | None = None,
) -> list[Row]:
    """A row for each trial. `base` has the settings that are not searched, and those that the first
    trial is played with: of the heuristic its defaults, of a training those of the task."""
    out = Path(out)
    base = _base(plan, base)
    subject = make_subject(plan, base, out, workers)
    searched(subject.space, plan.settings, subject.start)
    with RunDirectory.create(out, plan.flat(), overwrite=overwrite) as record:
        write_settings(out, BASE, subject.settings({}))
        return _go_on(plan, subject, record, [], hearing)


def resume(
    out: str | Path,
    *,
    trials: int | None = None,
    workers: int | None = None,
    hearing: Hearing | None = None,
) -> list[Row]:
    """Go on with a search, up to `trials` if given; a trial that was under way is played again."""
    out = Path(out)
    plan = plan_of(out, trials)
    with RunDirectory(out) as record:
        base = load_base(plan, out / BASE)
        rows = read_trials(out)
        sizes = {name: _whole_lines(out / name) for name in HISTORY}
        record.go_on(plan.flat(), sizes, len(rows))
        return _go_on(plan, make_subject(plan, base, out, workers), record, rows, hearing)


def _go_on(
    plan: Plan,
    subject: Subject,
    record: RunDirectory,
    rows: Sequence[Row],
    hearing: Hearing | None,
) -> list[Row]:
    space = searched(subject.space, plan.settings, subject.start)
    for row in rows:
        missing = [setting.name for setting in space if setting.name not in row]
        if missing:
            raise ConfigError(
                f"{record.path} was begun without {missing[0]} among what is searched; put "
                f"{CONFIG} back as it was, or begin anew"
            )
    return search(
        subject,
        space,
        record,
        rows,
        trials=plan.trials,
        key=plan.key,
        prune=plan.prune,
        hearing=hearing or Hearing(),
    )


def plan_of(run: Path, trials: int | None = None) -> Plan:
    """The plan of a run directory, up to `trials` if given. Raises ConfigError if it is of no
    search, or cannot be read."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run} is not the folder of a search: it has no {CONFIG}")
    given = read_toml(run / CONFIG)
    if given.pop("command", None) != COMMAND or not (run / BASE).is_file():
        raise ConfigError(f"{run} holds no search to go on with; leave --resume out")
    given["what"] = given.pop("controller", None)
    known = {name: given[name] for name in (f.name for f in fields(Plan)) if name in given}
    check_types(known, Plan, "")
    plan = Plan(**{**known, "settings": tuple(known.get("settings", ()))})
    return plan if trials is None else replace(plan, trials=trials)


def load_base(plan: Plan, path: Path) -> Base:
    if plan.what == "heuristic":
        return HeuristicConfig.load(path)
    return load_config(path, presets=False)


def _base(plan: Plan, base: Base | None) -> Base:
    if plan.what == "heuristic":
        base = HeuristicConfig() if base is None else base
        wanted: type = HeuristicConfig
    else:
        base = load_config(None, {"task": plan.task, "key": plan.key}) if base is None else base
        wanted = TrainingConfig
    if not isinstance(base, wanted):
        raise ConfigError(f"to tune {plan.what} takes a {wanted.__name__} as its base")
    return base


def make_subject(plan: Plan, base: Base, out: Path, workers: int | None = None) -> Subject:
    """Everything that can be wrong is found here."""
    if isinstance(base, TrainingConfig):
        return Policy(base, out, workers)
    task = find_task(plan.task)
    recipe = task.recipe(task.load(data_root()))
    rules = TrialRules(
        plan.steps or task.steps,
        budget=Budget(params=plan.max_params, macs=plan.max_macs),
        schedule=task.schedule,
        population=choose_population(recipe, plan.keys),
    )
    keys = tuple(range(FIRST_TUNING_KEY, FIRST_TUNING_KEY + plan.keys))
    return Heuristic(base, task.name, recipe, rules, keys)


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last line; a kill may have left a part of one behind it."""
    return path.read_bytes().rfind(b"\n") + 1 if path.is_file() else 0
