"""A flag is one edit: a field of the dataclass that a command takes."""

from dataclasses import dataclass, fields

import pytest
import typer
from typer.testing import CliRunner

from esper.cli.grow_command import GrowSettings
from esper.cli.options import add_command, option
from esper.cli.train_command import PPOSettings
from esper.simic.training.config import TrainingConfig, load_config


@dataclass(frozen=True)
class Colourful(GrowSettings):
    """The settings of a command, with one more."""

    colour: str = option("green", "What the seeds look like.")


@dataclass(frozen=True)
class Everything:
    names: list[str] = option(..., "Who comes.")  # noqa: RUF009
    count: int = option(3, "How many.", min=1)
    share: float | None = option(None, "How much.")
    loud: bool = option(False, "Whether it is heard.")
    source: str = option("a", "From where.", flag="--from")


def run(app: typer.Typer, *words: str) -> str:
    result = CliRunner().invoke(app, words, terminal_width=200, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def app_of(settings: type) -> tuple[typer.Typer, list]:
    """A command that only remembers what it was given."""
    app, given = typer.Typer(rich_markup_mode="rich"), []

    def remember(value):
        """Remember what was given."""
        given.append(value)

    remember.__annotations__ = {"value": settings, "return": None}
    add_command(app, remember)
    return app, given


def test_a_field_more_is_an_option_more() -> None:
    app, given = app_of(Colourful)
    shown = run(app, "--help")
    for words in ("Remember what was given.", "--colour", "What the seeds look like.", "green"):
        assert words in shown
    run(app, "--colour", "red", "--max-params", "1.5")
    run(app)
    assert given == [Colourful(colour="red", growth={"budget.params": 1.5}), Colourful()]


def test_options_have_the_types_defaults_and_flags_of_their_fields() -> None:
    app, given = app_of(Everything)
    run(app, "--names", "x", "--names", "y", "--from", "b", "--loud", "--share", "0.5")
    run(app, "--names", "x", "--no-loud")
    assert given == [
        Everything(["x", "y"], 3, 0.5, True, "b"),
        Everything(["x"], 3, None, False, "a"),
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "'--names'"),
        (["--names", "x", "--count", "0"], "'--count'"),
        (["--names", "x", "--share", "much"], "'--share'"),
        (["--names", "x", "--source", "b"], "No such option"),
        (["--names", "x", "y[/]z"], "y[/]z"),
    ],
)
def test_bad_usage_is_exit_code_two_and_says_why(words: list[str], complaint: str) -> None:
    app, given = app_of(Everything)
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert complaint in result.output
    assert given == []


def test_every_flag_of_a_training_setting_reaches_that_setting() -> None:
    """Each one alone, with another value than the default; nothing but it changes."""
    defaults = load_config().flat()
    other = {"task": "pydocs", "reward_mode": "shaped"}
    other |= {"warm_start": "runs/x", "ppo.gamma": 0.9, "ppo.learning_rate": 0.5}
    other |= {"slots": "blocks.1", "group": 8, "network.kind": "set", "family": "digits:mixed"}
    flags = [f for f in fields(PPOSettings) if "setting" in f.metadata]
    assert len(flags) == 15
    for flag in flags:
        name = flag.metadata["setting"]
        assert name in TrainingConfig().flat()
        value = other.get(name, 7)
        given = PPOSettings(**{flag.name: value}).given()
        assert given == {name: value}
        assert load_config(None, given).flat()[name] == value != defaults[name]
    assert PPOSettings().given() == {}
