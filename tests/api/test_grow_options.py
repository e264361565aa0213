"""Stopping, scheduling, watching and measuring in `grow`, and batches of every shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, r2_score, roc_auc_score
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr
from torchmetrics.classification import MulticlassAccuracy

import esper
from architectures import MLP
from esper.growth.grown_module import keyed
from esper.leyline import ConfigError, EpisodeOutcome
from esper.leyline.events import Event, SeedGerminated
from esper.tolaria.engine.objectives import accuracy, prediction
from helpers import grow_arguments


def batches(n: int = 5, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    with keyed(1):
        y = torch.arange(n * size) % 5
        x = torch.randn(n * size, 20) + y[:, None]
    return list(zip(x.split(size), y.split(size), strict=True))


def mlp() -> MLP:
    with keyed(0):
        return MLP()


def run(model: nn.Module | None = None, **settings: Any) -> esper.Grown:
    data = batches()
    arguments: dict[str, Any] = {
        "train_loader": data[:3],
        "val_loader": data[3:],
        "slots": ["layer1"],
        "steps": 4,
        "controller": "static",
        "progress": False,
    }
    return esper.grow(model or mlp(), **grow_arguments(**{**arguments, **settings}))


# --- how long ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 5])
def test_steps_are_epochs(steps: int) -> None:
    passes = 0

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            nonlocal passes
            yield from super().__iter__()
            passes += 1

    loader = Counted(batches()[:3])
    before = run(train_loader=loader, steps=steps)
    assert passes == steps
    assert len(before.history) == steps


def test_patience_ends_a_run_that_gets_no_better() -> None:
    grown = run(steps=50, patience=3, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    assert len(grown.history) == 4
    assert grown.outcome.ended == "patience"
    assert grown.outcome.best_step == 0


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr("esper.api.growth_run.time.monotonic", lambda: float(next(ticks)))
    grown = run(steps=50, max_time=5.0)
    assert grown.outcome.ended == "max_time"
    assert 2 <= len(grown.history) < 10


def test_an_epoch_of_some_batches() -> None:
    seen = []

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        if model.training:
            seen.append(len(x))
        return model(x)

    run(batches_per_epoch=2, steps=3, forward=forward)
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patience": 0}, "patience must be"),
        ({"max_time": -1.0}, "max_time must be"),
        ({"batches_per_epoch": 0}, "batches_per_epoch must be"),
        ({"scheduler": lambda optimizer: None}, "the scheduler must be"),
        ({"callbacks": [object()]}, "on_epoch"),
        ({"train_loader": [(torch.zeros(2, 20),) * 3]}, "train_loader must yield"),
        ({"score": lambda outputs, targets: outputs}, "must return one number"),
        ({"score": lambda outputs, targets: outputs.nothing}, "the score does not fit"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**changes)


# --- learning rates ----------------------------------------------------------------------------


def test_a_scheduler_is_stepped_after_every_epoch() -> None:
    made = []

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        made.append(optimizer)
        return lr.ExponentialLR(optimizer, 0.5)

    run(steps=3, scheduler=scheduler)
    (optimizer,) = made
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3 * 0.5**3}


def test_a_scheduler_that_watches_the_loss() -> None:
    made = []

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        made.append(lr.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0))
        return made[0]

    run(steps=4, scheduler=scheduler)
    assert made[0].num_bad_epochs == 0
    assert made[0].optimizer.param_groups[0]["lr"] == pytest.approx(1e-7)


# --- watching ----------------------------------------------------------------------------------


class Diary(esper.Callback):
    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.events: list[Event] = []
        self.ends: list[EpisodeOutcome] = []

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def on_end(self, outcome: EpisodeOutcome) -> None:
        self.ends.append(outcome)


def test_callbacks_are_told_of_everything() -> None:
    diary = Diary()
    grown = run(callbacks=[diary], controller="scripted:early", steps=12)
    assert diary.rows == grown.history
    assert diary.events == grown.events
    assert any(isinstance(event, SeedGerminated) for event in diary.events)
    assert diary.ends == [grown.outcome]


def test_progress_is_a_line_per_epoch_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(progress=True, steps=3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"grown epoch {i}/3" for i in (1, 2, 3)]
    run(progress=False)
    assert capsys.readouterr().out == ""


def test_on_a_terminal_a_bar_is_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    run(progress=True, steps=3)
    shown = capsys.readouterr().out
    assert "3/3" in shown
    assert "epoch 1/3" not in shown


# --- scores of all validation data --------------------------------------------------------------


def by_hand(grown: esper.Grown, score: Any) -> float:
    data = batches()[3:]
    model = grown.model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(x) for x, _ in data])
    return float(score(outputs, torch.cat([y for _, y in data])))


def macro_f1(outputs: Tensor, targets: Tensor) -> float:
    return 100.0 * f1_score(targets, outputs.argmax(1), average="macro")


def auc(outputs: Tensor, targets: Tensor) -> float:
    return 100.0 * roc_auc_score(targets, outputs.softmax(1), multi_class="ovr")


@pytest.mark.parametrize("score", [macro_f1, auc])
def test_a_score_sees_all_of_the_validation_data(score: Any) -> None:
    # One batch holds a single class, for which there is no AUC.
    data = batches()[3:]
    order = torch.cat([y for _, y in data]).argsort()
    parts = (torch.cat(each)[order].split(6) for each in zip(*data, strict=True))
    grown = run(score=score, val_loader=list(zip(*parts, strict=True)))
    assert grown.outcome.val_score == pytest.approx(by_hand(grown, score))
    assert all(row["train_score"] is None for row in grown.history), "unmeasured is absent"


def test_regression_by_r2() -> None:
    with keyed(0):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.randn(80, 4)
    y = x[:, :1].sin()
    data = list(zip(x.split(20), y.split(20), strict=True))
    grown = esper.grow(
        model,
        data[:2],
        data[2:],
        slots=["0"],
        loss="mse",
        score=lambda outputs, targets: 100.0 * r2_score(targets, outputs),
        steps=4,
        settings=esper.GrowthSettings(progress=False),
    )
    with torch.no_grad():
        expected = 100.0 * r2_score(y[40:], grown.model.eval()(x[40:]))
    assert grown.outcome.val_score == pytest.approx(expected)


def test_torchmetrics_work_as_they_are() -> None:
    metric = MulticlassAccuracy(5, average="micro")
    grown = run(score=metric, controller="scripted:early", steps=10)
    assert grown.outcome.germinated == 1, "coalitions are scored apart"
    assert 100.0 * grown.outcome.val_score == pytest.approx(by_hand(grown, accuracy))
    assert metric._update_count == 0, "the user's own object is left alone"


def test_accuracy_leaves_out_what_is_to_be_ignored() -> None:
    output = torch.eye(4)[[0, 1, 2, 3, 0]]
    target = torch.tensor([0, 1, 0, -100, -100])
    assert float(accuracy(output, target)) == pytest.approx(100.0 * 2 / 3)
    with keyed(0):
        for n in (1, 7, 33, 512):
            logits, classes = torch.randn(n, 4), torch.randint(0, 4, (n,))
            plain = 100.0 * (logits.argmax(-1) == classes).float().mean()
            assert torch.equal(accuracy(logits, classes), plain), "the same bits without any"


# --- batches, targets and outputs of every shape -------------------------------------------------


@dataclass
class Output:
    hidden: Tensor
    logits: Tensor
    loss: Tensor | None = None


class Labelled(MLP):
    """As models of language are: keywords in, labels among them, a dataclass out."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(x, logits, loss)


def labelled() -> Labelled:
    with keyed(0):
        return Labelled()


def test_batches_that_are_dicts_and_outputs_that_are_dataclasses() -> None:
    data = [{"x": x, "labels": y} for x, y in batches()]
    grown = run(
        labelled(),
        train_loader=data[:3],
        val_loader=data[3:],
        loss=lambda output, batch: output.loss,
        score=lambda output, batch: (
            100.0 * (output.logits.argmax(1) == batch["labels"]).double().mean()
        ),
        controller="random",
        steps=6,
    )
    plain = run(labelled(), controller="random", steps=6)
    assert [row["val_loss"] for row in grown.history] == [row["val_loss"] for row in plain.history]
    assert [r["val_score"] for r in grown.history] == pytest.approx(
        [r["val_score"] for r in plain.history]
    )
    assert grown.outcome.germinated > 0
    grown.export()


def test_a_forward_of_ones_own() -> None:
    data = [{"pixels": x, "label": y, "id": list(range(len(y)))} for x, y in batches()]
    grown = run(
        train_loader=data[:3],
        val_loader=data[3:],
        forward=lambda model, batch: model(batch["pixels"]),
        loss=lambda output, batch: F.cross_entropy(output, batch["label"]),
        score=lambda output, batch: accuracy(output, batch["label"]),
        controller="random",
        steps=6,
    )
    plain = run(controller="random", steps=6)
    assert [row["val_loss"] for row in grown.history] == [row["val_loss"] for row in plain.history]
    exported = grown.export().eval()
    assert torch.allclose(exported(data[0]["pixels"]), grown.model.eval()(data[0]["pixels"]))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(20, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 1)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x).relu()
        return self.heads[0](hidden), self.heads[1](hidden)


@pytest.mark.parametrize("as_dict", [True, False])
def test_targets_that_are_dicts_or_tuples(as_dict: bool) -> None:
    def target(y: Tensor) -> Any:
        return {0: y, 1: y[:, None].float()} if as_dict else (y, y[:, None].float())

    data = [(x, target(y)) for x, y in batches()]
    grown = run(
        TwoHeads(),
        train_loader=data[:3],
        val_loader=data[3:],
        slots=["trunk"],
        loss=lambda output, t: F.cross_entropy(output[0], t[0]) + F.mse_loss(output[1], t[1]),
        score=lambda output, t: accuracy(output[0], t[0]),
        controller="random",
        steps=6,
    )
    assert grown.outcome.val_score is not None
    grown.export()


def test_the_prediction_in_an_output() -> None:
    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    assert prediction(x) is x
    assert prediction({"a": x, "logits": y}) is y
    assert prediction(Output(x, y)) is y
    assert prediction((x, y)) is x
    with pytest.raises(TypeError, match="holds no tensor"):
        prediction("nothing")


# --- what comes back -----------------------------------------------------------------------------


def test_a_summary_and_a_picture(tmp_path: Path) -> None:
    grown = run(controller="scripted:early", steps=14)
    shown = repr(grown)
    assert 3 <= len(shown.splitlines()) <= 8
    assert f"{grown.outcome.val_score:.2f}" in shown
    assert f"{grown.outcome.params:,} parameters" in shown
    assert all(seed.blueprint in shown for seed in grown.outcome.seeds)
    figure = grown.plot(tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    ((_, drawn),) = [line.get_data() for line in figure.axes[0].lines]
    assert list(drawn) == [row["val_score"] for row in grown.history]
