"""Seeds that are kept inside a Trainer: exported, saved, and resumed after a kill or at the end."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer

from esper.growth.export import largest_difference
from esper.leyline import ConfigError
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.transformers import GrowCallback
from growth_comparison import check_same_growth
from test_transformers import stop_after
from transformers_support import arguments, batches, grower, model_of

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]

EPOCHS, ROWS = 6, 192
SCRIPT = "1 GERMINATE r0c0 mlp linear\nauto FOSSILIZE"


def rows_of(kind: str) -> list[dict[str, Tensor]]:
    tokens = torch.randint(3, 20, (ROWS + 64, 8), generator=torch.Generator().manual_seed(0))
    for place in range(2, 8):
        tokens[:, place] = 3 + (tokens[:, place - 1] + 2 * tokens[:, place - 2]) % 17
    labels = tokens if kind == "gpt2" else tokens[:, 0] % 3
    return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


def train(kind: str, folder: Path, grow: GrowCallback, resume: bool = False) -> Trainer:
    """Only the seed and the last layers are trained, so that the seed is worth keeping."""
    rows, model = rows_of(kind), model_of(kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ln_f" in name or "classifier" in name)
    settings = {"num_train_epochs": EPOCHS, "learning_rate": 1e-2, "save_strategy": "epoch"}
    sizes = {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 64}
    trainer = Trainer(
        model,
        arguments(folder, **settings, **sizes),
        train_dataset=rows[:ROWS],
        eval_dataset=rows[ROWS:],
        callbacks=[grow],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def growing(kind: str, **changes: Any) -> GrowCallback:
    return grower(kind, controller=ScriptedController(SCRIPT, "kept"), **changes)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_kept_seed_is_exported_saved_and_resumed(kind: str, tmp_path: Path) -> None:
    whole, first, rest = (growing(kind) for _ in range(3))
    trainer = train(kind, tmp_path / "whole", whole)
    assert whole.body is not None
    outcome = whole.body.outcome
    assert outcome is not None
    assert [seed.stage for seed in outcome.seeds] == ["FOSSILIZED"]

    batch = batches(rows_of(kind)[ROWS:], 64)[0]
    plain = whole.export()
    assert largest_difference(plain, trainer.model, batch) <= 1e-5
    plain.save_pretrained(tmp_path / "saved")
    again = whole.export()
    for parameter in again.parameters():
        torch.nn.init.zeros_(parameter)
    # The saved file has the weights that two layers share once.
    missing, _ = again.load_state_dict(
        load_file(tmp_path / "saved" / "model.safetensors"), strict=False
    )
    assert set(missing) <= {"lm_head.weight"}
    assert largest_difference(plain, again, batch) == 0.0

    first.on_epoch_begin = stop_after(EPOCHS - 2)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        train(kind, tmp_path / "parts", first)
    assert first.body is not None
    assert first.body.env.garden.counts["fossilized"][0] == 1, "it was killed with a kept seed"
    train(kind, tmp_path / "parts", rest, resume=True)
    assert rest.body is not None
    assert rest.body.outcome is not None
    check_same_growth(rest.body, whole.body)
    assert rest.body.outcome.val_score == outcome.val_score


def test_a_complete_run_is_resumed_with_an_evaluation_of_the_user(tmp_path: Path) -> None:
    batch = batches(rows_of("bert")[ROWS:], 64)[0]

    def loss(model: Any) -> float:
        with torch.no_grad():
            return float(np.mean([model(**batch).loss.item()]))

    whole = growing("bert")
    train("bert", tmp_path, whole)
    with pytest.raises(ConfigError, match=r"complete.*evaluate="):
        train("bert", tmp_path, growing("bert"), resume=True)
    resumed = growing("bert", evaluate=loss)
    train("bert", tmp_path, resumed, resume=True)
    assert whole.body is not None
    assert whole.body.outcome is not None
    assert resumed.body is not None
    assert resumed.body.outcome is not None
    assert resumed.body.outcome.val_score == pytest.approx(whole.body.outcome.val_score, rel=1e-5)
