"""States that an older version of Esper has written are read and continued."""

import json
import shutil
from pathlib import Path

import pytest

from esper.api.training import resume_ppo
from esper.leyline import ConfigError
from esper.simic.training.checkpoint import (
    OLDEST,
    VERSION,
    load_checkpoint,
    load_state,
    upgraded,
)
from training_support import rows, tiny_task


def format_of(path: Path) -> int:
    return json.loads((path / "manifest.json").read_text())["format"]


STORED = Path(__file__).parent / "stored"


@pytest.mark.parametrize("version", range(OLDEST, VERSION))
def test_a_stored_run_of_every_older_version_is_continued_in_todays_format(tmp_path, version):
    run = Path(shutil.copytree(STORED / f"format-{version}", tmp_path / "run"))
    assert format_of(load_checkpoint(run).path) == version
    before = load_state(run)
    assert (before.round, before.agent.update_count) == (1, 1)
    assert before.rewards.count == 2
    state = resume_ppo(run, task=tiny_task(), rounds=2)
    assert (state.round, state.agent.update_count, state.rewards.count) == (2, 2, 4)
    newest = load_checkpoint(run)
    assert format_of(newest.path) == VERSION
    assert newest.state.settings == {**before.settings, **newest.state.settings}
    assert [row["round"] for row in rows(run / "metrics.jsonl") if row["kind"] == "round"] == [0, 1]


def test_what_is_no_state_of_its_version_is_refused():
    with pytest.raises(ConfigError, match="version 3"):
        upgraded({"settings": {}}, 3)


def test_a_policy_of_the_format_before_is_read():
    folder = Path(__file__).parents[3] / "src" / "esper" / "policies" / "digits-trained"
    state = load_state(folder)
    assert state.settings["anomalies.patience"] == 2
    assert state.rewards.mean == 0.0
