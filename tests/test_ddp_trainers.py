"""Growth in two processes inside the Trainers of Lightning and Hugging Face is growth in one."""

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from ddp_support import digest, run
from esper.leyline import ConfigError
from growth_comparison import check_close

pytestmark = pytest.mark.heavy


def environment(rank: int, size: int) -> None:
    """What torchrun sets; the processes form a group already."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )


def summary(body: Any) -> dict[str, Any]:
    tensors = [*body.model.named_parameters(), *body.model.named_buffers()]
    return {
        "history": body.history,
        "events": [event.row() for event in body.recorder.events],
        "digest": digest(tensors),
    }


def check_same(first: dict[str, Any], second: dict[str, Any], one: dict[str, Any]) -> None:
    assert first == second
    for name in ("history", "events"):
        for mine, wanted in zip(first[name], one[name], strict=True):
            check_close(mine, wanted, 1e-6)


def fit(rank: int, size: int, folder: Path, parts: int = 1) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from lightning_support import CLIP, EPOCHS, Lit, data, grower, trainer

    class Both(Lit):
        """Logs what each process measures, and what all do."""

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            right = 100.0 * (self(x).argmax(1) == y).double().mean()
            self.log("val_acc", right)
            self.log("all_acc", right, sync_dist=True)

    if size > 1:
        environment(rank, size)
    x, y = data()
    # A sampler of Lightning's own would shuffle.
    train_set = TensorDataset(x[:76].double(), y[:76])
    own = DistributedSampler(train_set, size, rank, shuffle=False) if size > 1 else None
    train = DataLoader(train_set, 40 // size, sampler=own)
    val = DataLoader(TensorDataset(x[76:120].double(), y[76:120]), 12)
    path = None
    for part in range(parts):
        grow = grower(module="net", steps=EPOCHS, monitor="all_acc" if parts == 1 else "val_acc")
        last = part == parts - 1
        saves = ModelCheckpoint(folder / f"{size}", save_last=True)
        fit = trainer(
            folder,
            grow,
            *([saves] if parts > 1 else []),
            strategy="ddp" if size > 1 else "auto",
            devices=size,
            max_epochs=EPOCHS if last else 7,
            accumulate_grad_batches=2,
            gradient_clip_val=CLIP,
            precision="64-true",
            enable_checkpointing=parts > 1,
        )
        with warnings.catch_warnings(record=True) as told:
            fit.fit(Both(), train, val, ckpt_path=path, weights_only=True)
        assert not [w for w in told if "repetition" in str(w.message)]
        path = saves.last_model_path or None
    assert isinstance(fit, pl.Trainer)
    return summary(grow.body)


def all_fits(rank: int, folder: Path) -> list[dict[str, Any]]:
    """In one process, because the import of Lightning takes most of the time."""
    return [fit(rank, 2, folder / str(parts), parts) for parts in (1, 2)]


def test_lightning_grows_in_two_processes_like_in_one(tmp_path: Path) -> None:
    first, second = run(all_fits, tmp_path)
    one = fit(0, 1, tmp_path)
    for mine, other in zip(first, second, strict=True):
        check_same(mine, other, one)
        assert any(row["layer1.contribution"] is not None for row in mine["history"])


def train(
    rank: int, size: int, folder: Path, parts: int = 1, averaged: bool = False
) -> dict[str, Any]:
    from transformers import Trainer

    from transformers_support import accuracy, arguments, data, grower, model_of

    if size > 1:
        environment(rank, size)
    train_rows, val_rows = data("bert")
    given: dict[str, Any] = {
        "per_device_train_batch_size": 8 // size,
        "gradient_accumulation_steps": 2,
        "save_strategy": "epoch" if parts > 1 else "no",
        # With True the Trainer multiplies all losses by the number of processes.
        "average_tokens_across_devices": averaged,
    }
    # Without parts the last evaluation batches are filled up, and so repeat rows.
    own = {"monitor": "eval_accuracy", "compute_metrics": accuracy} if parts == 1 else {}
    for part in range(parts):
        grow = grower("bert", **own)
        if part < parts - 1:
            grow.on_epoch_end = stop_after(3)  # type: ignore[method-assign]
        with warnings.catch_warnings(record=True) as told:
            Trainer(
                model_of("bert").double(),
                arguments(folder / f"{size}", **given),
                train_dataset=train_rows[:40],
                eval_dataset=val_rows if parts == 1 else train_rows[40:] + val_rows,
                compute_metrics=accuracy if parts == 1 else None,
                callbacks=[grow],
            ).train(resume_from_checkpoint=part > 0 or None)
        assert not [w for w in told if "repetition" in str(w.message)]
    return summary(grow.body)


def stop_after(epochs: int) -> Any:
    def hook(args: Any, state: Any, control: Any, **parts: Any) -> None:
        control.should_training_stop = round(state.epoch or 0) >= epochs + 1

    return hook


def all_trainings(rank: int, folder: Path) -> list[dict[str, Any]]:
    given = enumerate([(1, False), (2, False), (2, True)])
    return [train(rank, 2, folder / str(number), *each) for number, each in given]


def test_transformers_grow_in_two_processes_like_in_one(tmp_path: Path) -> None:
    (whole, resumed, scaled), others = run(all_trainings, tmp_path)
    check_same(whole, others[0], train(0, 1, tmp_path, 1))
    check_same(resumed, others[1], train(0, 1, tmp_path, 2))
    assert scaled == others[2]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"n_gpu": 2}, "torchrun"),
        ({"fsdp": ["full_shard"]}, "fsdp"),
        ({"deepspeed": "settings.json"}, "deepspeed"),
    ],
)
def test_transformers_with_a_split_model_is_refused(changes: dict[str, Any], word: str) -> None:
    """Its arguments cannot be made without these devices."""
    from esper.transformers import GrowCallback

    args = SimpleNamespace(**{"n_gpu": 0, "fsdp": [], "deepspeed": None, **changes})
    with pytest.raises(ConfigError, match=word):
        GrowCallback(slots=["1"]).on_train_begin(args, None, None, model=nn.Identity())


def test_lightning_with_a_split_model_is_refused() -> None:
    """Its Trainer cannot be made without these devices."""
    from lightning.pytorch.strategies import FSDPStrategy

    from esper.lightning import Grow

    trainer: Any = SimpleNamespace(optimizers=[None], world_size=2, strategy=FSDPStrategy())
    with pytest.raises(ConfigError, match="FSDPStrategy"):
        Grow(slots=["1"], monitor="x").on_fit_start(trainer, None)  # type: ignore[arg-type]
