"""Growth in depth inside a Trainer: resumed, exported, and saved like any model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertForSequenceClassification, GPT2LMHeadModel

import esper
from esper.growth.export import largest_difference
from esper.growth.grown_module import keyed
from esper.leyline import ConfigError
from esper.transformers import GrowCallback
from test_transformers import stop_after
from transformers_support import batches, data, model_of, train

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]
EPOCHS, BLOCKS = 5, 3
PATHS = {"gpt2": "transformer.h", "bert": "bert.encoder.layer"}


def deep(kind: str) -> Any:
    """With as many blocks as the network may have at the end."""
    shallow = model_of(kind)
    shallow.config.num_hidden_layers = BLOCKS
    with keyed(5):
        return type(shallow)(shallow.config)


def depth(kind: str, **changes: Any) -> esper.Depth:
    given = {"start": 1, "when": [0.1, 0.5]}
    return esper.Depth(PATHS[kind], **(changes or given))


def grower(kind: str, **changes: Any) -> GrowCallback:
    return GrowCallback(
        depth=depth(kind, **changes),
        monitor="eval_blocks",
        evaluate=count_blocks,
        settings=esper.GrowthSettings(blending_steps=2, keep_best=False),
    )


def count_blocks(model: Any) -> float:
    """More blocks are better, so that all are kept."""
    return float(model.config.num_hidden_layers)


def run(kind: str, folder: Path, grow: GrowCallback, model: Any = None, **changes: Any) -> Any:
    model = deep(kind) if model is None else model
    given = {
        "num_train_epochs": EPOCHS,
        "compute_metrics": lambda _: {"blocks": count_blocks(model)},
    }
    return train(kind, folder, grow, model=model, **given | changes)


def known(row: dict[str, Any]) -> dict[str, Any]:
    """Gradients before a checkpoint in the middle of an epoch are not measured."""
    return {name: value for name, value in row.items() if not name.endswith("gradient_ratio")}


def assert_same(one: Any, other: Any) -> None:
    first, second = one.model.state_dict(), other.model.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    states = [trainer.optimizer.state_dict() for trainer in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    pairs = zip(*(state["state"].items() for state in states), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1]["exp_avg"], b[1]["exp_avg"]) for a, b in pairs)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("gpt2", {}),
        ("gpt2", {"start": 1, "birth": "fresh", "when": [0.3]}),
        ("gpt2", {"add": 1, "freeze_host": True}),
        ("bert", {"start": 1, "when": [0.1]}),
    ],
)
def test_a_killed_training_ends_like_one_that_was_not(
    kind: str, how: dict[str, Any], tmp_path: Path
) -> None:
    whole, first, rest = (grower(kind, **how) for _ in range(3))
    trainer = run(kind, tmp_path / "whole", whole)
    assert trainer.model.config.num_hidden_layers == BLOCKS + ("add" in how)
    first.on_epoch_begin = stop_after(3)  # type: ignore[method-assign]
    parts, often = tmp_path / "parts", {"save_strategy": "steps", "save_steps": 3}
    with pytest.raises(KeyboardInterrupt):
        run(kind, parts, first, **often)
    assert whole.body is not None
    # In the middle of the first epoch, and after blocks have come.
    for step in (3, 15):
        rest = grower(kind, **how)
        again = run(kind, parts, rest, resume=str(parts / f"checkpoint-{step}"))
        assert rest.body is not None
        assert list(map(known, rest.body.history)) == list(map(known, whole.body.history))
        assert_same(trainer, again)


def test_the_checkpoints_are_models_of_their_own(tmp_path: Path) -> None:
    grow = grower("gpt2")
    trainer = run("gpt2", tmp_path, grow, save_strategy="epoch")
    counts = []
    for step in (6, 12, 30):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}")
        counts.append(saved.config.n_layer)
        assert len(saved.transformer.h) == counts[-1]
    assert counts == [1, 2, 3]
    row = {"input_ids": data("gpt2")[1][0]["input_ids"][None]}
    assert largest_difference(saved, trainer.model, row) == 0.0


def test_the_export_is_theirs(tmp_path: Path) -> None:
    grow = grower("gpt2")
    run("gpt2", tmp_path / "run", grow)
    plain: Any = grow.export()
    assert type(plain) is GPT2LMHeadModel
    plain.save_pretrained(tmp_path / "model")
    loaded, info = GPT2LMHeadModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = data("gpt2")[1][0]["input_ids"][None, :4]
    one, other = (
        model.eval().generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
        for model in (loaded, grow.body.model.host)  # type: ignore[union-attr]
    )
    assert torch.equal(one, other)
    grow.save(tmp_path / "live")
    again = esper.load(tmp_path / "live", deep("gpt2"))
    assert largest_difference(again.host, plain, {"input_ids": tokens}) == 0.0


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_new_blocks_have_the_settings_of_their_groups(kind: str, tmp_path: Path) -> None:
    grow = grower(kind)
    trainer = run(kind, tmp_path, grow)
    decays = {id(p): g["weight_decay"] for g in trainer.optimizer.param_groups for p in g["params"]}
    assert set(decays) == {id(p) for p in trainer.model.parameters()}
    blocks = trainer.model.get_submodule(PATHS[kind])
    wanted = {name: decays[id(p)] for name, p in blocks[0].named_parameters()}
    assert set(wanted.values()) == {0.0, 0.1}
    for block in blocks:
        assert {name: decays[id(p)] for name, p in block.named_parameters()} == wanted
    rates = {group["lr"] for group in trainer.optimizer.param_groups}
    assert rates == {0.0}, "the schedule reached new blocks, too"


def test_a_frozen_model_is_as_before_without_its_blocks(tmp_path: Path) -> None:
    model = deep("gpt2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grow = grower("gpt2", add=1, freeze_host=True)
    run("gpt2", tmp_path, grow, model=model)
    assert grow.body is not None
    assert model.config.n_layer == BLOCKS + 1
    grown = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(".h.1." in name or ".h.2." in name or ".h.3." in name for name in grown)
    grow.body.model.release()
    assert model.config.n_layer == BLOCKS
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_gradient_checkpoints(tmp_path: Path) -> None:
    found = []
    for changes in ({}, {"gradient_checkpointing": True}):
        found.append(run("gpt2", tmp_path, grower("gpt2"), **changes))
    one, other = (trainer.model.state_dict() for trainer in found)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)


def test_both_slots_and_depth_are_refused() -> None:
    with pytest.raises(ConfigError, match="either slots or depth"):
        GrowCallback(["transformer.h.0"], depth="transformer.h")


def test_the_plain_loop_is_the_same(tmp_path: Path) -> None:
    """Without weight decay, whose groups the Trainer makes."""
    trainer = run("bert", tmp_path, grower("bert"), weight_decay=0.0, max_grad_norm=0.0)
    model, (rows, _) = deep("bert"), data("bert")
    assert isinstance(model, BertForSequenceClassification)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    body = esper.attach(
        model,
        depth=depth("bert"),
        example=batches(rows[:2], 2)[0],
        evaluate=lambda: count_blocks(model),
        steps=EPOCHS,
        settings=esper.GrowthSettings(blending_steps=2, keep_best=False),
    )
    body.manage(optimizer)
    total = EPOCHS * 6
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: 0.5 * (1.0 + float(torch.cos(torch.tensor(torch.pi * step / total)))),
    )
    for _ in range(EPOCHS):
        model.train()
        for batch in batches(rows, 8):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            cosine.step()
        body.step(count_blocks(model))
    body.finish()
    for name, tensor in model.state_dict().items():
        found = trainer.model.state_dict()[name]
        torch.testing.assert_close(tensor, found, rtol=1e-3, atol=1e-4)
