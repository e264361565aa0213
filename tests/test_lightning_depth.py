"""Growth in depth inside a Lightning Trainer: resumed from any checkpoint, tested, exported."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import esper
from depth_support import Net, net, rows
from esper.leyline import ConfigError
from esper.lightning import BLOCKS_ALONE, Grow
from lightning_support import trainer

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
EPOCHS = 6
DEPTHS = {
    "start": esper.Depth("blocks", start=1, when=[0.2, 0.5]),
    "fresh": esper.Depth("blocks", start=2, birth="fresh", when=0.4),
    "frozen": esper.Depth("blocks", add=2, freeze_host=True),
}


class Deep(pl.LightningModule):
    """With groups of its own, and a score that keeps all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        for block in self.net.blocks:
            block.dropout.p = 0.0

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_blocks", float(len(self.net.blocks)))

    def test_step(self, batch: Any, index: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() <= 1]},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


def loaders() -> tuple[Any, Any]:
    x, y = rows()
    return DataLoader(TensorDataset(x[:60], y[:60]), 20), DataLoader(TensorDataset(x[60:], y[60:]))


def grower(name: str) -> Grow:
    return Grow(
        depth=DEPTHS[name],
        monitor="val_blocks",
        module="net",
        example=rows()[0][:4],
        steps=EPOCHS,
        settings=esper.GrowthSettings(blending_steps=2, keep_best=False),
    )


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("name", DEPTHS)
def test_training_goes_on_from_checkpoints_before_and_after_growth(
    name: str, tmp_path: Path
) -> None:
    saved = [
        ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1),
        ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=2),
    ]
    module, whole = Deep(), grower(name)
    run = trainer(tmp_path, whole, *saved, max_epochs=EPOCHS, enable_checkpointing=True)
    run.fit(module, *loaders())
    assert len(module.net.blocks) == (6 if name == "frozen" else 4)
    held = [id(p) for group in run.optimizers[0].param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in module.parameters())
    expected = {key: value.clone() for key, value in module.state_dict().items()}
    for epoch in (0, 3):
        path = str(tmp_path / f"epoch={epoch}.ckpt")
        Deep().load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        again, rest = Deep(), grower(name)
        trainer(tmp_path, rest, max_epochs=EPOCHS).fit(again, *loaders(), ckpt_path=path)
        assert rest.body is not None
        assert whole.body is not None
        assert rest.body.history == whole.body.history
        assert_equal(again.state_dict(), expected)
    # A new callback, and the one that has fitted, go back to a checkpoint.
    for each, tested in ((grower(name), Deep()), (whole, module)):
        tester = trainer(tmp_path, each)
        tester.test(tested, loaders()[1], ckpt_path=path, verbose=False)
        assert len(tested.net.blocks) == {"start": 2, "fresh": 4, "frozen": 6}[name]
    plain: Any = whole.export()
    Net(plain.n_layers).load_state_dict(plain.state_dict())


@pytest.mark.parametrize("name", DEPTHS)
def test_a_checkpoint_before_the_first_validation(name: str, tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=2)
    first = trainer(tmp_path, grower(name), saved, max_steps=2, enable_checkpointing=True)
    first.fit(Deep(), *loaders())
    path = str(tmp_path / "step=2.ckpt")
    (state,) = (
        own
        for own in torch.load(path, weights_only=True)["callbacks"].values()
        if BLOCKS_ALONE in own
    )
    module = Deep()
    trainer(tmp_path, grower(name), max_steps=2).fit(module, *loaders(), ckpt_path=path)
    assert_equal(module.net.state_dict(), state[BLOCKS_ALONE])


def test_slots_depth_and_monitor_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="either slots or depth"):
        Grow(["net.stem"], "val_blocks", depth="net.blocks")
    with pytest.raises(ConfigError, match="monitor must be the name of a metric"):
        Grow(depth="net.blocks")
