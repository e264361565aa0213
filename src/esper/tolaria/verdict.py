"""What to do with a network that has been trained: grow it, go on with it, or train a wider one.

What is known of it is a `Findings`; `recommend` is the rule.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from esper.leyline.constants import COOLING_STARVED

Verdict = Literal["grow", "continue", "retrain wider"]

# From this share of its training on, a wider network from scratch is the better buy; the tables of
# docs/claims.md are for 0.1, 0.3 and 1.
RETRAIN_FROM = 0.6
# What is measured counts if it is so many times its standard error.
CLEAR = 2.0


@dataclass(frozen=True)
class Candidate:
    """A seed that was tried in `module`. `gain` is the fall of the validation loss in a few steps,
    None if it broke the network, `error` its standard error, None if that is not known. Costs are
    parameters and multiply-adds per example."""

    module: str
    blueprint: str
    gain: float | None
    error: float | None
    params: int
    macs: int

    @property
    def helps(self) -> bool:
        """Clearly, by its trial."""
        return self.gain is not None and self.gain > CLEAR * (self.error or 0.0)

    def beats(self, other: "Candidate") -> bool:
        """Clearly, by their trials."""
        if self.gain is None or other.gain is None:
            return self.gain is not None
        return self.gain - other.gain > CLEAR * math.hypot(self.error or 0.0, other.error or 0.0)

    def __str__(self) -> str:
        return f"{self.blueprint} in {self.module}"


@dataclass(frozen=True)
class Continued:
    """What a few more steps of its own bring to a network: the fall of the validation loss with its
    standard error, and the change of the score with what chance alone changes; None for what is not
    known, or not finite."""

    fall: float | None
    error: float | None
    score: float | None
    chance: float | None

    @property
    def helps(self) -> bool:
        lower = self.fall is not None and self.fall > CLEAR * (self.error or 0.0)
        better = None not in (self.score, self.chance) and self.score > CLEAR * self.chance  # type: ignore[operator]
        return lower or better


@dataclass(frozen=True)
class Findings:
    """What was found out about a trained network.

    rho         how far its answers on training data are from the right ones; None for no classifier
    tau         by which its output would be scaled before it grows; 1 if it is not cooled
    refused     why it cannot be cooled although it is starved
    candidates  what was tried, best first
    usual       that of them which the heuristic would plant first, without any trial
    """

    rho: float | None
    tau: float
    refused: str | None
    continued: Continued
    candidates: tuple[Candidate, ...]
    usual: Candidate | None

    @property
    def starved(self) -> bool:
        """Is there too little left to learn from?"""
        return self.rho is not None and self.rho < COOLING_STARVED

    @property
    def plateaued(self) -> bool:
        return not self.continued.helps

    @property
    def choice(self) -> Candidate | None:
        """What to grow, if anything: the usual, unless a trial is clearly better. Of a network that
        is cooled trials do not count: what makes its output large again looks best in them."""
        if self.usual is None:
            return None
        best, broken = self.candidates[0], self.usual.gain is None
        counts = broken or self.tau == 1.0
        return best if counts and best.beats(self.usual) else self.usual


@dataclass(frozen=True, repr=False)
class Advice:
    """What to do with a trained network for `extra` of what its training cost, and why.

    verdict     grow, continue or retrain wider; `sentence` says it with the reason
    choice      what to grow where, None if that is not the advice
    cooled      its output is scaled down before it grows
    findings    what it rests on
    share       what the advice cost, as a share of the extra budget
    """

    verdict: Verdict
    sentence: str
    choice: Candidate | None
    cooled: bool
    findings: Findings
    extra: float
    host_params: int
    host_macs: int
    share: float

    def as_dict(self) -> dict[str, Any]:
        """All of it, in plain values, for JSON."""
        found = self.findings
        judged = {"starved": found.starved, "plateaued": found.plateaued}
        return {**asdict(self), "findings": {**asdict(found), **judged}}

    def __repr__(self) -> str:
        return "\n".join([*_finding_lines(self), *_candidate_lines(self), self.sentence])


def recommend(found: Findings, extra: float) -> tuple[Verdict, Candidate | None, str]:
    """The verdict, what to grow, if anything, and both in one sentence with the reason."""
    choice, own = found.choice, found.continued
    if extra >= RETRAIN_FROM:
        reason = (
            f"for {extra:g} of what the training cost, a wider network from scratch is the better "
            f"buy; growing pays below {RETRAIN_FROM:g}"
        )
        return "retrain wider", None, f"Retrain wider: {reason}."
    if found.starved and choice is not None:
        how = ", cooled" if found.tau < 1.0 else f", not cooled ({found.refused})"
        reason = f"it knows its training data by heart (rho {found.rho:.2f}) and starves"
        return "grow", choice, f"Grow {choice}{how}: {reason}; {_trial_words(found, choice)}."
    if own.helps:
        return "continue", None, f"Continue: a few more steps of its own still help, {_by(own)}."
    helpful = [each for each in (choice, *found.candidates[:1]) if each is not None and each.helps]
    if helpful:
        what = helpful[0]
        reason = f"it has plateaued, and a short trial lowers the validation loss by {_gain(what)}"
        return "grow", what, f"Grow {what}: {reason}."
    reason = "it has plateaued, but no candidate clearly helps in a short trial either"
    return "continue", None, f"Continue: {reason}."


def _trial_words(found: Findings, choice: Candidate) -> str:
    best = found.candidates[0]
    if not best.helps:
        return "in short trials no candidate clearly helps"
    if best == choice:
        return f"in short trials it is first, with {_gain(best)}"
    return f"in short trials {best} is first, with {_gain(best)}, which says little after cooling"


def _by(own: Continued) -> str:
    if own.fall is not None and own.fall > CLEAR * (own.error or 0.0):
        return f"the validation loss falls by {_measured(own.fall, own.error)}"
    return f"the score rises by {_measured(own.score, own.chance)}"


def _gain(candidate: Candidate) -> str:
    return _measured(candidate.gain, candidate.error)


def _measured(value: float | None, error: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.3g}" if error is None else f"{value:.3g} ± {error:.2g}"


# --- as text -------------------------------------------------------------------------------------


def _finding_lines(advice: Advice) -> list[str]:
    found, own = advice.findings, advice.findings.continued
    rho = "no classifier" if found.rho is None else f"rho {found.rho:.3f}"
    score = "" if own.score is None else f", score {own.score:+.2f}"
    if own.score is not None and own.chance is not None:
        score += f" (by chance {own.chance:.2f})"
    rows = [
        ("starved", f"{_yes(found.starved)} ({rho})"),
        ("plateaued", f"{_yes(found.plateaued)} (a few more steps: validation loss falls by "
         f"{_measured(own.fall, own.error)}{score})"),
        ("network", f"{advice.host_params:,} parameters, {advice.host_macs:,} multiply-adds"),
        ("this advice", f"cost {advice.share:.1%} of the extra budget"),
    ]  # fmt: skip
    return [f"{name:<12} {text}" for name, text in rows]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _candidate_lines(advice: Advice) -> list[str]:
    heads = ("candidate", "gain in a short trial", "parameters", "multiply-adds")
    rows = [
        (str(each), _gain(each), f"+{each.params:,}", f"+{each.macs:,}")
        for each in advice.findings.candidates
    ]
    return ["", *_aligned([heads, *rows]), ""] if rows else [""]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Words on the left, then numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
