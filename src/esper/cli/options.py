"""A command is a function of one dataclass; every field made with `option` is a flag."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, Field, field, fields, is_dataclass
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from esper.leyline.growth_settings import user_settings

if TYPE_CHECKING:
    from esper.ray import Cluster


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    min: int | None = None,
    max: int | None = None,
    bare: str | None = None,
    metavar: str | None = None,
    **notes: Any,
) -> Any:
    """A field that is an option with its name and type. A default of `...` means required. An
    option with `bare` may be given without a value, and then has that value. `notes` are kept in
    the field's metadata."""
    info = typer.Option(*([flag] if flag else []), min=min, max=max, help=help, metavar=metavar)
    metadata = {"option": info, "bare": bare, **notes}
    return field(default=MISSING if default is ... else default, metadata=metadata)


def _grows(item: Field[Any]) -> bool:
    return "growth" in item.metadata


def with_values(words: Sequence[str], bare: Mapping[str, str]) -> Iterator[str]:
    """The words of a command, with the `bare` value added to options given without one."""
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        yield word
        if word in bare and following.startswith("--"):
            yield bare[word]


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
            found[dotted] = Parameter(
                flag, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
            )
    return found


def add_command(app: typer.Typer, run: Callable[..., None], name: str | None = None) -> None:
    """Register `run` as a command, by default of its own name; its docstring is the help. Its
    arguments are one dataclass of options, or those of a function for typer."""
    settings = next(iter(get_type_hints(run).values()))
    if not (isinstance(settings, type) and is_dataclass(settings)):
        app.command(name)(run)
        return
    hints = get_type_hints(settings)
    growth = {f.name: _growth_flags(f.metadata["growth"]) for f in fields(settings) if _grows(f)}

    def command(**given: Any) -> None:
        for name, flags in growth.items():
            values = {dotted: given.pop(flag.name) for dotted, flag in flags.items()}
            given[name] = {dotted: v for dotted, v in values.items() if v is not None}
        run(settings(**given))

    options = [
        Parameter(
            item.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if item.default is MISSING else item.default,
            annotation=Annotated[hints[item.name], item.metadata["option"]],
        )
        for item in fields(settings)
        if not _grows(item)
    ]
    options += [flag for flags in growth.values() for flag in flags.values()]
    # typer reads the options from the signature.
    command.__signature__ = Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {item.name: item.annotation for item in options}
    named = {f"--{item.name}": item.metadata.get("bare") for item in fields(settings)}
    bare = {name: value for name, value in named.items() if value is not None}

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, list(with_values(args, bare)))

    app.command(run.__name__.replace("_", "-"), cls=Command, help=run.__doc__)(command)


RAY = (
    "Train hosts on the Ray cluster at this address (auto: the one of this machine); without an "
    "address a local one is started. Changes only the speed."
)


def cluster_at(address: str | None) -> "AbstractContextManager[Cluster | None]":
    """A context manager that connects to the cluster; None without an address."""
    if address is None:
        return nullcontext()
    from esper.ray import Cluster

    return Cluster(address)
