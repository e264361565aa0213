"""The documents say what the stored rows of the claims say."""

import json
from functools import cache
from pathlib import Path

import pytest

from esper.leyline.policy_card import find_policy
from shipped import MEASURED, card_with_figures
from summary import Effect, effects

DOCS = Path(__file__).parents[2] / "docs"


@cache
def found() -> list[Effect]:
    return effects()


def test_the_page_of_claims_has_every_effect() -> None:
    page = (DOCS / "claims.md").read_text()
    summary = page[: page.index("## Method")]
    for effect in found():
        if (effect.claim, effect.what) not in BELOW:
            assert effect.in_words in summary, effect.what
    for claim in {effect.claim for effect in found()}:
        assert f"\n## {claim}: " in page


# In the tables of the claim only.
BELOW = {
    ("E", "learned - best constant"),
    ("E", "PPO - trial rule"),
    ("E", "bottleneck: learned - constant"),
}


def test_hosts_are_the_pairs_where_keys_share_them() -> None:
    units = {effect.claim: (effect.units, effect.n) for effect in found()}
    assert units["D"] == units["E"] == ("hosts", 24)
    assert units["H"] == ("hosts", 48)


@pytest.mark.parametrize("claim", ["E", "H"])
def test_a_claim_is_supported_only_by_an_interval_above_zero(claim: str) -> None:
    first = next(effect for effect in found() if effect.claim == claim)
    row = next(
        line
        for line in (DOCS / "claims.md").read_text().splitlines()
        if line.startswith(f"| [{claim}]")
    )
    assert ("**alive**" in row) == (first.low > 0 and first.p < 0.05)


def test_the_card_that_ships_has_the_figures_of_claim_h() -> None:
    _, card = find_policy("digits-trained")
    assert card == card_with_figures(card, json.loads(MEASURED.read_text()))
    fixed = next(e for e in found() if e.what == "shipped - best constant")
    assert f"{fixed.mean:.1f} points ({fixed.low:.1f} to {fixed.high:.1f}) above" in card.worth
    assert not [name for name in card.settings if name.startswith(("ppo.", "growth."))]
