"""Recording, imitation and offline learning from Python; bad input leaves nothing behind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from esper.api import export_policy, find_controller, imitate, learn_offline, record
from esper.leyline import EsperError
from esper.leyline.policy_card import read_card
from esper.simic.recordings.episodes import load_episodes

SMALL: dict[str, Any] = {"episodes": 2, "steps": 2}


def test_record_then_learn_then_decide(tmp_path: Path) -> None:
    phases: list[str] = []

    def note(phase: str, done: int, total: int) -> None:
        phases.append(phase)

    threads = torch.get_num_threads()
    recorded = record("random", out=tmp_path / "recorded", progress=note, **SMALL)
    assert (load_episodes(tmp_path / "recorded").actions == recorded.actions).all()
    cloned, report = imitate("random", out=tmp_path / "cloned", epochs=1, progress=note, **SMALL)
    assert report.epochs == 1
    assert (cloned.actions == recorded.actions).all(), "the same key, the same episodes"
    learn_offline([tmp_path / "recorded", tmp_path / "cloned"], out=tmp_path / "off", beta=1.0)
    assert set(phases) == {"recording", "learning"}
    assert torch.get_num_threads() == threads
    for run in ("cloned", "off"):
        assert find_controller(str(tmp_path / run)).name == str(tmp_path / run)
    check_cards(tmp_path)


def check_cards(runs: Path) -> None:
    """They say how the policies were learned, with no setting of a PPO run that never happened."""
    given = [export_policy(runs / run, run, runs / "p")[1] for run in ("off", "cloned")]
    off, cloned = (card.settings for card in given)
    for settings in (off, cloned):
        assert not [name for name in settings if name.startswith(("ppo.", "growth.", "envs"))]
    assert (off["learning"], off["episodes"], off["beta"]) == ("offline", 4, 1.0)
    assert [each["command"] for each in off["recordings"]] == ["record", "imitate"]
    assert [each["controller"] for each in off["recordings"]] == ["random", "random"]
    assert (cloned["learning"], cloned["teacher"], cloned["epochs"]) == ("imitation", "random", 1)
    assert "4 episodes recorded, learned by offline" in given[0].trained_on
    assert str(runs) not in given[0].as_toml()
    assert read_card(runs / "p" / "off") == given[0]


@pytest.mark.parametrize(
    ("call", "culprit"),
    [
        (lambda out: record("nobody", out=out), "no controller 'nobody'"),
        (lambda out: record("random", out=out, task="nothing"), "no task 'nothing'"),
        (lambda out: imitate("scripted:nothing", out=out), "no script 'nothing'"),
        (lambda out: imitate("heuristic", out=out, epochs=0), "epochs"),
        (lambda out: imitate("heuristic", out=out, entropy=2.0), "entropy"),
        (lambda out: learn_offline([out], out=out), "holds no recorded episodes"),
        (lambda out: learn_offline([], out=out), "no episodes"),
        (lambda out: record("random", out=out, task="cifar10"), "cifar10"),
    ],
)
def test_what_cannot_work_is_found_before_anything_is_written(
    call: Any, culprit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(EsperError, match=culprit):
        call(tmp_path / "out")
    assert not (tmp_path / "out").exists()
