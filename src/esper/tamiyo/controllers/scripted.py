"""The controller that follows a script: a text file with one action per line.

    # step  op         slot  blueprint   blend
    6       GERMINATE  r0c0  branch      linear
    16      FOSSILIZE  r0c0
    auto    FOSSILIZE

A slot is given by its module name or its id. A blueprint may be several with commas between them:
the first that is legal is planted. Steps count from 1. `auto FOSSILIZE` keeps every seed as soon as
that is legal, at steps without a line. At all other steps the controller waits.
"""

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from esper.growth.blueprints.catalogue import BlueprintCatalogue
from esper.leyline import (
    BLEND_NAMES,
    OP,
    SLOT,
    ConfigError,
    LifecycleOp,
    SeedStage,
    SlotConfig,
    shortened,
)
from esper.leyline.files import read_text
from esper.tamiyo.situation import Situation, wait


@dataclass(frozen=True)
class ScriptLine:
    number: int
    op: LifecycleOp
    slot: str
    blueprint: str
    blend: str


class ScriptedController:
    """Every environment follows the same script. Raises ConfigError at a step that is not legal."""

    def __init__(self, text: str, name: str) -> None:
        self.name = f"scripted:{name}"
        self.lines, self.keep_all = parse_script(text, name)

    @staticmethod
    def load(source: str) -> "ScriptedController":
        """From a file, or one of the scripts that come with Esper, by name."""
        path = Path(source)
        if os.path.isfile(path):
            return ScriptedController(read_text(path), source)
        scripts = files("esper.tamiyo.controllers") / "scripts"
        known = sorted(
            entry.name.removesuffix(".txt")
            for entry in scripts.iterdir()
            if entry.name.endswith(".txt")
        )
        if source in known:
            return ScriptedController((scripts / f"{source}.txt").read_text("utf-8"), source)
        raise ConfigError(
            f"no script {shortened(source)!r}: give the path of a file or one of {', '.join(known)}"
        )

    def check_names(self, slots: SlotConfig, catalogue: BlueprintCatalogue) -> None:
        """Raises ConfigError for a line with an unknown slot or blueprint."""
        for line in self.lines.values():
            _actions(line, slots, catalogue, self.name)

    def reset(self, n_envs: int) -> None:
        pass

    def act(self, situation: Situation) -> np.ndarray:
        actions = wait(situation.n_envs)
        line = self.lines.get(situation.step + 1)
        if line is not None:
            choices = _actions(line, situation.slot_config, situation.catalogue, self.name)
            for env in np.flatnonzero(situation.running).tolist():
                actions[env] = self._first_legal(line, choices, situation, env)
        elif self.keep_all:
            ready = situation.masks.slot[:, LifecycleOp.FOSSILIZE]
            actions[:, OP] = np.where(ready.any(axis=1), LifecycleOp.FOSSILIZE, LifecycleOp.WAIT)
            actions[:, SLOT] = ready.argmax(axis=1)
        return actions

    def _first_legal(
        self, line: ScriptLine, choices: list[list[int]], situation: Situation, env: int
    ) -> list[int]:
        for action in choices:
            actions = wait(situation.n_envs)
            actions[env] = action
            if situation.masks.allows(actions)[env]:
                return action
        raise ConfigError(
            f"line {line.number} of {self.name} is not legal at step {situation.step + 1}: "
            f"{line.op.name} {line.slot} {line.blueprint}".rstrip()
            + f", because {_why_not(choices[0], situation, env)}"
        )


def _why_not(action: list[int], situation: Situation, env: int) -> str:
    slot, _, _, op = action
    stage = SeedStage(situation.table.stage[env, slot])
    module = situation.slot_config.names[slot]
    if op != LifecycleOp.GERMINATE:
        can = "removed yet" if op == LifecycleOp.CULL else "kept: it must be on trial and help"
        return f"{module} has no seed that can be {can}"
    if stage != SeedStage.DORMANT:
        return f"{module} is not empty: it holds a seed, or rests after one"
    if situation.masks.slot[env, op, slot]:
        fitting = np.array(situation.catalogue.names)[situation.masks.blueprint[env, slot]]
        return f"in {module} only these fit and can be paid: {', '.join(fitting)}"
    return f"no seed fits {module}, or the budget or the maximum number of seeds is reached"


def _actions(
    line: ScriptLine, slots: SlotConfig, catalogue: BlueprintCatalogue, name: str
) -> list[list[int]]:
    """The actions of a line, one for each of its blueprints."""
    try:
        slot = slots.index_for_name(line.slot) if line.slot else 0
        names = line.blueprint.split(",")
        blueprints = [catalogue.index(each) for each in names] if line.blueprint else [0]
    except ConfigError as error:
        raise ConfigError(f"line {line.number} of {name}: {error}") from error
    blend = BLEND_NAMES.index(line.blend) if line.blend else 0
    return [[slot, blueprint, blend, int(line.op)] for blueprint in blueprints]


def parse_script(text: str, name: str) -> tuple[dict[int, ScriptLine], bool]:
    """({step: line}, whether it has `auto FOSSILIZE`); raises ConfigError with the line number."""
    lines: dict[int, ScriptLine] = {}
    keep_all = False
    for number, raw in enumerate(text.splitlines(), start=1):
        words = raw.split("#")[0].split()
        if not words:
            continue
        if words == ["auto", "FOSSILIZE"]:
            keep_all = True
            continue
        step, line = _parse_line(words, number, name)
        if step in lines:
            raise ConfigError(f"line {number} of {name}: step {step} already has an action")
        lines[step] = line
    return lines, keep_all


_WORDS = {
    LifecycleOp.WAIT: 2,
    LifecycleOp.GERMINATE: 5,
    LifecycleOp.CULL: 3,
    LifecycleOp.FOSSILIZE: 3,
}


def _parse_line(words: list[str], number: int, name: str) -> tuple[int, ScriptLine]:
    where = f"line {number} of {name}"
    if not words[0].isdecimal() or len(words[0]) > 9 or int(words[0]) < 1:
        given = shortened(words[0])
        raise ConfigError(f"{where}: a line starts with a step from 1, got {given!r}")
    if len(words) < 2 or words[1] not in LifecycleOp.__members__:
        known = ", ".join(LifecycleOp.__members__)
        raise ConfigError(f"{where}: after the step comes an op, one of {known}")
    op = LifecycleOp[words[1]]
    if len(words) != _WORDS[op]:
        raise ConfigError(
            f"{where}: {op.name} takes {_WORDS[op] - 2} words after it "
            f"(of slot, blueprint, blend), got {len(words) - 2}"
        )
    slot, blueprint, blend = [*words[2:], "", "", ""][:3]
    if blend and blend not in BLEND_NAMES:
        raise ConfigError(f"{where}: blend must be one of {', '.join(BLEND_NAMES)}, got {blend!r}")
    return int(words[0]), ScriptLine(number, op, slot, blueprint, blend)
