"""A frozen language model is adapted to another kind of text: by seeds that grow in it, or by LoRA.

    python benchmarks/lora.py [--keys 5] [--rows lora.jsonl]
    python benchmarks/lora.py --show benchmarks/results/lora.jsonl

A GPT-2 of three layers learns to continue Python's manual, letter by letter. It is then frozen and
adapted to source code of Python's standard library, which it has never seen. Methods:

as it is    nothing is trained
head        the output layer alone: 8,192 parameters
norm        the last norm alone: 128 parameters, which all methods below train as well
LoRA        of PEFT, rank 4 in the attention of every layer: 3,072 parameters
script      Esper: a `lora` seed in every layer, one after another: 3,072 parameters
heuristic   Esper: what the heuristic grows with at most 3,072 parameters

A key says which passages of the training files are seen, in which order, and how adapters begin.
All methods have the same passages, steps, evaluations, optimiser and rates to choose from: on
validation, with a key that is not counted. Each keeps its best evaluation. Scores are bits per
letter, on held-out test files; rows are written as they come. About 10 CPU minutes.
"""

import argparse
import copy
import json
import logging
import statistics
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import esper
from esper.growth.grown_module import keyed
from esper.proof.statistics import paired_difference
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.situation import Controller
from esper.transformers import GrowCallback

LENGTH, WIDTH, LAYERS, RANK, BATCH = 64, 64, 3, 4, 16
LETTERS = 128  # ASCII; other letters are left out
ALLOWANCE = LAYERS * RANK * (WIDTH + 3 * WIDTH)
RATES = (3e-3, 1e-2, 3e-2, 1e-1)
TUNING_KEY = 1000
SLOTS = [f"transformer.h.{layer}" for layer in range(LAYERS)]
SCRIPT = "\n".join(
    [f"{i + 1} GERMINATE {slot} lora linear" for i, slot in enumerate(SLOTS)] + ["auto FOSSILIZE"]
)
METHODS = ("as it is", "head", "norm", "LoRA", "script", "heuristic")


@dataclass(frozen=True)
class Sizes:
    pretraining_steps: int = 600
    steps: int = 96
    every: int = 6  # steps between evaluations
    val: int = 64
    test: int = 512


@dataclass(frozen=True)
class Texts:
    manual: Tensor
    train: Tensor  # passages
    val: Tensor
    test: Tensor


def load_texts(sizes: Sizes) -> Texts:
    """Files, not passages, are divided between the parts."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.glob("*.py") if path.stat().st_size > 10_000)
    order = np.random.default_rng(0).permutation(len(files))
    third = len(files) // 3
    parts = [
        torch.cat([_passages(files[i].read_text(encoding="utf-8")) for i in some])
        for some in (order[2 * third :], order[:third], order[third : 2 * third])
    ]
    train, val, test = (p[np.random.default_rng(1).permutation(len(p))] for p in parts)
    manual = _numbers("\n\n".join(text for _, text in sorted(topics.items())))
    return Texts(manual, train, val[: sizes.val], test[: sizes.test])


def _numbers(text: str) -> Tensor:
    return torch.tensor([ord(letter) for letter in text if ord(letter) < LETTERS])


def _passages(text: str) -> Tensor:
    numbers = _numbers(text)
    return numbers[: len(numbers) // LENGTH * LENGTH].view(-1, LENGTH)


def new_model() -> GPT2LMHeadModel:
    """Its output layer is its own, so that it can be trained alone."""
    config = GPT2Config(
        vocab_size=LETTERS,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with keyed(0):
        return GPT2LMHeadModel(config)


def pretrain(manual: Tensor, steps: int) -> dict[str, Tensor]:
    model = new_model()
    with keyed(0):
        starts = torch.randint(len(manual) - LENGTH, (steps, 2 * BATCH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        tokens = torch.stack([manual[s : s + LENGTH] for s in starts[step]])
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"pretrained: {_bits(loss.item()):.3f} bits per letter of the manual", flush=True)
    return model.state_dict()


def _bits(nats: float) -> float:
    return nats / float(np.log(2.0))


class KeepBest(TrainerCallback):
    """What is trained goes back to its best evaluation, as Esper's networks do."""

    def __init__(self) -> None:
        self.best, self.state = float("inf"), {}

    def on_evaluate(
        self, args: Any, state: Any, control: Any, *, metrics: Any, **parts: Any
    ) -> None:
        if metrics["eval_loss"] <= self.best:
            trained = {n: p for n, p in parts["model"].named_parameters() if p.requires_grad}
            self.best, self.state = metrics["eval_loss"], copy.deepcopy(trained)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        parts["model"].load_state_dict(self.state, strict=False)


def growth(model: Any, controller: str | Controller, key: int) -> GrowCallback:
    # Esper counts what is trained: of a frozen model, what of it is not.
    params = sum(p.numel() for p in model.parameters() if p.requires_grad)
    budget = esper.Budget(params=params + ALLOWANCE)
    return GrowCallback(
        SLOTS,
        controller=controller,
        budget=budget,
        key=key,
        settings=esper.GrowthSettings(incubation="joint"),
    )


def prepare(method: str, model: Any, key: int) -> tuple[nn.Module, TrainerCallback]:
    """The frozen model with what is to be trained in it."""
    model.requires_grad_(False)
    if method == "head":
        model.lm_head.requires_grad_(True)
        return model, KeepBest()
    model.transformer.ln_f.requires_grad_(True)
    if method == "LoRA":
        lora = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules=["c_attn"], fan_in_fan_out=True
        )
        with keyed(key):
            adapted = get_peft_model(model, lora)
        model.transformer.ln_f.requires_grad_(True)  # PEFT freezes whatever is not its own
        return adapted, KeepBest()
    if method == "script":
        return model, growth(model, ScriptedController(SCRIPT, "lora"), key)
    if method == "heuristic":
        return model, growth(model, "heuristic", key)
    return model, KeepBest()


def rows_of(passages: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": passage, "labels": passage} for passage in passages]


def run(
    method: str, texts: Texts, backbone: dict[str, Tensor], key: int, rate: float, sizes: Sizes
) -> tuple[dict[str, Any], Callable[[], float]]:
    """A row, and what reads the test part."""
    model = new_model()
    model.load_state_dict(backbone)
    model, callback = prepare(method, model, key)
    seen = np.random.default_rng(key).permutation(len(texts.train))[: sizes.steps * BATCH]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=sizes.steps,
                per_device_train_batch_size=BATCH,
                per_device_eval_batch_size=256,
                learning_rate=rate,
                weight_decay=0.01,
                lr_scheduler_type="linear",
                eval_strategy="steps",
                eval_steps=sizes.every,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                seed=key,
            ),
            train_dataset=rows_of(texts.train[seen]),
            eval_dataset=rows_of(texts.val),
            callbacks=[callback],
        )
        trainer.log = lambda *args: None  # type: ignore[method-assign]
        if method != "as it is":
            trainer.train()
    if isinstance(callback, GrowCallback):
        assert callback.body is not None
        outcome = callback.body.outcome
        assert outcome is not None
        trained = outcome.params - outcome.host_params + 2 * WIDTH
    else:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    row = {
        "way": method,
        "key": key,
        "rate": rate,
        "trained": 0 if method == "as it is" else trained,
        "val": _bits(trainer.evaluate()["eval_loss"]),
    }
    return row, lambda: _bits(trainer.evaluate(rows_of(texts.test))["eval_loss"])


def compare(
    methods: Sequence[str], keys: Sequence[int], tuning_key: int, sizes: Sizes
) -> Iterator[dict[str, Any]]:
    """A row for each key and method, once every method has its rate; the test part is read last."""
    texts = load_texts(sizes)
    backbone = pretrain(texts.manual, sizes.pretraining_steps)
    rates: dict[str, float] = {}
    for method in methods:
        grid = RATES if method != "as it is" else RATES[:1]
        tried = {r: run(method, texts, backbone, tuning_key, r, sizes)[0]["val"] for r in grid}
        rates[method] = min(tried, key=tried.__getitem__)
        print(f"{method}: validation by rate {tried}", flush=True)
    for key in keys:
        for method in methods:
            row, test = run(method, texts, backbone, key, rates[method], sizes)
            yield {**row, "test": test()}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over keys, and differences to LoRA pair by pair with 95 % intervals."""
    found: dict[str, Any] = {}
    for method in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == method]
        test = [row["test"] for row in own]
        lora = [row["test"] for row in rows if row["way"] == "LoRA"]
        pair = (
            paired_difference(test, lora) if method != "LoRA" and len(lora) == len(test) else None
        )
        found[method] = {
            "keys": len(own),
            "trained": statistics.mean(row["trained"] for row in own),
            "rate": own[0]["rate"],
            "val": statistics.mean(row["val"] for row in own),
            "test": statistics.mean(test),
            "deviation": statistics.stdev(test) if len(test) > 1 else None,
            "minus_lora": None if pair is None else [pair.mean, pair.low, pair.high],
        }
    return found


def table(found: dict[str, Any]) -> str:
    lines = [
        "| method | trained parameters | rate | validation | test | test, minus LoRA |",
        "|---|---|---|---|---|---|",
    ]
    for method, of in found.items():
        minus = "-"
        if of["minus_lora"] is not None:
            mean, low, high = of["minus_lora"]
            interval = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
            minus = f"{mean:+.3f}{interval}"
        lines.append(
            f"| {method} | {of['trained']:,.0f} | {of['rate']:g} | {of['val']:.3f} | "
            f"{of['test']:.3f} | {minus} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=5)
    parser.add_argument("--first-key", type=int, default=0)
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas")
    parser.add_argument("--steps", type=int, default=Sizes.steps)
    parser.add_argument("--pretraining-steps", type=int, default=Sizes.pretraining_steps)
    parser.add_argument("--rows", type=Path, help="write them here, as they come")
    parser.add_argument("--show", type=Path, help="show the rows of an earlier run")
    given = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    if given.show is not None:
        rows = [json.loads(line) for line in given.show.read_text().splitlines()]
    else:
        sizes = Sizes(given.pretraining_steps, given.steps)
        keys = range(given.first_key, given.first_key + given.keys)
        for row in compare(given.methods.split(","), keys, TUNING_KEY + given.first_key, sizes):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if given.rows is not None:
                with given.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    found = summary(rows)
    print(table(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
