"""Insurance: the network without growth is trained beside, and the better one is kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.grown_module import keyed
from esper.leyline import BLEND, BLUEPRINT, OP, SLOT, LifecycleOp, generator
from esper.leyline.reports import TwinReport
from esper.tamiyo.situation import Situation, wait
from helpers import Clocked, everywhere, exploding, grow_arguments, nan_after
from resume_support import Own, kill_in, own_run


def drift(channels: int) -> nn.Module:
    """A seed that harms a little more with every batch, whatever its weights learn."""
    return Clocked(channels, lambda done: 1.0 + 100.0 * done)


def bad_blueprints() -> esper.BlueprintCatalogue:
    catalogue = default_catalogue()
    for name, make in (("nan", nan_after(20)), ("exploding", exploding), ("drift", drift)):
        catalogue = catalogue.with_blueprint(everywhere(name, make))
    return catalogue


class Saboteur:
    """Plants bad seeds wherever it can, and keeps whatever it may keep."""

    name = "saboteur"

    def __init__(self, key: int) -> None:
        self.key = key

    def reset(self, n_envs: int) -> None:
        pass

    def act(self, situation: Situation) -> np.ndarray:
        actions, masks = wait(situation.n_envs), situation.masks
        draw = generator(self.key, "saboteur", situation.step)
        for op in (LifecycleOp.FOSSILIZE, LifecycleOp.GERMINATE):
            slots = np.flatnonzero(masks.slot[0, op])
            if len(slots):
                actions[0, OP], actions[0, SLOT] = op, draw.choice(slots)
        if actions[0, OP] == LifecycleOp.GERMINATE:
            names = situation.catalogue.names
            bad = [names.index(name) for name in ("nan", "exploding", "drift")]
            fits = [b for b in bad if masks.blueprint[0, actions[0, SLOT], b]]
            actions[0, BLUEPRINT] = draw.choice(fits)
            actions[0, BLEND] = draw.integers(2)
        return actions


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    with keyed(3):
        x = torch.randn(260, 6)
        y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    train, val = TensorDataset(x[:60], y[:60]), TensorDataset(x[60:], y[60:])
    order = torch.Generator().manual_seed(2)
    return DataLoader(train, 30, shuffle=True, generator=order), DataLoader(val, 200)


def episode(
    key: int, controller: Any, *, insured: bool, out: Path | None = None
) -> tuple[esper.Grown, nn.Module]:
    with keyed(key):
        model = Own()
    train, val = loaders()
    grown = esper.grow(
        model,
        train,
        val,
        slots=esper.Slots(["body", "head"], blueprints=bad_blueprints()),
        steps=10,
        controller=controller,
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-2),
        key=key,
        out=out,
        settings=esper.GrowthSettings(insured=insured, progress=False),
    )
    return grown, model


def test_the_twin_is_the_static_run_bit_for_bit(tmp_path: Path) -> None:
    grown, model = episode(1, Saboteur(1), insured=True, out=tmp_path / "insured")
    alone, host = episode(1, "static", insured=False, out=tmp_path / "alone")
    twin = grown.outcome.twin
    assert twin is not None
    assert twin == TwinReport(
        alone.outcome.val_score, alone.outcome.train_macs, twin.kept, twin.gain
    )
    assert twin.train_macs > 0
    beside = tmp_path / "insured" / "arms" / "host-alone"
    for name in ("metrics.jsonl", "outcomes.jsonl"):
        assert (beside / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    if twin.kept == "twin":
        assert all(torch.equal(t, host.state_dict()[n]) for n, t in model.state_dict().items())


def harm(episodes: int) -> list[float]:
    """Points below the twin at which insured episodes end, evaluated again."""
    (x, y), *_ = loaders()[1]
    found = []
    for key in range(episodes):
        controller = "random" if key % 4 == 3 else Saboteur(key)
        grown, _ = episode(key, controller, insured=True)
        with torch.no_grad():
            right = grown.model.eval()(x).argmax(1) == y
        score, twin = 100.0 * float(right.double().mean()), grown.outcome.twin
        assert grown.outcome.val_score == pytest.approx(score, abs=1e-4)
        assert twin is not None
        assert twin.val_score is not None
        found.append(twin.val_score - score)
    return found


def test_no_insured_episode_ends_far_below_its_twin() -> None:
    assert max(harm(8)) <= 1.0


@pytest.mark.soak
def test_no_insured_episode_of_500_ends_below_its_twin() -> None:
    worst = max(harm(500))
    print(f"insured, worst of 500: {-worst:+.2f} points against the twin")
    assert worst <= 1e-4


def test_when_growth_harms_the_model_is_its_twin() -> None:
    def kept(key: int) -> str:
        twin = episode(key, Saboteur(key), insured=True)[0].outcome.twin
        assert twin is not None
        return twin.kept

    key = next((key for key in range(12) if kept(key) == "twin"), None)
    assert key is not None, "the insurance never pays"
    grown, model = episode(key, Saboteur(key), insured=True)
    _, host = episode(key, "static", insured=False)
    assert all(torch.equal(t, host.state_dict()[n]) for n, t in model.state_dict().items())
    assert grown.outcome.seeds == ()
    assert grown.outcome.params == grown.outcome.host_params
    assert all(slot.seed is None for _, slot in grown.model.each_slot())
    assert "kept: twin" in repr(grown)
    x = torch.randn(4, 6)
    assert torch.equal(grown.export().eval()(x), model.eval()(x))


def test_an_insured_run_is_taken_up_like_any_other(tmp_path: Path) -> None:
    reference = own_run(tmp_path / "whole", insured=True)
    for plan in ("epoch:9", "write:40", "write:9"):
        assert kill_in(plan, tmp_path / "cut", insured=True)
    found = own_run(tmp_path / "cut", insured=True)
    assert found.outcome == reference.outcome
    states = [g.model.state_dict() for g in (found, reference)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    alone = [tmp_path / name / "arms/host-alone/metrics.jsonl" for name in ("whole", "cut")]
    assert alone[0].read_bytes() == alone[1].read_bytes()


def test_an_optimizer_that_was_given_is_the_twins_too() -> None:
    with keyed(0):
        model = Own()
    train, val = loaders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    settings: dict[str, Any] = {"slots": ["body"], "steps": 5, "progress": False}
    grown = esper.grow(
        model,
        train,
        val,
        optimizer=optimizer,
        controller="static",
        **grow_arguments(**settings, insured=True),
    )
    assert grown.outcome.twin.val_score == grown.outcome.val_score  # type: ignore[union-attr]
