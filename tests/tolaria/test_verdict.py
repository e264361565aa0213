"""The rule: which findings lead to which advice."""

from dataclasses import replace

import pytest

from esper.tolaria import Advice, Candidate, Continued, Findings
from esper.tolaria.verdict import RETRAIN_FROM, recommend

USUAL = Candidate("first", "widen_double", gain=0.01, error=0.02, params=10, macs=20)
BETTER = Candidate("last", "branch", gain=0.03, error=0.02, params=30, macs=40)
CLEARLY = replace(BETTER, gain=0.2)
NOTHING = Continued(fall=-0.01, error=0.02, score=0.1, chance=1.0)
HELPS = replace(NOTHING, fall=0.05)


def findings(
    *candidates: Candidate,
    rho: float | None = 0.6,
    tau: float = 1.0,
    refused: str | None = None,
    continued: Continued = NOTHING,
) -> Findings:
    usual = USUAL if USUAL in candidates else next(iter(candidates), None)
    return Findings(rho, tau, refused, continued, candidates, usual)


STARVED = {"rho": 0.02, "tau": 0.1}


@pytest.mark.parametrize("continued", [NOTHING, HELPS])
def test_a_starved_network_grows_cooled_whatever_its_own_steps_bring(continued: Continued) -> None:
    verdict, choice, sentence = recommend(
        findings(BETTER, USUAL, continued=continued, **STARVED), 0.3
    )
    assert (verdict, choice) == ("grow", USUAL)
    assert sentence.startswith("Grow widen_double in first, cooled: ")
    assert "0.02" in sentence


def test_what_trials_of_a_cooled_network_say_is_told_and_does_not_count() -> None:
    _, choice, sentence = recommend(findings(CLEARLY, USUAL, **STARVED), 0.3)
    assert choice == USUAL
    assert "branch in last is first, with 0.2 ± 0.02" in sentence


def test_a_trial_overrules_the_usual_only_if_it_is_clear() -> None:
    assert recommend(findings(CLEARLY, USUAL), 0.3)[1] == CLEARLY
    apart = 2.0 * (0.02**2 + 0.02**2) ** 0.5
    for usual, chosen in (
        (replace(USUAL, gain=0.2 - apart + 1e-9), "widen_double"),
        (replace(USUAL, gain=0.2 - apart - 1e-9), "branch"),
    ):
        found = replace(findings(CLEARLY, usual), usual=usual)
        choice = recommend(found, 0.3)[1]
        assert choice is not None
        assert choice.blueprint == chosen


def test_why_a_starved_network_cannot_be_cooled_is_said() -> None:
    found = findings(USUAL, rho=0.02, refused="its last layer is shared")
    verdict, _, sentence = recommend(found, 0.3)
    assert verdict == "grow"
    assert "not cooled (its last layer is shared)" in sentence


def test_what_still_learns_goes_on() -> None:
    verdict, choice, sentence = recommend(findings(CLEARLY, USUAL, continued=HELPS), 0.3)
    assert (verdict, choice) == ("continue", None)
    assert "the validation loss falls by 0.05 ± 0.02" in sentence


def test_a_score_that_rises_is_learning_too() -> None:
    rising = replace(NOTHING, score=2.1)
    verdict, _, sentence = recommend(findings(CLEARLY, continued=rising), 0.3)
    assert verdict == "continue"
    assert "the score rises by 2.1 ± 1" in sentence


def test_a_plateau_with_a_clear_trial_grows() -> None:
    verdict, choice, sentence = recommend(findings(CLEARLY, USUAL), 0.3)
    assert (verdict, choice) == ("grow", CLEARLY)
    assert "cooled" not in sentence


def test_a_plateau_without_a_clear_trial_goes_on() -> None:
    verdict, choice, _ = recommend(findings(BETTER, USUAL), 0.3)
    assert (verdict, choice) == ("continue", None)


def test_nothing_to_grow_is_no_growth() -> None:
    assert recommend(findings(**STARVED), 0.3)[0] == "continue"


@pytest.mark.parametrize("found", [findings(CLEARLY, **STARVED), findings(continued=HELPS)])
def test_much_budget_is_for_a_wider_network(found: Findings) -> None:
    assert recommend(found, RETRAIN_FROM)[0] == "retrain wider"
    assert recommend(found, RETRAIN_FROM - 0.01)[0] != "retrain wider"


def test_a_candidate_that_broke_the_network_is_never_chosen() -> None:
    broken = replace(USUAL, gain=None, error=None)
    assert not broken.helps
    assert not broken.beats(BETTER)
    assert BETTER.beats(broken)
    found = replace(findings(BETTER, broken, **STARVED), usual=broken)
    assert recommend(found, 0.3)[1] == BETTER


def test_what_is_printed_has_every_finding() -> None:
    found = findings(CLEARLY, USUAL, continued=HELPS, **STARVED)
    verdict, choice, sentence = recommend(found, 0.3)
    advice = Advice(verdict, sentence, choice, True, found, 0.3, 1234, 5678, 0.123)
    shown = repr(advice)
    for words in (
        "starved      yes (rho 0.020)",
        "plateaued    no",
        "1,234 parameters",
        "cost 12.3% of the extra budget",
        "+40",
    ):
        assert words in shown, words
    assert shown.index("branch in last") < shown.index("widen_double in first")
    assert shown.endswith(sentence)
