"""Growth in depth in two processes is growth in one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import esper
from ddp_support import Part, run
from esper.growth.grown_module import keyed
from esper.leyline import ConfigError
from growth_comparison import check_close

EPOCHS = 8
START = esper.Depth("blocks", start=1, when=[0.1, 0.4])
FROZEN = esper.Depth("blocks", add=2, freeze_host=True)
UNUSED = {"find_unused_parameters": True}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, n_layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layers))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class DeepPart(Part):
    """More blocks are better, so that all are kept."""

    def __init__(self, rank: int, size: int, how: str, depth: esper.Depth, **more: Any) -> None:
        given = {"slots": "auto", "depth": depth, "controller": "heuristic", "steps": EPOCHS}
        with keyed(rank):
            model = Deep()
        super().__init__(rank, size, how, model, **given | more)

    def score(self) -> float:
        return len(self.model.blocks) - self.loss()

    def train(self, epochs: int = EPOCHS, **kind: Any) -> None:
        for _ in range(epochs):
            self.epoch(**kind)
            self.body.step(self.score(), self.loss())


def train_part(rank: int, how: str, depth: esper.Depth, options: Any, kind: Any) -> Any:
    part = DeepPart(rank, 2, how, depth, options=options)
    part.train(**kind)
    return part.finish()


@pytest.mark.parametrize(
    ("how", "depth", "options", "kind"),
    [
        ("ddp(attached)", START, {}, {"accumulate": 2, "clip": 0.5}),
        ("attach(ddp)", START, UNUSED, {}),
        ("attach(ddp)", FROZEN, UNUSED, {}),
    ],
)
def test_two_processes_deepen_like_one(
    how: str, depth: esper.Depth, options: dict[str, Any], kind: dict[str, Any]
) -> None:
    first, second = run(train_part, how, depth, options, kind)
    one = DeepPart(0, 1, how, depth)
    one.train(**kind)
    wanted = one.finish()
    assert first["digests"] == second["digests"]
    assert first["history"] == second["history"]
    assert first["events"] == second["events"]
    grown = [event["module"] for event in wanted["events"] if event["event"] == "SeedGerminated"]
    assert grown == (["blocks:3-5"] if depth.add else ["blocks:1-2", "blocks:2-3"])
    assert len(one.model.blocks) == (5 if depth.add else 3)
    for name in ("history", "events"):
        for mine, other in zip(first[name], wanted[name], strict=True):
            check_close(mine, other, 1e-6)


def mistakes(rank: int) -> list[tuple[str, int]]:
    found = []
    for depth in (START, FROZEN):
        model = Deep()
        try:
            esper.attach(
                DistributedDataParallel(model),
                depth=depth,
                example=torch.randn(2, 20),
                evaluate=lambda: 0.0,
                steps=EPOCHS,
            )
        except ConfigError as error:
            trained = sum(p.requires_grad for p in model.parameters())
            found.append((str(error), len(model.blocks) + trained))
    return found


def test_a_module_that_would_wait_for_blocks_is_refused() -> None:
    whole = 3 + len(list(Deep().parameters()))
    for found in run(mistakes):
        assert len(found) == 2
        for message, kept in found:
            assert "find_unused_parameters=True" in message
            assert kept == whole, "the model is as it was"
