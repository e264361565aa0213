"""Growth inside a Trainer of Hugging Face is growth in a plain loop."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import esper
from esper.growth.export import largest_difference
from esper.leyline import ConfigError, ForgottenCallError, PackageMissingError, SeedStage
from esper.transformers import GrowCallback, blueprints_inside
from growth_comparison import check_same_growth
from transformers_support import (
    EPOCHS,
    SLOTS,
    accuracy,
    batches,
    data,
    grower,
    model_of,
    plain_loop,
    train,
)

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]


@pytest.mark.parametrize(("kind", "accumulate"), [("bert", 1), ("gpt2", 2)])
def test_growth_is_that_of_a_plain_loop(kind: str, accumulate: int, tmp_path: Path) -> None:
    grow = grower(kind)
    with warnings.catch_warnings(record=True) as told:
        trainer = train(kind, tmp_path, grow, gradient_accumulation_steps=accumulate)
    wanted = plain_loop(kind, accumulate)
    assert wanted.outcome is not None
    assert wanted.outcome.germinated == 1
    seen = [row[f"{SLOTS[kind]}.contribution"] for row in wanted.history]
    assert any(value is not None for value in seen), "the seed was measured"
    assert len(wanted.history) == EPOCHS
    assert grow.body is not None
    check_same_growth(grow.body, wanted)
    assert not [w for w in told if "repetition" in str(w.message)]
    groups = trainer.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1], "groups are kept"
    assert {group["lr"] for group in groups} == {0.0}, "the schedule reached the seeds too"


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole, first, rest = (grower("bert") for _ in range(3))
    train("bert", tmp_path / "whole", whole)
    # Killed after an epoch in which the seed was being blended in.
    first.on_epoch_begin = stop_after(3)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        train("bert", tmp_path / "parts", first, save_strategy="epoch")
    trainer = train("bert", tmp_path / "parts", rest, resume=True)
    assert rest.body is not None
    assert whole.body is not None
    check_same_growth(rest.body, whole.body)
    acted = [row[f"{SLOTS['bert']}.alpha"] for row in whole.body.history]
    assert acted[2:4] == [1.0, 1.0], "it was stopped while the seed acted"
    assert trainer.state.global_step == EPOCHS * 6
    # What the Trainer itself has saved is what it would be without seeds.
    (newest,) = [p for p in (tmp_path / "parts").iterdir() if p.name.endswith("-18")]
    saved = torch.load(newest / "optimizer.pt", weights_only=True)
    assert len(saved["param_groups"]) == 2
    assert len(saved["state"]) == len(list(model_of("bert").parameters()))


def stop_after(epochs: int) -> Any:
    def hook(args: Any, state: Any, control: Any, **parts: Any) -> None:
        if round(state.epoch or 0) == epochs:
            raise KeyboardInterrupt

    return hook


def test_a_checkpoint_elsewhere_is_found_and_another_is_refused(tmp_path: Path) -> None:
    train("bert", tmp_path / "a", grower("bert"), save_strategy="epoch", num_train_epochs=2)
    (tmp_path / "a").rename(tmp_path / "moved")
    old, new = (tmp_path / "moved" / f"checkpoint-{step}" for step in (6, 12))
    with pytest.raises(ConfigError, match=r"no .*esper\.pt; give"):
        train("bert", tmp_path / "a", grower("bert"), resume=str(old), num_train_epochs=2)
    with pytest.raises(ConfigError, match="is of step 12, but training resumes from step 6"):
        train(
            "bert",
            tmp_path / "a",
            grower("bert", resume_from=new),
            resume=str(old),
            num_train_epochs=2,
        )
    grow = grower("bert", resume_from=old)
    train("bert", tmp_path / "a", grow, resume=str(old), num_train_epochs=2)
    assert grow.body is not None
    assert len(grow.body.history) == 2


def test_the_exported_model_is_theirs_and_saves_itself(tmp_path: Path) -> None:
    grow = grower(
        "bert",
        monitor="eval_accuracy",
        compute_metrics=accuracy,
        budget=esper.Budget(params=1.5),
    )
    trainer = train("bert", tmp_path, grow, compute_metrics=accuracy)
    assert grow.body is not None
    outcome = grow.body.outcome
    assert outcome is not None
    assert outcome.params <= 1.5 * outcome.host_params
    found = trainer.evaluate()
    assert found["eval_accuracy"] == pytest.approx(outcome.val_score)
    assert len(grow.body.history) == EPOCHS, "an evaluation after the end is no step"
    plain = grow.export()
    example = batches(data("bert")[1], 8)[0]
    assert type(plain) is type(model_of("bert"))
    assert largest_difference(plain, trainer.model, example) <= 1e-5
    assert not any("esper" in type(part).__module__ for part in plain.modules())
    plain.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(plain.state_dict())
    again = grow.export()
    for parameter in again.parameters():
        torch.nn.init.zeros_(parameter)
    again.load_state_dict(saved)
    assert largest_difference(plain, again, example) == 0.0
    live = esper.load(grow.save(tmp_path / "live"), model_of("bert"), blueprints_inside())
    assert largest_difference(plain, live, example) <= 1e-5


def test_only_seeds_and_head_train_in_a_frozen_backbone(tmp_path: Path) -> None:
    model = model_of("bert")
    model.bert.requires_grad_(False)
    before = {name: p.clone() for name, p in model.bert.named_parameters()}
    grow = grower("bert")
    train("bert", tmp_path, grow, model=model)
    assert grow.body is not None
    assert grow.body.outcome is not None
    assert grow.body.outcome.germinated == 1
    assert all(torch.equal(p, before[name]) for name, p in model.bert.named_parameters())
    ratios = [row[f"{SLOTS['bert']}.gradient_ratio"] for row in grow.body.history]
    assert any(ratio is not None and ratio > 0 for ratio in ratios), "the seed learns"


def test_a_seed_of_a_language_model_does_not_look_ahead(tmp_path: Path) -> None:
    grow = grower("gpt2", controller="static")
    train("gpt2", tmp_path, grow, num_train_epochs=2)
    assert grow.body is not None
    model = grow.body.model
    model.germinate(0, model.catalogue.index("attention"), 0, key=1)
    model.set_blend(0, SeedStage.HOLDING, 1.0)
    tokens = torch.randint(0, 20, (1, 8))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 20
    with torch.no_grad():
        for parameter in model.seed_parameters(0):
            parameter.normal_()
        one, other = model(tokens).logits, model(changed).logits
    assert torch.equal(one[:, :-1], other[:, :-1])
    assert not torch.equal(one[:, -1], other[:, -1])


def test_an_evaluation_that_differs_is_told(tmp_path: Path) -> None:
    calls = iter(range(100))

    def dreams(prediction: Any) -> dict[str, float]:
        return {"mood": float(next(calls))}

    grow = grower("bert", monitor="eval_mood", compute_metrics=dreams)
    with pytest.warns(esper.EsperWarning, match="repetition"):
        train("bert", tmp_path, grow, compute_metrics=dreams, num_train_epochs=2)


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"slots": ["bert.layer.9"]}, {}, "bert.layer.9"),
    ({"evaluate": float, "monitor": "eval_f1"}, {}, "no metric 'eval_f1'; it has eval_loss"),
    ({}, {"eval_strategy": "no"}, "set eval_strategy='epoch'"),
    (
        {},
        {"load_best_model_at_end": True, "save_strategy": "epoch"},
        "load_best_model_at_end",
    ),
    ({"controller": "wise"}, {}, "no controller 'wise'"),
    ({}, {"num_train_epochs": 1}, "leaves nothing to decide"),
]


@pytest.mark.parametrize(("settings", "changes", "message"), BAD)
def test_bad_input_is_one_sentence(
    settings: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        train("bert", tmp_path, grower("bert", **settings), **changes)
    assert "\n" not in str(error.value)


def test_bad_settings_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="mode must be 'max' or 'min', got 'best'"):
        grower("bert", mode="best")
    with pytest.raises(ConfigError, match="monitor must be the name of a metric, got int"):
        grower("bert", monitor=3)
    with pytest.raises(ConfigError, match="eval_f1 cannot be measured without a seed; give"):
        GrowCallback(["bert"], "eval_f1")
    with pytest.raises(ForgottenCallError, match="no Trainer has trained"):
        grower("bert").export()


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "esper.transformers")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(PackageMissingError, match=r"pip install 'esper-grow\[transformers\]'"):
        __import__("esper.transformers")
