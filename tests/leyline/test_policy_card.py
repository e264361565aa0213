"""The card of a policy: what is written is read, and what is missing is said."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import ConfigError, policy_card
from esper.leyline.policy_card import CARD, PolicyCard, find_policy, read_card, shipped_policies

MADE = PolicyCard("made", "worth it", "few hosts", "on others", "elsewhere", parameters=3)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def write(folder: Path, card: PolicyCard = MADE, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CARD).write_text(replace(card, **changes).as_toml(), encoding="utf-8")  # type: ignore[arg-type]
    return folder


@settings(max_examples=40)
@given(TEXT, TEXT, st.dictionaries(TEXT, TEXT | st.integers(0, 9) | st.booleans(), max_size=4))
def test_what_is_written_is_read(worth: str, fails: str, chosen: dict[str, object]) -> None:
    card = replace(MADE, worth=worth, fails=fails, settings=chosen)
    assert PolicyCard(**tomllib.loads(card.as_toml())) == card


def test_what_nobody_has_measured_is_known(tmp_path: Path) -> None:
    card = read_card(write(tmp_path, evaluated="unmeasured", fails=" "))
    assert card.unmeasured == ("evaluated", "fails")
    assert MADE.unmeasured == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", r"card\.toml cannot be read"),
        ('name = "a"', "needs worth"),
        (MADE.as_toml().replace("parameters = 3", 'parameters = "3"'), "needs parameters"),
        (f"more = 1\n{MADE.as_toml()}", "has more"),
    ],
)
def test_a_bad_card_gets_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / CARD).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_card(tmp_path)


def test_a_folder_without_a_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no card\.toml"):
        read_card(tmp_path)


def test_they_are_found_by_name_the_default_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_card, "SHIPPED", tmp_path / "none")
    assert shipped_policies() == []
    with pytest.raises(ConfigError, match=r"no policy comes with this version.*esper train ppo"):
        find_policy()
    monkeypatch.setattr(policy_card, "SHIPPED", tmp_path)
    write(tmp_path / "a", name="a")
    write(tmp_path / "b", name="b", default=True)
    assert find_policy()[0] == tmp_path / "b"
    assert find_policy("a")[1].name == "a"
    with pytest.raises(ConfigError, match="no policy 'c' comes with Esper; there are b, a"):
        find_policy("c")
