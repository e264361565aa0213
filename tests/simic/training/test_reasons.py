"""What a policy says of its decisions is what it computed them from."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from esper.leyline import BLEND_NAMES, HEAD_NAMES, History, LifecycleOp
from esper.leyline.events import Decided, event_from_row
from esper.leyline.growth_settings import GrowthSettings
from esper.simic.agent.types import MaskTensors
from esper.simic.training.policy_controller import LearnedController
from esper.tamiyo.situation import Situation
from esper.tolaria.engine.run import make_env, play
from training_support import tiny_run, tiny_task

KEYS = [1, 2]


class Watched(LearnedController):
    """Keeps what it was shown, and how probable its actions were to the agent [E, heads]."""

    situations: list[Situation]
    probabilities: list[np.ndarray]

    def act(self, situation: Situation) -> np.ndarray:
        hidden, actions = self.hidden, super().act(situation)
        self.situations.append(situation)
        scaled = self.observations.normalize(torch.from_numpy(self.space.observe(situation)[0]))
        with torch.no_grad():
            log_probs, _, _ = self.agent.network.evaluate_actions(
                scaled, torch.from_numpy(actions), MaskTensors.of(situation.masks), hidden
            )
        self.probabilities.append(log_probs.exp().numpy())
        return actions


@pytest.fixture(scope="module", params=["flat", "set"])
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Watched, History]:
    folder = tmp_path_factory.mktemp("policy") / "run"
    state = tiny_run(folder, rounds=1, **{"network.kind": request.param, "envs": 2})
    controller = Watched(state, deterministic=False)
    controller.situations, controller.probabilities = [], []
    task, told = tiny_task(), History()
    recipe = task.recipe(task.load(None))
    play(make_env(recipe, KEYS, GrowthSettings(task.steps), told), controller)
    return controller, told


def decided(told: History) -> list[Decided]:
    return [event for event in told.events if isinstance(event, Decided)]


def rows_of(event: Decided, head: str) -> dict[str, float | None]:
    rows = zip(event.heads, event.choices, event.probabilities, strict=True)
    return {choice: p for of, choice, p in rows if of == head}


def softmax(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    weights = np.where(mask, np.exp(logits - logits.max()), 0.0)
    return weights / weights.sum()


def test_there_is_one_for_every_step_and_it_names_what_was_done(
    played: tuple[Watched, History],
) -> None:
    _, told = played
    rows = {(row["env"], row["step"]): row for row in told.rows if row["step"] > 0}
    events = decided(told)
    assert {(event.env, event.step) for event in events} == set(rows)
    for event in events:
        row = rows[event.env, event.step]
        assert event.taken == (row["op"], row["slot"], row["blueprint"], row["blend"])
    assert {event.taken[0] for event in events} >= {"WAIT", "GERMINATE"}


def test_what_was_done_is_as_probable_as_learning_takes_it_to_be(
    played: tuple[Watched, History],
) -> None:
    controller, told = played
    steps = {
        s.step + 1: p for s, p in zip(controller.situations, controller.probabilities, strict=True)
    }
    for event in decided(told):
        for head, name in zip(("op", "slot", "blueprint", "blend"), event.taken, strict=True):
            if name is not None:
                expected = steps[event.step][event.env, HEAD_NAMES.index(head)]
                assert rows_of(event, head)[name] == pytest.approx(expected, abs=1e-4)


def test_probabilities_are_those_of_the_network(played: tuple[Watched, History]) -> None:
    """Against the heads' own logits, walked by hand; they are plain in a flat network only."""
    controller, told = played
    if controller.space.kind != "flat":
        return
    network, hidden = controller.agent.network, controller.agent.initial_hidden(len(KEYS))
    names = {"blend": BLEND_NAMES, "op": [op.name for op in LifecycleOp]}
    for s in controller.situations:
        names |= {"slot": s.slot_config.names, "blueprint": s.catalogue.names}
        observed = torch.from_numpy(controller.space.observe(s)[0])
        with torch.no_grad():
            features, hidden = network.encode(controller.observations.normalize(observed), hidden)
            logits = {h: network.head(h)(features).double().numpy() for h in HEAD_NAMES}
            values = network.value_head(features).squeeze(-1)
        for event in (e for e in decided(told) if e.step == s.step + 1):
            env = event.env
            assert event.value == pytest.approx(float(values[env]), abs=1e-4)
            op = "GERMINATE" if event.supposed else event.taken[0]
            slots = rows_of(event, "slot")
            slot = max(slots, key=lambda n: slots[n] or 0.0) if event.supposed else event.taken[1]
            masks = {"op": s.masks.op[env], "slot": s.masks.slot[env, LifecycleOp[op]]}
            masks["blend"] = s.masks.blend[env]
            if slot is not None:
                masks["blueprint"] = s.masks.blueprint[env, s.slot_config.names.index(slot)]
            for head in dict.fromkeys(event.heads):
                expected = softmax(logits[head][env], masks[head])
                for choice, probability in rows_of(event, head).items():
                    index = list(names[head]).index(choice)
                    assert (probability is None) == (not masks[head][index])
                    if probability is not None:
                        assert probability == pytest.approx(expected[index], abs=1e-4)


def test_what_it_saw_is_named_and_is_what_stood_out(played: tuple[Watched, History]) -> None:
    controller, told = played
    for s in controller.situations:
        raw = controller.space.observe(s)[0]
        scaled = controller.observations.normalize(torch.from_numpy(raw)).numpy()
        names = controller.space.names(s.slot_config.names)
        columns = {name: i for i, name in enumerate(names)}
        assert len(columns) == raw.shape[1]
        for event in (e for e in decided(told) if e.step == s.step + 1):
            seen = [columns[name] for name in zip(event.blocks, event.entries, strict=True)]
            assert raw[event.env, seen] == pytest.approx(event.numbers, rel=1e-3)
            far = np.abs(scaled[event.env])
            assert far[seen[0]] == far.max()
            assert event.left_out > 0


def test_a_forbidden_choice_has_a_reason_and_no_probability(
    played: tuple[Watched, History],
) -> None:
    for event in decided(played[1]):
        for probability, reason in zip(event.probabilities, event.reasons, strict=True):
            assert (probability is None) == bool(reason)


def test_it_stays_small_and_comes_back_from_its_row(played: tuple[Watched, History]) -> None:
    for event in decided(played[1]):
        text = json.dumps(event.row())
        assert len(text) < 8000
        assert event_from_row(json.loads(text)) == event


def test_nobody_pays_for_reasons_that_nobody_hears(
    played: tuple[Watched, History], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, _ = played
    asked: list[Any] = []
    monkeypatch.setattr(Watched, "reasons", lambda self, actions: asked.append(actions) or [])
    task = tiny_task()
    recipe = task.recipe(task.load(None))
    play(make_env(recipe, KEYS, GrowthSettings(2)), controller)
    assert not asked
    play(make_env(recipe, KEYS, GrowthSettings(2), History()), controller)
    assert len(asked) == 2
