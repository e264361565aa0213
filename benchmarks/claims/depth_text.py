"""Claims I and J: does growing in depth save training cost, and can it replace choosing the depth?

    python benchmarks/claims/depth_text.py [--keys 0-4] [--arms "static 1,..."] [--results FILE]
    python benchmarks/claims/depth_text.py --table [--results FILE]

The protocol is in docs/claims.md. A *trunk* trains at a constant rate, and at 0.8 of every budget a
*branch* leaves it, whose rate falls to zero: five budgets for little more than the price of one.
Every branch is a row in the file of results; several processes may share the file if their keys
or arms differ, and a stopped run goes on with the rows that are missing. `--table` only prints
what is there. The last line is one JSON object.
"""

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import (
    RESULTS,
    Row,
    Trials,
    append,
    compare,
    finished,
    keys_with_all,
    print_json,
    print_table,
)
from esper.growth.blueprints.modules import TransformerBlock
from esper.growth.depth import plan_depth
from esper.growth.hosts import TransformerHost
from esper.growth.stacks import Stacks
from esper.leyline.depth import Depth
from esper.proof.statistics import mean_interval
from esper.tamiyo.controllers import depth as depth_rule
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.data.text import load_documents

CONTEXT = 128
WIDTH = 64
HEADS = 2
BLOCKS = 8
BATCH = 8  # windows
WARMUP = 100  # steps
DECAY = 0.2  # share of a budget in which the rate falls to zero
EPOCH = 160  # steps whose mean training loss is one point of the curve that the rule sees
UNIT = 640 * 10**9  # multiply-adds
BUDGETS = (1, 2, 4, 8, 16)  # units
COMPARED = (8, 16)  # the budgets of claim I
DEPTH = Depth("blocks", start=1)
GROWN, PLANNED = "grown", "planned"
PLAN = (1 / 8, 1 / 4)  # shares of its budget after which the network that knows it grows


@dataclass(frozen=True)
class Arm:
    """Blocks at the start, the learning rate that the pilot chose, and the budgets in units."""

    blocks: int
    rate: float
    budgets: tuple[int, ...]


ARMS = {
    GROWN: Arm(1, 1.5e-3, BUDGETS),
    "static 2": Arm(2, 3e-3, BUDGETS[1:]),
    "static 4": Arm(4, 3e-3, BUDGETS[2:]),
    PLANNED: Arm(1, 1.5e-3, COMPARED),
    "static 1": Arm(1, 3e-3, BUDGETS[:3]),
    "static 8": Arm(8, 3e-3, BUDGETS[4:]),
}


@dataclass(frozen=True)
class Text:
    """Windows of bytes [N, CONTEXT + 1]."""

    train: Tensor
    test: Tensor


def load() -> Text:
    data = load_documents(data_root(), block_size=CONTEXT)
    both = ((data.train_x, data.train_y), (data.test_x, data.test_y))
    return Text(*(torch.cat([x, y[:, -1:]], 1).to(torch.uint8) for x, y in both))


class Block(TransformerBlock):
    """With attention as plain matrix products: several times as fast in bfloat16 on a CPU."""

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        size = width // self.n_head
        heads = self.qkv(x).reshape(batch, length, 3, self.n_head, size)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        # Autocast would take the softmax in float32.
        with torch.autocast("cpu", enabled=False):
            later = torch.full((length, length), -1e9, dtype=q.dtype).triu(1)
            mixed = (q * size**-0.5 @ k.transpose(-1, -2) + later).softmax(-1) @ v
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


def build(blocks: int, key: int) -> TransformerHost:
    """All blocks start as the identity, those that grow and those of static networks alike."""
    torch.manual_seed(key)
    model = TransformerHost(
        vocab=256, n_embd=WIDTH, n_head=HEADS, n_layer=0, block_size=CONTEXT, dropout=0.0
    )
    model.blocks = nn.Sequential(*(Block(WIDTH, HEADS, 0.0) for _ in range(blocks)))
    for block in model.blocks:
        for layer in (block.proj, block.out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model


def step_macs(blocks: int, windows: int = BATCH) -> int:
    """Multiply-adds of one training step: matrix products of blocks, attention and head, three
    times as many forward and backward as forward alone."""
    block = 12 * WIDTH**2 + 2 * CONTEXT * WIDTH
    return 3 * (blocks * block + 256 * WIDTH) * windows * CONTEXT


class Net:
    """A network in training at a constant rate, with what it has spent; `branch` copies it."""

    def __init__(self, arm: str, key: int, train: Tensor, budget: float = math.inf) -> None:
        self.arm, self.key, self.budget, self.train_x = arm, key, budget, train
        self.order = torch.randperm(len(train), generator=torch.Generator().manual_seed(key))
        self.step, self.spent = 0, 0
        self.losses, self.computes = list[float](), list[int]()  # of epochs at the present depth
        self.recent, self.grown_at = list[float](), list[int]()
        self.stacks: Stacks | None = None
        self.model = build(BLOCKS if arm in (GROWN, PLANNED) else ARMS[arm].blocks, key)
        if arm in (GROWN, PLANNED):
            plan, self.events = plan_depth(self.model, DEPTH, train[:1, :CONTEXT].long())
            self.stacks = Stacks(plan, self.model)
        self.optimizer = optimizer_of(self.model)

    @property
    def depth(self) -> int:
        return len(self.model.blocks)

    def take_step(self, factor: float) -> None:
        start = self.step * BATCH % (len(self.order) - BATCH)
        windows = self.train_x[self.order[start : start + BATCH]]
        for group in self.optimizer.param_groups:
            group["lr"] = ARMS[self.arm].rate * factor * min(1.0, (self.step + 1) / WARMUP)
        loss = loss_on(self.model, windows)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.spent += step_macs(self.depth)
        self.recent.append(loss.item())

    def end_epoch(self) -> None:
        """After EPOCH steps: one more point of the curve that the rule sees."""
        self.losses.append(fmean(self.recent))
        self.computes.append(self.spent)
        self.recent.clear()
        ratio = step_macs(2 * self.depth) / step_macs(self.depth)
        more = self.arm == GROWN and self.depth < BLOCKS
        if more and depth_rule.grow_now(self.losses, self.computes, ratio):
            self.grow()

    def grow(self) -> None:
        assert self.stacks is not None
        blocks = self.stacks.grow(len(self.grown_at), self.key)
        self.optimizer.add_param_group({"params": list(blocks.parameters())})
        self.grown_at.append(self.spent)
        self.losses, self.computes, self.recent = [], [], []

    def run_until(self, compute: float) -> None:
        """As many steps at the constant rate as `compute` pays for in all."""
        while self.spent + step_macs(self.depth) <= compute:
            self.take_step(1.0)
            planned = PLAN[len(self.grown_at) :] if self.arm == PLANNED else ()
            if planned and self.spent >= planned[0] * self.budget:
                self.grow()
            elif len(self.recent) == EPOCH:
                self.end_epoch()

    def branch(self, budget: float) -> nn.Module:
        """The network at the end of `budget`, its rate falling to 0; this one stays as it is."""
        other = copy.copy(self)
        other.model, other.recent = copy.deepcopy(self.model), []
        other.optimizer = optimizer_of(other.model)
        for mine, its in zip(self.model.parameters(), other.model.parameters(), strict=True):
            other.optimizer.state[its] = copy.deepcopy(self.optimizer.state[mine])
        cost = step_macs(self.depth)
        while other.spent + cost <= budget:
            left = (budget - other.spent - cost / 2) / (DECAY * budget)
            other.take_step(min(1.0, left))
        return other.model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def loss_on(model: nn.Module, windows: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(windows[:, :-1].long())
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].long().flatten())


@torch.no_grad()
def test_loss(model: nn.Module, windows: Tensor) -> float:
    return fmean(loss_on(model, part).item() for part in windows.split(2 * BATCH))


def trunk(arm: str, key: int, text: Text, missing: Sequence[int]) -> Iterator[Row]:
    """A row for each of the missing budgets, in order. A planned network has a trunk for each."""
    net = Net(arm, key, text.train)
    for budget in sorted(missing):
        began = time.process_time()
        if arm == PLANNED:
            net = Net(arm, key, text.train, budget * UNIT)
        net.run_until((1.0 - DECAY) * budget * UNIT)
        model = net.branch(budget * UNIT)
        yield {
            "arm": name_of(arm, budget),
            "key": key,
            "test_loss": test_loss(model, text.test),
            "depth": net.depth,
            "params": sum(p.numel() for p in net.model.parameters()),
            "grown_at": [round(spent / UNIT, 4) for spent in net.grown_at],
            "cpu_seconds": round(time.process_time() - began, 1),
        }


def name_of(arm: str, budget: int) -> str:
    return f"{arm}, {budget} units"


def play(results: Path, arms: Sequence[str], keys: Sequence[int], text: Text) -> None:
    """Key by key, the branches that are not in the file yet."""
    found = settings(text)
    trials = finished(results, found)
    for key in keys:
        for arm in arms:
            missing = [b for b in ARMS[arm].budgets if (name_of(arm, b), key) not in trials]
            for row in trunk(arm, key, text, missing):
                append(results, [row | {"settings": found}])
                print(row, file=sys.stderr, flush=True)


def settings(text: Text) -> Row:
    names = ("CONTEXT", "WIDTH", "HEADS", "BLOCKS", "BATCH", "WARMUP", "DECAY", "EPOCH")
    digest = sha256(text.train.numpy().tobytes() + text.test.numpy().tobytes()).hexdigest()
    known = {name.lower(): globals()[name] for name in (*names, "UNIT", "PLAN")}
    rule = [depth_rule.SPAN, depth_rule.WINDOW, depth_rule.POINTS, depth_rule.FALL]
    plain: Row = json.loads(
        json.dumps(
            {
                **known,
                "rates": {name: arm.rate for name, arm in ARMS.items()},
                "rule": rule,
                "text": digest,
            }
        )
    )
    return plain


# --- what the rows say ------------------------------------------------------------------------


def compute_to_reach(loss: float, budgets: Sequence[float], losses: Sequence[float]) -> float:
    """The budget at which a falling curve reaches `loss`, by straight lines over the logarithm of
    the budget: infinite if it does not get there, the smallest budget if it starts below."""
    place = next((i for i, known in enumerate(losses) if known <= loss), None)
    if place is None:
        return math.inf
    if place == 0:
        return budgets[0]
    (a, b), (high, low) = budgets[place - 1 : place + 1], losses[place - 1 : place + 1]
    return float(a * (b / a) ** ((high - loss) / (high - low)))


def saving(trials: Trials, arm: str, key: int, budget: int) -> float:
    """The share of multiply-adds that growing saves: against the static network of the grown one's
    depth, interpolated to its loss. If that does not get there within its largest budget, the
    saving is at least what is returned."""
    grown = trials[name_of(arm, budget), key]
    static = f"static {grown['depth']}"
    known = [b for b in BUDGETS if (name_of(static, b), key) in trials]
    curve = [trials[name_of(static, b), key]["test_loss"] for b in known]
    needed = compute_to_reach(grown["test_loss"], known, curve)
    return 1.0 - budget / min(needed, max(known))


def best_static(trials: Trials, keys: Sequence[int], budget: int) -> str:
    """The static network with the lowest mean test loss at a budget, in hindsight, of those that
    all keys have."""
    names = [name_of(arm, budget) for arm in ARMS if arm.startswith("static")]
    known = [name for name in names if all((name, key) in trials for key in keys)]
    return min(known, key=lambda name: fmean(losses_of(trials, name, keys)))


def losses_of(trials: Trials, name: str, keys: Sequence[int]) -> list[float]:
    return [trials[name, key]["test_loss"] for key in keys if (name, key) in trials]


def excess(trials: Trials, keys: Sequence[int], budget: int) -> list[float]:
    """Of each key, by which share the grown network's loss is above the best static one's."""
    best = losses_of(trials, best_static(trials, keys, budget), keys)
    grown = losses_of(trials, name_of(GROWN, budget), keys)
    return [ours / theirs - 1.0 for ours, theirs in zip(grown, best, strict=True)]


def spread(values: Sequence[float]) -> Row:
    low, high = mean_interval(values)
    return {"mean": fmean(values), "low": low, "high": high}


def complete_keys(trials: Trials, arms: Sequence[str]) -> list[int]:
    return keys_with_all(trials, [name_of(arm, b) for arm in arms for b in ARMS[arm].budgets])


def verdict(trials: Trials) -> dict[str, Any]:
    """The tables of both claims, each over the keys that its arms have."""
    static = ["static 1", "static 2", "static 4"]
    planned = complete_keys(trials, [PLANNED, "static 2", "static 4"])
    grown = complete_keys(trials, [GROWN, *static])
    found: dict[str, Any] = {"planned_keys": planned, "grown_keys": grown, "losses": []}
    for budget in BUDGETS:
        row: Row = {"units": budget}
        for arm in ARMS:
            known = losses_of(trials, name_of(arm, budget), grown)
            row[arm] = fmean(known) if known else None
        depths = [trials[name_of(GROWN, budget), key]["depth"] for key in grown]
        found["losses"].append(row | {"depths": "/".join(map(str, depths))})
    if planned:
        pairs = [(name_of(PLANNED, b), best_static(trials, planned, b)) for b in COMPARED]
        found["cost"] = compare(trials, pairs, "test_loss")
        found["saved"] = [
            {"arm": arm, "units": b} | spread([saving(trials, arm, key, b) for key in keys])
            for arm, keys in ((PLANNED, planned), (GROWN, grown))
            for b in COMPARED
            if keys
        ]
    if grown:
        found["anytime"] = [
            {"units": b, "best": best_static(trials, grown, b)} | spread(excess(trials, grown, b))
            for b in BUDGETS
        ]
    return found


def show(found: Mapping[str, Any]) -> None:
    for name in ("losses", "cost", "saved", "anytime"):
        if name in found:
            print(f"\n{name}")
            print_table(found[name])
    print_json(found)


def numbers(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=numbers, default=numbers("0-4"))
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS))
    parser.add_argument("--results", type=Path, default=RESULTS / "depth-text.jsonl")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = load()
    if not options.table:
        play(options.results, options.arms, options.keys, text)
    show(verdict(finished(options.results, settings(text))))


if __name__ == "__main__":
    main()
