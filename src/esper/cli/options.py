"""How functions become commands: every field of their settings is a flag; trackers as a flag."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from esper.cli.printing import FLAGS, Output
from esper.leyline import ConfigError
from esper.leyline.growth_settings import user_settings

# Options that are paths. An empty one would be the current folder.
PATHS = ("out", "config", "settings", "resume", "warm_start", "run", "runs", "folder", "episodes")

if TYPE_CHECKING:
    from esper.ray import Cluster


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    min: int | None = None,
    max: int | None = None,
    **notes: Any,
) -> Any:
    """A field that is an option with its name and type. A default of `...` means required. `notes`
    are kept in the field's metadata."""
    info = typer.Option(*([flag] if flag else []), min=min, max=max, help=help)
    metadata = {"option": info, **notes}
    return field(default=MISSING if default is ... else default, metadata=metadata)


def growth_options(*, without: Sequence[str] = ()) -> Any:
    """A field with the growth settings that were given as flags, by dotted name. Every setting that
    users can change is a flag, except those in `without`."""
    return field(default_factory=dict, metadata={"growth": tuple(without)})


def _growth_flags(without: Sequence[str]) -> dict[str, Parameter]:
    """The flags, by the dotted name of their setting."""
    found = {}
    for dotted, hint, item in user_settings():
        if dotted not in without:
            info = typer.Option(
                help=item.metadata["help"], min=item.metadata["least"], max=item.metadata["most"]
            )
            kinds = [kind for kind in (hint, *get_args(hint)) if kind in (bool, int, float)]
            kind = (kinds[0] if kinds else str) | None
            flag = item.metadata["flag"] or dotted.rpartition(".")[2]
            found[dotted] = _flag(flag, None, Annotated[kind, info])
    return found


def _flag(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _settings_flags(settings: type) -> tuple[list[Parameter], dict[str, dict[str, Parameter]]]:
    """The flags of a dataclass of options, and those of its growth settings by field."""
    hints, flags, growth = get_type_hints(settings), [], {}
    for item in fields(settings):
        if "growth" in item.metadata:
            growth[item.name] = _growth_flags(item.metadata["growth"])
            continue
        default = Parameter.empty if item.default is MISSING else item.default
        flags.append(
            _flag(item.name, default, Annotated[hints[item.name], item.metadata["option"]])
        )
    return flags, growth


def as_command(run: Callable[..., None]) -> Callable[..., None]:
    """`run` as a function for typer. Its arguments are an `Output`, if it prints a result, which
    adds --quiet and --json; and one dataclass of options, or arguments for typer."""
    hints = get_type_hints(run, include_extras=True)
    given = [p.replace(annotation=hints[p.name]) for p in signature(run).parameters.values()]
    prints = bool(given) and given[0].annotation is Output
    flags, growth = given[prints:], dict[str, dict[str, Parameter]]()
    settings: Any = flags[0].annotation if flags and is_dataclass(flags[0].annotation) else None
    if settings is not None:
        flags, growth = _settings_flags(settings)

    def command(**values: Any) -> None:
        for name in PATHS:
            if "" in (given if isinstance(given := values.get(name), list) else [given]):
                raise ConfigError(f"{name} is empty; give a path")
        first = [Output(*(values.pop(name) for name in FLAGS))] if prints else []
        for name, own in growth.items():
            found = {dotted: values.pop(flag.name) for dotted, flag in own.items()}
            values[name] = {dotted: v for dotted, v in found.items() if v is not None}
        if settings is None:
            run(*first, **values)
        else:
            run(*first, settings(**values))

    flags = [flag.replace(kind=Parameter.KEYWORD_ONLY) for flag in flags]
    flags += [_flag(name, False, kind) for name, kind in FLAGS.items() if prints]
    flags += [flag for own in growth.values() for flag in own.values()]
    # typer reads the options from the signature.
    command.__signature__ = Signature(flags)  # type: ignore[attr-defined]
    command.__annotations__ = {flag.name: flag.annotation for flag in flags}
    command.__doc__ = run.__doc__
    return command


def add_command(app: typer.Typer, run: Callable[..., None], name: str | None = None) -> None:
    """Register `run` as a command, by default of its own name; its docstring is the help."""
    app.command(name or run.__name__.replace("_", "-"))(as_command(run))


SLOTS = (
    "Modules of the host after which it can grow, separated by commas, such as "
    "blocks.0,blocks.2. Default: the task's."
)
BATCH = "Examples in a batch of training. Default: the task's."
RAY = (
    "Train hosts on the Ray cluster at this address. auto: the cluster that runs on this machine; "
    "local: one that is started for this command. Changes only the speed."
)


def cluster_at(address: str | None, device: str | None) -> "AbstractContextManager[Cluster | None]":
    """A context manager that connects to the cluster; None without an address."""
    if address is None:
        return nullcontext()
    if device is not None:
        raise ConfigError("--ray uses the CPUs of the cluster; leave out --device")
    from esper.ray import Cluster

    return Cluster(address)


if TYPE_CHECKING:
    from esper.trackers import Tracker

TRACK = "Also write to a tracker, in the folder of the run: tensorboard, wandb or mlflow."


def open_tracker(kind: str, run: Path, name: str, config: Mapping[str, Any]) -> "Tracker":
    """The tracker of an arm or a policy of a run."""
    from esper.observatory.run_directory import TRACKED
    from esper.trackers import find_tracker

    return find_tracker(kind, run / TRACKED / kind, name.replace(" ", "-"), config)


def check_track(kind: str | None) -> None:
    """Raises ConfigError for a tracker that is not installed or not known."""
    if kind is not None:
        open_tracker(kind, Path(), "", {})
