"""Mistakes that would end in silence end in a sentence: an error, or a warning that is heard once
and stands in the record."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import esper
from architectures import MLP
from esper.api import find_controller, warn_if_out_of_domain
from esper.api.growth_warnings import HOPELESS
from esper.growth.grown_module import keyed
from esper.leyline import ConfigError, EsperWarning
from esper.leyline.events import Warned
from esper.observatory.run_directory import read_rows
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_specs import space_of
from esper.simic.training.policy_controller import LearnedController
from esper.simic.training.state import new_state
from esper.tamiyo.situation import Situation, wait
from esper.tolaria.engine import batches
from esper.tolaria.engine.objectives import accuracy, negative_mse
from esper.tolaria.tasks import find_task
from helpers import grow_arguments

Batches = list[tuple[Tensor, Tensor]]


def data(classes: int = 5, size: int = 120) -> tuple[Batches, Batches]:
    with keyed(0):
        y = torch.arange(size) % classes
        x = torch.randn(size, 20) + 0.4 * y[:, None]
    return list(zip(x.split(20), y.split(20), strict=True))[:-2], [(x[-40:], y[-40:])]


def grow(**changes: Any) -> esper.Grown:
    train, val = data()
    with keyed(0):
        model = MLP()
    arguments: dict[str, Any] = {
        "train_loader": train, "val_loader": val, "slots": ["layer1", "layer2"], "steps": 4,
        "controller": "static",
    }  # fmt: skip
    return esper.grow(model, **grow_arguments(**{**arguments, **changes}))


def told(grown: esper.Grown) -> list[str]:
    return [event.message for event in grown.events if isinstance(event, Warned)]


# --- loaders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train_loader", "val_loader"])
@pytest.mark.parametrize("endless", [False, True])
def test_a_generator_is_no_loader(name: str, endless: bool) -> None:
    batch = data()[1]
    generator: Iterator[Any] = itertools.cycle(batch) if endless else (pair for pair in batch)
    with pytest.raises(ConfigError, match=f"{name} is a generator.*such as a list or a DataLoader"):
        grow(**{name: generator})


def test_a_data_set_is_no_loader() -> None:
    with pytest.raises(ConfigError, match="into a DataLoader"):
        grow(train_loader=[(torch.zeros(20), 3), (torch.zeros(20), 1)])


class Unmeasured:
    """Batches without a length, as an IterableDataset has them."""

    def __init__(self, source: Batches, passes: int) -> None:
        self.source, self.passes = source, passes

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable([self.source] * self.passes)


class Stream(IterableDataset[Any]):
    """The same, one by one."""

    def __iter__(self) -> Iterator[Any]:
        return (pair for x, y in data()[1] * 6 for pair in zip(x, y, strict=True))


@pytest.mark.parametrize("loader", [Unmeasured(data()[1], 6), DataLoader(Stream(), batch_size=40)])
@pytest.mark.parametrize("name", ["train_loader", "val_loader"])
def test_a_loader_that_may_never_end_is_told_of(
    name: str, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "LONG_EPOCH", 5)
    with pytest.warns(EsperWarning, match=f"{name} has no length.*batches_per_epoch"):
        grow(**{name: loader}, steps=2)


def test_a_loader_with_a_length_may_be_as_long_as_it_likes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "LONG_EPOCH", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EsperWarning)
        grow(steps=2)


# --- objectives ------------------------------------------------------------------------------


class OneOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(20, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(torch.relu(self.layer1(x)))


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        (torch.rand(6, 1), {"loss": "mse"}, "'accuracy' counts right classes.*negative_mse"),
        (torch.rand(6, 1), {"loss": F.mse_loss}, "'accuracy' counts right classes"),
        (torch.ones(6, 1), {"loss": "bce_with_logits"}, "counts right classes.*binary_accuracy"),
        (torch.ones(6, 1).long(), {"loss": lambda o, t: o.mean()}, "has one.*binary_accuracy"),
        (torch.ones(6).long(), {"loss": lambda o, t: o.mean()}, "has one; give score="),
        (
            torch.rand(6),
            {"loss": "mse", "score": "negative_mse"},
            r"mse compares them one by one.*\(6, 1\) and \(6,\)",
        ),
        (
            torch.ones(6),
            {"loss": lambda o, t: o.mean(), "score": "binary_accuracy"},
            "the score does not fit.*binary_accuracy compares",
        ),
    ],
)
def test_a_score_that_means_nothing_is_refused(
    target: Tensor, changes: dict[str, Any], message: str
) -> None:
    loader = [(torch.rand(6, 20), target)]
    with pytest.raises(ConfigError, match=message):
        esper.grow(OneOutput(), loader, loader, slots=["layer1"], steps=2, **changes)


# --- no scale is wrong -----------------------------------------------------------------------


def decisions(score: Callable[[Tensor, Tensor], Tensor], **changes: Any) -> list[Any]:
    grown = grow(
        score=score, controller="heuristic", steps=24,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3), **changes,
    )  # fmt: skip
    assert grown.outcome.germinated > 0
    row = [(r["op"], r["slot"], r["blueprint"], r["plateau_epochs"]) for r in grown.history]
    outcome = grown.outcome
    return [row, outcome.culled, outcome.rollbacks, outcome.best_step, outcome.params]


def test_a_share_is_as_good_as_a_percentage() -> None:
    percentage = decisions(lambda output, target: accuracy(output, target))
    share = decisions(lambda output, target: 0.01 * accuracy(output, target))
    assert share == percentage
    assert any(op == "FOSSILIZE" for op, *_ in percentage[0]), "the gate was passed"


@pytest.mark.parametrize(("scale", "shift"), [(1e-4, 0.0), (1e4, 0.0), (1.0, 1000.0), (1e-3, 7.0)])
def test_the_scale_of_a_regression_does_not_matter(scale: float, shift: float) -> None:
    train, val = (
        [(x, F.one_hot(y, 5).float()) for x, y in part] for part in data()
    )  # fmt: skip
    loaders = {"train_loader": train, "val_loader": val, "loss": "mse"}
    usual = decisions(negative_mse, **loaders)
    other = decisions(lambda o, t: scale * negative_mse(o.double(), t.double()) + shift, **loaders)
    exact = decisions(lambda o, t: negative_mse(o.double(), t.double()), **loaders)
    assert other == exact
    assert usual == exact


# --- nothing learnt, nothing grown -----------------------------------------------------------


class Waiting:
    name = "patient"

    def reset(self, n_envs: int) -> None:
        pass

    def act(self, situation: Situation) -> np.ndarray:
        return wait(situation.n_envs)


def broken_data() -> Batches:
    train, _ = data()
    spoilt = train[2][0].clone()
    spoilt[3, 4] = torch.nan
    train[2] = (spoilt, train[2][1])
    return train


def test_one_row_of_nan_ends_the_run_with_its_place(tmp_path: Path) -> None:
    with (
        pytest.warns(EsperWarning, match="epochs 0 and 1 .*batch 3 of train_loader"),
        pytest.raises(ConfigError, match=f"first {HOPELESS} epochs.*batch 3 of train_loader"),
    ):
        grow(train_loader=broken_data(), steps=20, out=tmp_path / "run")
    rows = list(read_rows(tmp_path / "run" / "events.jsonl"))
    assert sum(row["event"] == "Warned" for row in rows) == 1
    assert len(list(read_rows(tmp_path / "run" / "metrics.jsonl"))) == HOPELESS


def test_a_short_run_that_was_always_rolled_back_warns() -> None:
    with pytest.warns(EsperWarning, match="both rolled back"):
        grown = grow(train_loader=broken_data(), steps=2)
    assert len(told(grown)) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"controller": "heuristic", "steps": 4}, "in the first 6 epochs, and there were only 4"),
        (
            {"controller": "heuristic", "steps": 7, "score": lambda o, t: next(RISING)},
            "rose by more than its noise.*train for longer",
        ),
        (
            {"controller": Waiting(), "steps": 2},
            "patient chose none in 2 epochs",
        ),
    ],
)
def test_a_run_without_seeds_says_why(changes: dict[str, Any], why: str) -> None:
    with pytest.warns(EsperWarning, match=f"no seed was planted: .*{why}"):
        grown = grow(**changes)
    assert len(told(grown)) == 1


RISING = (torch.tensor(2.0**power) for power in itertools.count(0.0, 0.02))


def test_a_controller_that_never_grows_is_not_asked_why() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EsperWarning)
        assert told(grow()) == []


@pytest.mark.parametrize("cap", [{"params": 1.001}, {"params": 1.0, "macs": 1.0}])
def test_a_budget_under_which_nothing_fits_is_refused_with_the_least_that_does(
    cap: dict[str, float], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"too small for any seed.*needs params=1\.\d+ and macs="):
        grow(budget=esper.Budget(**cap), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_least_budget_that_is_named_is_enough() -> None:
    with pytest.raises(ConfigError) as refusal:
        grow(budget=esper.Budget(params=1.0))
    least = float(str(refusal.value).split("params=")[1].split()[0])
    grow(budget=esper.Budget(params=least), steps=2)


# --- controllers and optimizers --------------------------------------------------------------


def test_a_policy_for_another_task_is_told_of() -> None:
    state = new_state(TrainingConfig(), space_of(find_task("digits")))
    policy = LearnedController(state, "runs/first")
    with pytest.warns(
        EsperWarning, match="runs/first was trained on the task 'digits', not on MLP"
    ):
        grow(controller=policy, slots=["layer1", "layer2", "head"], steps=2)


def test_a_policy_that_knows_trained_networks_only_says_so_of_a_fresh_one() -> None:
    policy = find_controller("pretrained")
    with pytest.warns(EsperWarning, match="networks that start trained, and this one starts fresh"):
        warn_if_out_of_domain(policy, "digits", "fresh")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_out_of_domain(policy, "digits", "trained")
        warn_if_out_of_domain(policy, "digits")
        warn_if_out_of_domain(find_controller("heuristic"), "digits", "fresh")


def other_model() -> torch.optim.Optimizer:
    return torch.optim.SGD(MLP().parameters(), lr=0.1)


@pytest.mark.parametrize("optimizer", [other_model(), lambda params: other_model()])
def test_an_optimizer_of_another_model_is_refused(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match="trains none of the model's parameters"):
        grow(optimizer=optimizer)


def test_what_makes_an_optimizer_must_make_one() -> None:
    with pytest.raises(ConfigError, match="optimizer must be a torch optimizer, got NoneType"):
        grow(optimizer=lambda params: None)


class Loop:
    """A loop of the user's own, with a seed planted before its second epoch."""

    def __init__(self, script: Path, rates: tuple[float, float] = (1e-3, 1e-3)) -> None:
        with keyed(0):
            self.model = MLP()
        first, *others = self.model.children()
        groups = [
            {"params": list(first.parameters()), "lr": rates[0]},
            {"params": [p for part in others for p in part.parameters()], "lr": rates[1]},
        ]
        self.optimizer = torch.optim.SGD(groups)
        script.write_text("1 GERMINATE layer1 mlp_small linear\n")
        self.train, ((self.x, self.y),) = data()
        self.body = esper.attach(
            self.model, slots=["layer1"], example=self.x, evaluate=self.score, steps=9,
            controller=f"scripted:{script}",
        )  # fmt: skip

    def score(self) -> float:
        with torch.no_grad():
            return float(accuracy(self.model(self.x), self.y))

    def epoch(self) -> None:
        for x, y in self.train:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        self.body.step(self.score())


def test_seeds_with_the_rate_of_a_backbone_are_told_of(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "script", rates=(1e-6, 1e-3))
    with pytest.warns(EsperWarning, match=r"first group, 1e-06.*another group has 0.001.*seed_lr"):
        loop.body.manage(loop.optimizer)


@pytest.mark.parametrize("rates", [(1e-3, 1e-3), (1e-3, 1e-6), (1e-3, 5e-3)])
def test_usual_rates_are_not(tmp_path: Path, rates: tuple[float, float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EsperWarning)
        loop = Loop(tmp_path / "script", rates)
        loop.body.manage(loop.optimizer)


def test_an_evaluation_that_returns_nothing_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "script")
    loop.body.manage(loop.optimizer)
    loop.body.host.user_evaluate = lambda: None  # type: ignore[assignment,return-value]
    for _ in range(5):
        loop.epoch()
    with pytest.raises(ConfigError, match=r"evaluate\(\) must be one number, got None"):
        loop.epoch()


# --- copies ----------------------------------------------------------------------------------


def test_the_state_of_a_grown_model_is_not_all_of_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "script")
    loop.body.manage(loop.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EsperWarning)
        loop.model.state_dict()
        loop.epoch()
        assert len(loop.body.model.state_dict()) > len(list(loop.model.parameters()))
    with pytest.warns(EsperWarning, match="holds none of the seeds.*body.model"):
        loop.model.state_dict()
    loop.body.model.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error", EsperWarning)
        loop.model.state_dict()
