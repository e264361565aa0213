"""Growth inside a Lightning Trainer is growth in a plain loop."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor

import esper
from esper.growth.export import largest_difference
from esper.growth.sites import evaluating
from esper.leyline import ConfigError, ForgottenCallError, PackageMissingError
from esper.lightning import repeat_validation
from growth_comparison import check_same_growth
from lightning_support import CLIP, EPOCHS, Lit, data, grower, loaders, plain_loop, trainer

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_growth_is_that_of_a_plain_loop(accumulate: int, tmp_path: Path) -> None:
    module, grow = Lit(dropout=0.2), grower(module="net")
    torch.manual_seed(1)
    fit = trainer(tmp_path, grow, accumulate_grad_batches=accumulate, gradient_clip_val=CLIP)
    fit.fit(module, *loaders())
    torch.manual_seed(1)
    wanted = plain_loop(accumulate, dropout=0.2)
    assert wanted.outcome is not None
    assert wanted.outcome.germinated > 0
    contributions = [row["layer1.contribution"] for row in wanted.history]
    assert any(value is not None for value in contributions), "seeds were measured"
    check_same_growth(grow.body, wanted)
    rates = {group["lr"] for group in fit.optimizers[0].param_groups}
    assert rates == {0.0}, "the schedule reached the seeds too"


class Logs(Lit):
    """Logs in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.classification.MulticlassAccuracy(5)
        self.by_hand = torchmetrics.classification.MulticlassAccuracy(5)

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        output = self(x)
        self.metric(output, y)
        self.by_hand.update(output, y)
        self.log("metric", self.metric)
        self.log("loss", F.cross_entropy(output, y), True, on_step=True, on_epoch=True)
        right = (output.argmax(1) == y).float().mean()
        self.log_dict({"val_acc": right, "twice": 2 * right}, batch_size=len(x))
        self.log("unweighted", right, batch_size=1)
        self.log("largest", right, reduce_fx="max")
        self.log("sum", right, reduce_fx=torch.sum)

    def on_validation_epoch_end(self) -> None:
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()


@pytest.mark.parametrize("several", [False, True])
def test_validation_is_repeated_as_the_trainer_does_it(several: bool, tmp_path: Path) -> None:
    found: list[dict[str, float]] = []

    class Look(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            wanted = {k: float(v) for k, v in trainer.callback_metrics.items()}
            again = repeat_validation(trainer, pl_module)
            for _ in range(2):
                assert again == pytest.approx(
                    {k: v for k, v in wanted.items() if "step" not in k and k in again}
                )
                again = repeat_validation(trainer, pl_module)
            found.append(again)

    train, val = loaders()
    look = trainer(tmp_path, Look(), max_epochs=1, num_sanity_val_steps=0, limit_val_batches=2)
    look.fit(Logs(), train, [val, val] if several else val)
    names = set(found[0])
    ends = {name.split("/")[0] for name in names}
    assert ends == {
        *("metric", "loss", "val_acc", "twice", "unweighted", "largest", "sum", "by_hand")
    }
    assert ("val_acc/dataloader_idx_1" in names) is several


def test_a_checkpoint_goes_on_with_the_growth(tmp_path: Path) -> None:
    whole = grower()
    trainer(tmp_path, whole).fit(Lit(), *loaders())
    saved = ModelCheckpoint(tmp_path, filename="half", save_top_k=-1)
    first = trainer(tmp_path, grower(steps=EPOCHS), saved, max_epochs=9, enable_checkpointing=True)
    first.fit(Lit(), *loaders())
    half = sorted(tmp_path.glob("half*.ckpt"), key=lambda path: path.stat().st_mtime_ns)[-1]
    module, rest = Lit(), grower()
    trainer(tmp_path, rest).fit(module, *loaders(), ckpt_path=str(half))
    assert torch.load(half, weights_only=True)["callbacks"]["Grow"]["history"]
    check_same_growth(rest.body, whole.body)
    seeds = [dict(body.model.slots.named_parameters()) for body in (rest.body, whole.body)]
    assert seeds[0]
    torch.testing.assert_close(seeds[0], seeds[1])


class Outputs(Callback):
    """What the live module gives after each epoch."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        with evaluating(pl_module):
            self.seen.append(pl_module(data()[0]))


def test_a_checkpoint_is_tested_with_its_seeds(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    grow, live = grower(), Outputs()
    trainer(tmp_path, grow, live, saved, enable_checkpointing=True).fit(Lit(), *loaders())
    for epoch in (0, EPOCHS - 1):
        module, path = Lit(), str(tmp_path / f"epoch={epoch}.ckpt")
        trainer(tmp_path, grower()).test(module, loaders()[1], ckpt_path=path, verbose=False)
        torch.testing.assert_close(module(data()[0]), live.seen[epoch])
        # The callback that has fitted can go back, too.
        host = grow.body.model.host
        trainer(tmp_path, grow).test(host, loaders()[1], ckpt_path=path, verbose=False)
        torch.testing.assert_close(host(data()[0]), live.seen[epoch])
    without = Lit()
    without.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    assert (without(data()[0]) - live.seen[-1]).abs().max() > 1e-3, "the seeds matter"


def test_precision_early_stopping_and_export(tmp_path: Path) -> None:
    module, grow = Lit(rate=1e-2), grower(mode="max")
    stopping = EarlyStopping("val_acc", mode="max", patience=3, min_delta=100.0)
    fit = trainer(tmp_path, grow, stopping, precision="bf16-mixed", max_epochs=30)
    fit.fit(module, *loaders())
    assert len(grow.body.history) == 4, "stopped three epochs after the first"
    assert grow.body.outcome is not None
    plain = grow.export()
    assert largest_difference(plain, module, data()[0][:8]) <= 1e-5
    assert not any("esper" in type(part).__module__ for part in plain.modules())
    with pytest.raises(ForgottenCallError, match=r"trainer\.fit was never called"):
        grower().export()


def test_a_seed_grows_in_mixed_precision(tmp_path: Path) -> None:
    grow = grower(mode="min", monitor="val_loss", module="net")

    class ByLoss(Lit):
        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("val_loss", F.cross_entropy(self(x), y))

    trainer(tmp_path, grow, precision="bf16-mixed").fit(ByLoss(), *loaders())
    assert grow.body.outcome.germinated > 0
    assert all(row["val_score"] < 0 for row in grow.body.history), "lower is better"
    assert largest_difference(grow.export(), grow.body.model, data()[0][:8]) <= 1e-5


class Dreams(Lit):
    """Its validation is another one each time."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_acc", 50.0 + 10.0 * torch.rand(()))


def test_a_validation_that_differs_is_told(tmp_path: Path) -> None:
    with pytest.warns(esper.EsperWarning, match="and its repetition"):
        trainer(tmp_path, grower(), max_epochs=2).fit(Dreams(), *loaders())


class Two(Lit):
    def configure_optimizers(self) -> Any:
        first, second = (torch.optim.SGD(p.parameters(), 0.1) for p in (self.net.layer1, self.net))
        return first, second

    def training_step(self, batch: Any, index: int) -> None: ...

    automatic_optimization = False


class Unlogged(Lit):
    def validation_step(self, batch: Any, index: int) -> Tensor:
        self.log("val_loss", 1.0)
        return torch.zeros(())


BAD: list[tuple[type[Lit], dict[str, Any], dict[str, Any], str]] = [
    (Lit, {"slots": ["layer9"]}, {}, "layer9"),
    (Unlogged, {}, {}, r"no metric 'val_acc' \(there are val_loss\); log it"),
    (Lit, {"example": None}, {}, "example_input_array"),
    (Lit, {"module": "body"}, {}, "Lit has no module 'body'; it has net"),
    (Lit, {}, {"limit_val_batches": 0}, "Grow needs validation"),
    (Lit, {}, {"val_check_interval": 0.5}, "as steps="),
    (Lit, {}, {"max_epochs": -1}, "as steps="),
    (Lit, {}, {"callbacks": [ModelCheckpoint(save_weights_only=True)]}, "saves no seeds"),
    (Two, {}, {}, "configure_optimizers gave 2"),
    (Lit, {"controller": "wise"}, {}, "no controller 'wise'"),
]


@pytest.mark.parametrize(("kind", "settings", "changes", "message"), BAD)
def test_bad_input_is_one_sentence_before_anything_is_trained(
    kind: type[Lit], settings: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    module = kind()
    before = [parameter.clone() for parameter in module.parameters()]
    more = changes.pop("callbacks", [])
    checkpoints = {"enable_checkpointing": bool(more)}
    fit = trainer(tmp_path, grower(**settings), *more, **checkpoints, **changes)
    with pytest.raises(ConfigError, match=message) as error:
        fit.fit(module, *loaders())
    assert "\n" not in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_bad_settings_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="mode must be 'max' or 'min', got 'best'"):
        grower(mode="best")
    with pytest.raises(ConfigError, match="monitor must be the name of a metric, got int"):
        grower(monitor=3)


def test_without_lightning_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "esper.lightning")
    for name in [n for n in sys.modules if n.split(".")[0] == "lightning"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PackageMissingError, match=r"pip install 'esper-grow\[lightning\]'"):
        __import__("esper.lightning")
