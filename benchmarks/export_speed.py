"""Exported networks at batch 1 against networks that are written by hand.

    python benchmarks/export_speed.py [--alternations 15] [--calls 500]

resnet, gpt, mlp   every slot holds `widen_double`; by hand: the same class with wider layers
branch_mlp         one slot holds a branch; by hand: the same modules in one `forward`

The networks take turns. The last line is one JSON object: for each row the median CPU time of the
export over that of the other. About one CPU minute.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import esper
from esper.growth.grown_module import GrownModule
from esper.growth.hosts import MLPHost, TransformerHost
from esper.leyline import SeedStage

Pair = tuple[nn.Module, nn.Module, Tensor]


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(x + y)


def resnet_of(inner: int) -> nn.Module:
    blocks = [Block(32, inner) for _ in range(6)]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), *blocks, *ends)


def grown(model: nn.Module, slots: list[str], x: Tensor, blueprint: str) -> nn.Module:
    network = GrownModule.wrap(model, slots, x)
    for slot in range(len(slots)):
        network.germinate(slot, network.catalogue.index(blueprint), 0, key=slot)
        network.set_blend(slot, SeedStage.FOSSILIZED, 1.0)
    return esper.export(network, x)


def resnet() -> Pair:
    x = torch.randn(1, 3, 32, 32)
    slots = [f"{i}" for i in range(1, 7)]
    return grown(resnet_of(32), slots, x, "widen_double"), resnet_of(64), x


def gpt() -> Pair:
    x = torch.randint(0, 65, (1, 64))
    host, hand = (TransformerHost(65, 128, 4, 4, block_size=64) for _ in range(2))
    for block in hand.blocks:
        block.fc, block.out = nn.Linear(128, 1024), nn.Linear(1024, 128)
    return grown(host, list(host.slot_modules), x, "widen_double"), hand, x


def mlp() -> Pair:
    x = torch.randn(1, 64)
    host, hand = (MLPHost(64, hidden=hidden, n_layers=3) for hidden in (64, 128))
    return grown(host, list(host.slot_modules), x, "widen_double"), hand, x


class Branched(nn.Module):
    def __init__(self, host: MLPHost, branch: nn.Module) -> None:
        super().__init__()
        self.flatten, self.blocks, self.head = host.flatten, host.blocks, host.head
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.blocks
        h = first(self.flatten(x))
        change = self.branch(h)
        for block in others:
            h = block(h)
        return self.head(h) + change


def branch_mlp() -> Pair:
    x = torch.randn(1, 64)
    network = GrownModule.wrap(MLPHost(64, hidden=64, n_layers=3), ["blocks.0"], x)
    network.germinate(0, network.catalogue.index("branch"), 0, key=0)
    network.set_blend(0, SeedStage.FOSSILIZED, 1.0)
    plain, branch = esper.export(network, x), network.slot(0).seed
    return plain, Branched(network.release(), branch), x


ROWS: dict[str, Callable[[], Pair]] = {
    "resnet": resnet,
    "gpt": gpt,
    "mlp": mlp,
    "branch_mlp": branch_mlp,
}


def cpu_seconds(model: nn.Module, x: Tensor, calls: int) -> float:
    begin = time.process_time()
    for _ in range(calls):
        model(x)
    return time.process_time() - begin


def ratio(pair: Pair, alternations: int, calls: int) -> float:
    """The median CPU time of the first model over that of the second."""
    *models, x = pair
    times: list[list[float]] = [[], []]
    with torch.inference_mode():
        for model in models:
            cpu_seconds(model.eval(), x, calls // 10)
        for _ in range(alternations):
            for model, found in zip(models, times, strict=True):
                found.append(cpu_seconds(model, x, calls))
    return statistics.median(times[0]) / statistics.median(times[1])


def measure(alternations: int = 15, calls: int = 500) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return {name: round(ratio(make(), alternations, calls), 3) for name, make in ROWS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alternations", type=int, default=15)
    parser.add_argument("--calls", type=int, default=500)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.alternations, arguments.calls)))


if __name__ == "__main__":
    main()
