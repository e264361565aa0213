"""Growth in two processes with DistributedDataParallel is growth in one."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import esper
from architectures import MLP
from ddp_support import Part, digest, run
from esper.growth.blueprints.catalogue import BlueprintCatalogue, default_catalogue
from esper.leyline import ConfigError, EsperError
from esper.leyline.events import SeedGerminated
from esper.tamiyo.controllers.scripted import ScriptedController
from growth_comparison import check_close
from helpers import everywhere

EPOCHS = 18


def train_part(
    rank: int, how: str, options: dict[str, Any], kind: dict[str, Any]
) -> dict[str, Any]:
    part = Part(rank, 2, how, options=options)
    part.train(**kind)
    return part.finish()


def check_same(found: list[dict[str, Any]], kind: dict[str, Any]) -> dict[str, Any]:
    """The processes are equal to the bit, and to one process up to rounding."""
    one, first, second = Part(0, 1), *found
    one.train(**kind)
    wanted = one.finish()
    assert first["digests"] == second["digests"]
    for mine, other in zip(first["history"], wanted["history"], strict=True):
        check_close(mine, other, 1e-6)
    for mine, other in zip(first["events"], wanted["events"], strict=True):
        check_close(mine, other, 1e-6)
    assert first["history"] == second["history"]
    assert first["events"] == second["events"]
    return first


@pytest.mark.parametrize(
    ("how", "options", "kind"),
    [
        ("attach(ddp)", {}, {}),
        ("attach(ddp)", {"static_graph": True}, {"clip": 0.5}),
        ("ddp(attached)", {"gradient_as_bucket_view": True}, {"accumulate": 2, "clip": 0.5}),
        ("ddp(body.model)", {"find_unused_parameters": True}, {"accumulate": 2}),
    ],
)
def test_two_processes_grow_like_one(
    how: str, options: dict[str, Any], kind: dict[str, Any]
) -> None:
    first = check_same(run(train_part, how, options, kind), kind)
    assert len(first["history"]) == EPOCHS
    assert len(first["digests"]) == 5 * (EPOCHS + 1)
    # Not in the passes inside no_sync.
    assert EPOCHS < first["averaged"] <= len(first["digests"])
    grown = [event["blueprint"] for event in first["events"] if event["event"] == "SeedGerminated"]
    assert grown == ["lora_large", "branch", "widen_half"]
    assert any(row["layer2.contribution"] is not None for row in first["history"])


def resumed(rank: int, folder: Path) -> dict[str, Any]:
    part = Part(rank, 2)
    part.train(7)
    if rank == 0:
        torch.save(part.body.state_dict(), folder / "checkpoint.pt")
    dist.barrier()
    rest = Part(rank, 2)
    rest.body.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True))
    rest.train(EPOCHS - 7)
    return rest.finish()


def test_training_resumes_from_the_checkpoint_of_one_process(tmp_path: Path) -> None:
    check_same(run(resumed, tmp_path), {})


def dies(rank: int, when: str) -> None:
    part = Part(rank, 2)
    part.train(3)
    part.epoch()
    if rank == 1:
        os._exit(3)
    part.epoch() if when == "training" else part.body.step(0.0)


@pytest.mark.parametrize("when", ["training", "step"])
def test_if_one_process_dies_the_other_ends_with_an_error(when: str) -> None:
    error, nothing = run(dies, when)
    assert nothing is None
    assert isinstance(error, RuntimeError if when == "training" else EsperError)
    assert when == "training" or "another process" in str(error)


def error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    return None


def mistakes(rank: int) -> dict[str, BaseException | None]:
    def direct() -> None:
        part = Part(rank, 2)
        part.caller = part.model
        part.train(2)

    def joined() -> None:
        part = Part(rank, 2)
        part.train(3)
        with part.caller.join():  # type: ignore[operator]
            part.epoch()

    def forgotten() -> None:
        part = Part(rank, 2)
        if rank == 0:
            part.optimizer.step()
        part.body.step(0.0)

    def other_state() -> None:
        part = Part(rank, 2)
        part.train(1)
        state = part.body.state_dict()
        if rank == 0:
            state["cycle"]["slots"] = ["elsewhere"]
        part.body.load_state_dict(state)

    def by_grow() -> None:
        x = [(torch.randn(4, 20), torch.arange(4))]
        esper.grow(MLP(), x, x, slots=["layer1"])

    def zero_redundancy() -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = MLP()
        body = esper.attach(
            model, slots=["layer1"], example=torch.randn(2, 20), evaluate=lambda: 0.0
        )
        body.manage(ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1))

    calls: dict[str, Callable[[], Any]] = {
        "zero redundancy": zero_redundancy,
        "direct": direct,
        "joined": joined,
        "forgotten": forgotten,
        "other state": other_state,
        "grow": by_grow,
        "key": lambda: Part(rank, 2, key=rank),
        "slots": lambda: Part(rank, 2, slots=["layer1", "layer2"][: 2 - rank], controller="random"),
    }
    return {name: error_of(call) for name, call in calls.items()}


def test_mistakes_end_all_processes_with_the_reason() -> None:
    for found in zip(*(each.items() for each in run(mistakes)), strict=True):
        for number, (name, error) in enumerate(found):
            kind, word = {
                "zero redundancy": (ConfigError, "ZeroRedundancyOptimizer"),
                "direct": (EsperError, "DistributedDataParallel"),
                "joined": (ConfigError, "join"),
                "forgotten": (EsperError, "not stepped"),
                "other state": (EsperError, "elsewhere"),
                "grow": (ConfigError, "attach"),
                "key": (ConfigError, "key"),
                "slots": (ConfigError, "layer2"),
            }[name]
            assert isinstance(error, kind), (name, number, error)
            assert word in str(error)


class Normed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.relu(self.layer1(x)))
        return self.head(torch.relu(self.layer2(x)))


def drawn_by_numpy(channels: int) -> nn.Module:
    """A seed whose first weights do not come from torch's generator."""
    layer = nn.Linear(channels, channels)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.random.default_rng().normal(size=(16, 16))))
        layer.weight.mul_(1e-3)
    return layer


def uneven(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    # Scores of unequal parts, and one that is not finite in one process only.
    part = Part(rank, 2)
    rows = slice(0, 40) if rank == 0 else slice(40, None)
    whole = Part(0, 1)
    part.validation = tuple(each[rows] for each in whole.validation)
    for epoch in range(8):
        part.epoch()
        loss = part.loss() if (epoch, rank) != (6, 1) else float("nan")
        part.body.step(-loss, loss, samples=len(part.validation[1]))
    found["history"], found["digest"] = part.body.history, part.digest()

    # Batches, buffers, first weights of seeds and decisions that differ.
    catalogue = BlueprintCatalogue(
        (*default_catalogue().specs, everywhere("drawn", drawn_by_numpy)),
    )
    plants = "1 GERMINATE layer1 drawn linear" if rank == 0 else "auto FOSSILIZE"
    part = Part(
        rank,
        2,
        model=Normed(),
        slots=esper.Slots(["layer1"], blueprints=catalogue),
        controller=ScriptedController(plants, "test"),
    )
    x, y = part.batches[-1]
    part.batches[-1] = x[:7], y[:7]
    averaged = AveragedModel(part.caller, avg_fn=get_ema_avg_fn(0.9))
    average = part.body.follow(averaged)
    part.optimizer.register_step_post_hook(lambda *_: averaged.update_parameters(part.caller))
    part.train(6)
    for when in ("trained", "finished"):
        tensors = [*part.body.model.named_parameters(), *part.body.model.named_buffers()]
        found[when] = digest(tensors), digest(average.named_parameters())
        part.body.finish()
    events = part.body.recorder.events
    found["seeds"] = [event.blueprint for event in events if isinstance(event, SeedGerminated)]

    # A gradient that overflows in one process: the scaler of each must leave out that step.
    part, scaler = Part(rank, 2), torch.amp.GradScaler("cpu", init_scale=8.0)
    for epoch in range(4):
        for number, (x, y) in enumerate(part.batches):
            part.optimizer.zero_grad()
            loss = F.cross_entropy(part.caller(x[rank::2]), y[rank::2])
            overflows = (epoch, number, rank) == (3, 1, 1)
            scaler.scale(loss * torch.inf if overflows else loss).backward()
            scaler.step(part.optimizer)
            scaler.update()
        part.body.step(part.score())
    found["scaled"] = part.digests, scaler.get_scale()

    # A seed that the network has from the start, so that DDP sees it, and a rollback replaces it.
    lora = default_catalogue().index("lora_large")
    settings = esper.GrowthSettings(topology=((1, lora),))
    part = Part(rank, 2, "ddp(body.model)", settings=settings, controller="static")
    part.train(1)
    part.epoch()
    part.body.step(float("nan"))
    part.train(2)
    found["from the start"] = list(part.digests)

    # Each process may go on alone.
    part.body.finish()
    dist.destroy_process_group()
    part.caller = part.model
    part.epoch()
    found["seed stays"] = part.body.model.slot(1).seed is not None
    return found


def test_processes_with_unequal_data_stay_equal() -> None:
    first, second = run(uneven)
    assert first == second
    assert first["seeds"] == ["drawn"]
    assert first["scaled"][1] == 4.0
    assert first["seed stays"]
    one = Part(0, 1)
    one.train(6)
    for mine, wanted in zip(first["history"][:6], one.body.history, strict=True):
        check_close(mine, wanted, 1e-6)
    assert [row["rolled_back"] for row in first["history"]] == [False] * 6 + [True, False]


def sharded(rank: int) -> dict[str, BaseException | None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1,))

    def attach(model: nn.Module) -> BaseException | None:
        example = torch.randn(2, 20)
        return error_of(
            lambda: esper.attach(model, slots=["layer1"], example=example, evaluate=lambda: 0.0)
        )

    tensor_parallel = parallelize_module(MLP(), mesh, {"layer1": ColwiseParallel()})
    model = MLP()
    body = esper.attach(model, slots=["layer1"], example=torch.randn(2, 20), evaluate=lambda: 0.0)
    fully_shard(model, mesh=mesh)
    return {
        "fully_shard": attach(fully_shard(MLP(), mesh=mesh)),
        "DTensor": attach(tensor_parallel),
        "DataParallel": attach(DataParallel(MLP())),
        "later": error_of(lambda: body.manage(torch.optim.SGD(model.parameters(), lr=0.1))),
    }


def listed(rank: int) -> list[list[str]]:
    found = (MLP(), DistributedDataParallel(MLP()))
    return [[s.name for s in esper.list_slots(m, torch.randn(2, 20))] for m in found]


def test_slots_of_a_wrapped_model_have_the_names_of_the_model() -> None:
    ((plain, wrapped),) = run(listed, processes=1)
    assert wrapped == plain


def test_other_kinds_of_parallel_training_are_refused() -> None:
    (found,) = run(sharded, processes=1)
    words = {
        "fully_shard": "FSDP",
        "DTensor": "DTensor",
        "DataParallel": "DataParallel",
        "later": "FSDP",
    }
    for name, word in words.items():
        assert isinstance(found[name], ConfigError), (name, found[name])
        assert word in str(found[name])
        assert "use DistributedDataParallel" in str(found[name])


@pytest.mark.soak
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    example = Path(__file__).parents[1] / "examples" / "ddp_loop.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(example)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    # Only the first process reports; it has grown.
    accuracy, seed, exported = done.stdout.splitlines()
    assert "% with" in accuracy
    assert "in 1" in seed
    assert exported.startswith("Sequential")
