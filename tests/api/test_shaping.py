"""Shapes under a cap, and topologies from birth."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.leyline import ConfigError


def loaders() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 6, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    data = TensorDataset(x, y)
    shuffled = DataLoader(data, 32, shuffle=True, generator=torch.Generator().manual_seed(1))
    return shuffled, DataLoader(data, 64)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


SETTINGS: dict[str, Any] = {"slots": ["1", "3"], "progress": False}


def test_a_topology_is_there_from_birth() -> None:
    model = small_model()
    grown = esper.grow(
        model, *loaders(), controller="static", steps=2, topology={"3": "mlp_small"}, **SETTINGS
    )
    assert grown.topology == {"3": "mlp_small"}
    assert grown.outcome.germinated == 0
    assert grown.outcome.params > grown.outcome.host_params
    (report,) = grown.outcome.seeds
    assert report.stage == "FOSSILIZED"


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ({"9": "mlp"}, "topology names '9', which is no slot; the slots are 1, 3"),
        ({"1": "mpl"}, "no blueprint 'mpl'; there are"),
        ({"1": "conv_light"}, "does not fit"),
        ("mlp", "topology must be a dict of blueprints by module name"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(topology: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        esper.grow(small_model(), *loaders(), topology=topology, out=tmp_path / "run", **SETTINGS)
    assert not (tmp_path / "run").exists()


def test_a_shape_is_grown_under_the_cap_and_trained_anew(tmp_path: Path) -> None:
    script = "scripted:" + str(tmp_path / "script.txt")
    (tmp_path / "script.txt").write_text("1 GERMINATE r0c0 mlp_small linear\nauto FOSSILIZE\n")
    model = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = esper.shape(
        model,
        *loaders(),
        budget=esper.Budget(params=300),
        controller=script,
        steps=14,
        out=tmp_path / "runs",
        **SETTINGS,
    )
    assert found.topology == found.retrained.topology
    assert found.grown.outcome.params <= 300
    assert found.retrained.outcome.params == found.grown.outcome.params
    assert found.macs == found.grown.outcome.train_macs + found.retrained.outcome.train_macs
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"grown", "retrained"}
    # It was trained from the model as it was given.
    own = esper.grow(
        _with(before),
        *loaders(),
        controller="static",
        steps=14,
        topology=found.topology,
        **SETTINGS,
    )
    assert own.outcome.val_loss == found.retrained.outcome.val_loss
    x = torch.randn(5, 6)
    torch.testing.assert_close(found.export()(x), found.retrained.model(x))
    assert "in all" in repr(found)


def _with(state: dict[str, torch.Tensor]) -> nn.Module:
    model = small_model()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("wrong", [{"start": "trained"}, {"topology": {"1": "mlp"}}])
def test_what_makes_no_sense_for_a_shape_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="shape"):
        esper.shape(small_model(), *loaders(), budget=esper.Budget(params=2.0), **SETTINGS, **wrong)


def test_a_trained_model_is_grown_before_its_first_epoch() -> None:
    model = small_model()
    esper.grow(model, *loaders(), controller="static", steps=5, **SETTINGS)
    before = model[0].weight.clone()
    grown = esper.grow(model, *loaders(), start="trained", controller="static", steps=3, **SETTINGS)
    # A look at it as it is, and three epochs.
    assert len(grown.history) == 4
    assert grown.history[0]["train_loss"] is None
    assert not torch.equal(before, model[0].weight) or grown.outcome.best_step == 0


def test_only_fresh_and_trained_are_ways_to_start() -> None:
    with pytest.raises(ConfigError, match="start must be 'fresh' or 'trained', got 'warm'"):
        esper.grow(small_model(), *loaders(), start="warm", **SETTINGS)  # type: ignore[arg-type]
