"""A command is a function of one dataclass: every field with `option` is a flag of the command."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, Field, field, fields
from inspect import Parameter, Signature, signature
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
    """A field that is an option: its name and type are the field's, `...` for one that must be
    given. An option with `bare` can be given without a value, and then has that one. `notes` stay
    in the field's metadata."""
    info = typer.Option(*([flag] if flag else []), min=min, max=max, help=help, metavar=metavar)
    metadata = {"option": info, "bare": bare, **notes}
    return field(default=MISSING if default is ... else default, metadata=metadata)


def _grows(item: Field[Any]) -> bool:
    return "growth" in item.metadata


def with_values(words: Sequence[str], bare: Mapping[str, str]) -> Iterator[str]:
    """The words of a command; options that need none have their value, by their names."""
    for place, word in enumerate(words):
        yield word
        following = words[place + 1 : place + 2]
        if word in bare and (not following or following[0].startswith("--")):
            yield bare[word]


def growth_options(*, without: Sequence[str] = ()) -> Any:
    """A field with the growth settings that were given as flags, by dotted name: every setting that
    users can change is a flag, but for those `without`."""
    return field(default_factory=dict, metadata={"growth": tuple(without)})


def _growth_flags(without: Sequence[str]) -> dict[str, Parameter]:
    """The flags by dotted name of their setting."""
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


def add_command(app: typer.Typer, run: Callable[[Any], None]) -> None:
    """Register `run`, which takes a dataclass of options, by its name; its docstring is the help.

    `run` gets the dataclass, filled with what was given.
    """
    settings = next(iter(get_type_hints(run).values()))
    assert len(signature(run).parameters) == 1, f"{run.__name__} takes one dataclass"
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
    # What typer reads: a signature as if somebody had written all options out.
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
    "address on one that is started here. Changes nothing but the speed."
)


def cluster_at(address: str | None) -> "AbstractContextManager[Cluster | None]":
    """The cluster, connected in a `with`; None if there is to be none."""
    if address is None:
        return nullcontext()
    from esper.ray import Cluster

    return Cluster(address)
