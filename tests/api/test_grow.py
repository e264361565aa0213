import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from architectures import ARCHITECTURES, MLP, ResNet20
from esper.growth.export import largest_difference
from esper.growth.grown_module import GrownModule, keyed
from esper.leyline import ConfigError
from esper.observatory.run_directory import read_rows
from helpers import grow_arguments


def loaders(
    x: Tensor, classes: int = 5, n: int = 96, batch: int = 32
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Learnable data of the example's kind: the class depends on the mean of the input."""
    with keyed(1):
        if x.is_floating_point():
            data = torch.randn(n, *x.shape[1:])
            label = torch.arange(n) % classes
            data += label.float().view(-1, *[1] * (x.dim() - 1))
        else:
            label = torch.arange(n) % classes
            data = (label[:, None] * 2 + torch.randint(0, 3, (n, x.shape[1]))) % 12
    train = TensorDataset(data[: n * 2 // 3], label[: n * 2 // 3])
    val = TensorDataset(data[n * 2 // 3 :], label[n * 2 // 3 :])
    return DataLoader(train, batch, shuffle=True), DataLoader(val, batch)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_grow_any_model_and_get_a_plain_one_back(name: str) -> None:
    make, slots, _, example = ARCHITECTURES[name]
    with keyed(0):
        model, x = make(), example()
    train, val = loaders(x)
    grown = esper.grow(
        model,
        train,
        val,
        slots=esper.Slots(slots, example=x),
        controller="scripted:early" if name != "gru" else "random",
        steps=14,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
    )
    assert isinstance(grown.model, GrownModule)
    assert grown.model.host is model, "trained in place, not rewritten"
    assert len(grown.history) == 14
    assert grown.outcome.germinated >= 1
    assert grown.outcome.val_score >= max(row["val_score"] for row in grown.history) - 1e-9
    plain = grown.export()
    assert largest_difference(plain, grown.model, x) <= 1e-5
    assert not any(type(m).__module__.startswith("esper") for m in plain.modules())


def test_everything_by_default() -> None:
    with keyed(0):
        model = MLP()
    train, val = loaders(torch.zeros(1, 20), n=300)
    grown = esper.grow(model, train, val, slots=["layer1", "layer2"])
    assert len(grown.history) == 30
    assert grown.outcome.controller == "heuristic"


def test_the_same_key_gives_the_same_run(tmp_path: Path) -> None:
    def run(folder: str, key: int) -> bytes:
        with keyed(0):
            model = MLP()
        train, val = loaders(torch.zeros(1, 20))
        esper.grow(
            model,
            train,
            val,
            slots=r"layer\d",
            controller="random",
            steps=12,
            key=key,
            out=tmp_path / folder,
        )
        return (tmp_path / folder / "outcomes.jsonl").read_bytes()

    torch.manual_seed(7)
    first = run("a", 3)
    torch.manual_seed(8)
    assert run("b", 3) == first
    assert run("c", 4) != first
    assert len(list(read_rows(tmp_path / "a" / "metrics.jsonl"))) == 12


def test_a_budget_caps_the_network() -> None:
    with keyed(0):
        model = ResNet20()
    train, val = loaders(torch.zeros(1, 3, 8, 8))
    grown = esper.grow(
        model,
        train,
        val,
        slots=["layer1", "layer2", "layer3"],
        controller="random",
        steps=10,
        budget=esper.Budget(params=1.1, macs=1.2),
    )
    for row in grown.history:
        assert row["params"] <= 1.1 * grown.outcome.host_params
        assert row["macs"] <= 1.2 * grown.outcome.host_macs


def test_a_regression_with_callables() -> None:
    with keyed(0):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.randn(120, 4)
    y = (x[:, :1] * x[:, 1:2]).sin()
    data = [(x[i : i + 30], y[i : i + 30]) for i in range(0, 120, 30)]
    grown = esper.grow(
        model,
        data[:3],
        data[3:],
        slots=["0", "1"],
        loss="mse",
        score=lambda output, target: -100 * (output - target).square().mean(),
        controller="scripted:early",
        steps=12,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    )
    assert grown.outcome.val_score > grown.history[0]["val_score"]
    assert grown.export()(x).shape == (120, 1)


def test_dict_and_tuple_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(4, 6)
            self.head = nn.Linear(6, 3)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.head(torch.relu(self.shared(left)) + torch.relu(self.shared(right)))

    left, right, y = torch.randn(24, 4), torch.randn(24, 4), torch.arange(24) % 3
    for inputs in ((left, right), {"left": left, "right": right}):
        grown = esper.grow(
            Two(), [(inputs, y)], [(inputs, y)], slots=["shared"], controller="random", steps=4
        )
        assert grown.outcome.germinated >= 1
        grown.export()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": ["nowhere"]}, "has no module 'nowhere'"),
        ({"loss": "hinge"}, "no loss 'hinge'"),
        ({"score": "f1"}, "no score 'f1'"),
        ({"controller": "oracle"}, "no controller 'oracle'"),
        ({"steps": 1}, "at least 2 epochs"),
        ({"train_loader": []}, "train_loader is empty"),
        ({"val_loader": []}, "val_loader is empty"),
        ({"slots": esper.Slots(["layer1"], torch.zeros(2, 3))}, "does not run on the example"),
        ({"loss": "mse"}, "the loss does not fit"),
        ({"score": lambda output, target: output.sum(dim=1)}, "the score must return one number"),
        ({"val_loader": [(torch.zeros(3, 7), torch.zeros(3).long())]}, "inputs of val_loader"),
        ({"optimizer": lambda params: torch.optim.Adagrad(params)}, "Adagrad cannot take"),
        ({"incubation": "both"}, "'isolated' or 'joint'"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a number above 0"),
    ],
)
def test_bad_arguments_get_one_sentence_before_anything_is_trained(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = MLP()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train, val = loaders(torch.zeros(1, 20))
    arguments: dict[str, Any] = {
        "train_loader": train,
        "val_loader": val,
        "slots": ["layer1"],
        "out": tmp_path / "run",
        **changes,
    }
    with pytest.raises(ConfigError, match=message):
        esper.grow(model, **grow_arguments(**arguments))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_frozen_model_is_refused() -> None:
    model = MLP().requires_grad_(False)
    train, val = loaders(torch.zeros(1, 20))
    with pytest.raises(ConfigError, match="no trainable parameters"):
        esper.grow(model, train, val, slots=["layer1"])


def test_importing_esper_does_not_import_torch() -> None:
    code = "import sys, esper; esper.__version__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        esper.nothing_like_it  # noqa: B018


def test_every_public_name_can_be_reached() -> None:
    for name in esper.__all__:
        assert getattr(esper, name) is not None
    assert np.isfinite(len(esper.list_slots(MLP(), torch.zeros(2, 20))))
