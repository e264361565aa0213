"""Tiny models of Hugging Face with data of their own, and the same training as a plain loop."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import esper
from esper.growth.grown_module import keyed
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.transformers import GrowCallback, blueprints_inside
from helpers import grow_arguments

EPOCHS, BATCH, EVAL_BATCH, RATE, CLIP = 8, 8, 16, 3e-3, 0.5
SLOTS = {"bert": "bert.encoder.layer.0", "gpt2": "transformer.h.0"}
SCRIPT = "1 GERMINATE r0c0 lora_large linear\nauto FOSSILIZE"


def model_of(kind: str) -> Any:
    with keyed(3):
        if kind == "bert":
            return BertForSequenceClassification(
                BertConfig(
                    vocab_size=20,
                    hidden_size=16,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    intermediate_size=32,
                    max_position_embeddings=16,
                    num_labels=3,
                    hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0,
                )
            )
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=20,
                n_positions=16,
                n_embd=16,
                n_layer=2,
                n_head=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
        )


def data(kind: str) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The last batch of each part is smaller than the others."""
    with keyed(0):
        tokens = torch.randint(3, 20, (72, 8))
        labels = torch.arange(72) % 3
        tokens[torch.arange(72), torch.randint(0, 8, (72,))] = labels
    rows = [
        {"input_ids": row, "labels": label if kind == "bert" else row}
        for row, label in zip(tokens, labels, strict=True)
    ]
    return rows[:44], rows[44:]


def accuracy(prediction: Any) -> dict[str, float]:
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": 100.0 * float(np.mean(right))}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": EVAL_BATCH,
        "learning_rate": RATE,
        "weight_decay": 0.1,
        "max_grad_norm": CLIP,
        "lr_scheduler_type": "cosine",
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    return TrainingArguments(**given | changes)


def grower(kind: str, **changes: Any) -> GrowCallback:
    given: dict[str, Any] = {
        "slots": [SLOTS[kind]],
        "controller": ScriptedController(SCRIPT, "test"),
        "incubation": "joint",
    }
    return GrowCallback(**grow_arguments(**given | changes))


def train(
    kind: str, folder: Path, grow: GrowCallback, resume: Any = None, **changes: Any
) -> Trainer:
    own = {"compute_metrics": changes.pop("compute_metrics", None)}
    model = changes.pop("model", None) or model_of(kind)
    train_rows, val_rows = data(kind)
    trainer = Trainer(
        model,
        arguments(folder, **changes),
        train_dataset=train_rows,
        eval_dataset=changes.pop("eval_dataset", val_rows),
        callbacks=[grow],
        **own,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def batches(rows: list[dict[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [{k: torch.stack([row[k] for row in part]) for k in part[0]} for part in parts]


def plain_loop(kind: str, accumulate: int = 1) -> esper.Body:
    """The training that the Trainer gives, written by hand."""
    model = model_of(kind)
    train_batches, val_batches = (
        batches(rows, size) for rows, size in zip(data(kind), (BATCH, EVAL_BATCH), strict=True)
    )
    decays = {n for n, p in model.named_parameters() if p.dim() > 1}
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in decays], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n not in decays]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.0)

    def score() -> float:
        model.eval()
        with torch.no_grad():
            losses = [float(_loss(kind, model, batch, [batch])) for batch in val_batches]
        return -float(np.average(losses, weights=[len(b["labels"]) for b in val_batches]))

    slot = SLOTS[kind]
    body = esper.attach(
        model,
        slots=esper.Slots(
            [slot], layout={slot: "BTC"}, causal=kind == "gpt2", blueprints=blueprints_inside()
        ),
        example=train_batches[0],
        evaluate=score,
        steps=EPOCHS,
        controller=ScriptedController(SCRIPT, "test"),
        settings=esper.GrowthSettings(incubation="joint"),
    )
    body.manage(optimizer)
    updates = -(-len(train_batches) // accumulate)
    total = EPOCHS * updates
    scheduler = LambdaLR(optimizer, lambda step: 0.5 * (1.0 + np.cos(np.pi * step / total)))
    for _ in range(EPOCHS):
        model.train()
        for start in range(0, len(train_batches), accumulate):
            parts = train_batches[start : start + accumulate]
            for batch in parts:
                _loss(kind, model, batch, parts).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            seeds = body.model.seed_parameters(0)
            if seeds:
                nn.utils.clip_grad_norm_(seeds, CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        body.step(score())
    body.finish()
    return body


def _loss(kind: str, model: Any, batch: dict[str, Tensor], parts: list[Any]) -> Tensor:
    """Of a language model the sum over all labels of a step, divided by their number."""
    if kind == "bert":
        return model(**batch).loss / len(parts)
    count = sum(part["labels"].numel() for part in parts)
    return model(**batch, num_items_in_batch=count).loss
