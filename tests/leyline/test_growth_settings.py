"""One object holds all growth settings, and a new setting is one new field."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path

import pytest

import esper
from esper.leyline import ConfigError
from esper.leyline.growth_settings import (
    Budget,
    GrowthSettings,
    RateSchedule,
    user_settings,
)

SOURCE = Path(esper.__file__).parent


def test_grow_has_few_parameters() -> None:
    """Sixteen, and `depth` beside `slots`; all others are settings."""
    assert len(signature(esper.grow).parameters) <= 17


def test_flat_settings_make_the_same_object_again() -> None:
    own = GrowthSettings(
        7, "trained", budget=Budget(params=1.5), schedule=RateSchedule(0.1, 0.2), max_seeds=2
    )
    flat = {name: value for name, value in own.flat().items() if value is not None}
    assert GrowthSettings().updated(flat) == own
    assert own.flat()["budget.params"] == 1.5


def test_tables_and_dotted_names_mean_the_same() -> None:
    dotted = GrowthSettings().updated({"budget.params": 2.0, "schedule.decay": 0.5})
    assert dotted == GrowthSettings().updated(
        {"budget": {"params": 2.0}, "schedule": {"decay": 0.5}}
    )
    # What is not named stays.
    assert dotted.updated({"budget.macs": 3.0}).budget == Budget(2.0, 3.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"incubation": "sudden"}, "incubation must be .*'sudden'"),
        ({"population": "big"}, "population must be .*'big'"),
        ({"max_seeds": 0}, "max_seeds must be at least 1, got 0"),
        ({"max_seeds": 1.5}, "max_seeds must be a whole number"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be a number above 0"),
        ({"max_time": 0.0}, "max_time must be a number above 0"),
        ({"budget.size": 1.5}, "no setting budget.size"),
        ({"incubatoin": "joint"}, "no setting incubatoin; did you mean incubation"),
        ({"steps.most": 3}, "steps is one value, not a table"),
        ({"schedule.decay": 1.5}, "decay must be"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GrowthSettings().updated(given)


def test_a_trained_network_has_other_defaults() -> None:
    fresh, trained = GrowthSettings(3), GrowthSettings(3, "trained")
    assert (fresh.seeds_incubate, fresh.cools, fresh.rates) == ("isolated", False, None)
    assert (trained.seeds_incubate, trained.cools) == ("joint", True)
    assert trained.rates == RateSchedule(0.1, 0.5)
    plain = replace(trained, incubation="isolated", cooling=False, schedule=RateSchedule())
    assert (plain.seeds_incubate, plain.cools, plain.rates) == ("isolated", False, None)


def test_every_setting_of_users_has_a_sentence_and_its_own_flag() -> None:
    found = list(user_settings())
    assert {name.partition(".")[0] for name, _, _ in found} <= {
        f.name for f in fields(GrowthSettings)
    }
    flags = [item.metadata["flag"] or name.rpartition(".")[2] for name, _, item in found]
    assert len(set(flags)) == len(flags)
    assert all(item.metadata["help"].endswith(".") for _, _, item in found)


@pytest.fixture(scope="module")
def with_one_more_field(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package in which one line was added: a setting."""
    root = tmp_path_factory.mktemp("package")
    shutil.copytree(SOURCE, root / "esper", ignore=shutil.ignore_patterns("__pycache__"))
    path = root / "esper" / "leyline" / "growth_settings.py"
    line = '    colour: str = setting("blue", "Colour of the network.")\n'
    path.write_text(path.read_text().replace("    insured: bool", f"{line}    insured: bool", 1))
    return root


def run(root: Path, folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "esper", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)


def test_a_new_field_is_a_flag_a_line_of_toml_and_in_the_record(
    with_one_more_field: Path, tmp_path: Path
) -> None:
    help_text = run(with_one_more_field, tmp_path, "grow", "--help")
    assert re.search(r"--colour.*Colour of the network\.", help_text)
    short = ("grow", "--steps", "1", "--no-compare", "--quiet")
    run(with_one_more_field, tmp_path, *short, "--colour", "red", "--out", "flag")
    (tmp_path / "own.toml").write_text('colour = "green"\n')
    run(with_one_more_field, tmp_path, *short, "--settings", "own.toml", "--out", "file")
    kept = [tomllib.loads((tmp_path / out / "config.toml").read_text()) for out in ("flag", "file")]
    assert [each["colour"] for each in kept] == ["red", "green"]
    fused = ("train", "ppo", "--rounds", "1", "--envs", "2", "--steps", "1", "--quiet")
    run(with_one_more_field, tmp_path, *fused, "--population", "fused", "--colour", "red")
    (config,) = (tmp_path / "runs").glob("*/config.toml")
    growth = tomllib.loads(config.read_text())["growth"]
    assert (growth["colour"], growth["population"]) == ("red", "fused")
