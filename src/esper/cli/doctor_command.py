"""`esper doctor`: what is installed, whether it works, and the cure where it does not."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from esper.cli.options import option
from esper.cli.printing import AS_JSON, consoles, print_json

if TYPE_CHECKING:
    from esper.cli.health import Finding


@dataclass(frozen=True)
class DoctorSettings:
    quiet: bool = option(False, "Print only what is wrong.")
    json: bool = option(False, AS_JSON)


def doctor(settings: DoctorSettings) -> None:
    """See whether everything that Esper needs is there and works.

    Looks at versions, threads, extras, data sets and folders, and grows a tiny network. Each line
    that is not fine ends with its cure. Ends with exit code 1 if something is wrong; an extra or a
    data set that is not there is not wrong.

    Example: esper doctor --json
    """
    from esper.cli.health import examine
    from esper.observatory.terminal import say

    _, result = consoles(settings.quiet, settings.json)
    findings: list[Finding] = []
    for finding in examine():
        findings.append(finding)
        if finding.state == "wrong" or not settings.quiet:
            say(result, _in_a_line(finding), whole=True)
    wrong = [finding.about for finding in findings if finding.state == "wrong"]
    if settings.json:
        print_json({"wrong": wrong, "findings": [asdict(each) for each in findings]})
    elif not settings.quiet:
        say(result, f"\nWrong: {', '.join(wrong)}." if wrong else "\nAll is well.")
    if wrong:
        raise typer.Exit(1)


def _in_a_line(finding: "Finding") -> str:
    cure = "" if finding.cure is None else f"; {finding.cure}"
    return f"{finding.about:<20} {finding.state:<8} {finding.detail}{cure}"
