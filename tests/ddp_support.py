"""Training in two processes with DistributedDataParallel, and the same training in one.

Functions that run in the processes must be importable from here or from a test file.
"""

import hashlib
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import esper
from architectures import MLP
from esper.growth.grown_module import keyed
from esper.tamiyo.controllers.scripted import ScriptedController
from helpers import grow_arguments

PATIENCE = 240.0  # seconds that the processes may take
SCRIPT = """
1 GERMINATE layer1 lora_large linear
2 GERMINATE layer2 branch gated
5 CULL layer1
13 GERMINATE layer1 widen_half linear
auto FOSSILIZE
"""


def run(task: Callable[..., Any], *args: Any, processes: int = 2) -> list[Any]:
    """The results of `task(rank, *args)` in each of the processes, which form a gloo group. A
    process that fails returns its exception."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "esper.api", "ddp_support"])
    with TemporaryDirectory() as folder:
        started = [
            context.Process(target=_process, args=(folder, rank, processes, task, args))
            for rank in range(processes)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
        files = [Path(folder) / f"{rank}.pickle" for rank in range(processes)]
        return [pickle.loads(f.read_bytes()) if f.exists() else None for f in files]


def _process(folder: str, rank: int, size: int, task: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE / 2),
    )
    try:
        result = task(rank, *args)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        traceback.print_exc()
        result = error
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(result))


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of named tensors."""
    state = hashlib.sha256()
    for name, tensor in tensors:
        state.update(name.encode() + tensor.detach().numpy().tobytes())
    return state.hexdigest()


class Part:
    """The part of one process in a training run, or the whole of it if `size` is 1."""

    def __init__(
        self,
        rank: int,
        size: int,
        how: str = "attach(ddp)",
        model: nn.Module | None = None,
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.rank, self.size, self.options = rank, size, options or {}
        with keyed(rank):  # DDP starts from the weights of the first process
            self.model = (model or MLP()).double()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        with keyed(0):
            y = torch.arange(144) % 5
            x = torch.randn(144, 20, dtype=torch.float64) + 0.7 * y[:, None]
        # The last batch is smaller than the others.
        self.batches = [(x[rows], y[rows]) for rows in torch.arange(88).split(20)]
        self.validation = x[88:][rank::size], y[88:][rank::size]
        self.digests: list[str] = []
        arguments: dict[str, Any] = {
            "slots": ["layer1", "layer2"],
            "example": x[:2],
            "evaluate": self.score,
            "steps": 18,
            "controller": ScriptedController(SCRIPT, "test"),
            **settings,
        }
        self.build(how, arguments)

    def build(self, how: str, arguments: dict[str, Any]) -> None:
        """Wrap the model into DDP before or after it is attached."""
        self.caller: nn.Module = self.model
        if how == "attach(ddp)":
            self.caller = self.ddp(self.model)
        self.body = esper.attach(self.caller, **grow_arguments(**arguments))
        if how == "ddp(attached)":
            self.caller = self.ddp(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.03, momentum=0.9)
        self.body.manage(self.optimizer)
        if how == "ddp(body.model)":
            self.caller = self.ddp(self.body.model)
        self.averaged, average = 0, self.body.processes.average_gradients

        def counted(parameters: Iterable[nn.Parameter]) -> None:
            self.averaged += 1
            average(parameters)

        self.body.processes.average_gradients = counted  # type: ignore[method-assign]
        self.optimizer.register_step_post_hook(lambda *_: self.digests.append(self.digest()))

    def ddp(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, **self.options) if self.size > 1 else model

    def digest(self) -> str:
        return digest(self.body.model.named_parameters())

    def loss(self) -> float:
        x, y = self.validation
        with torch.no_grad():
            return float(F.cross_entropy(self.model(x), y))

    def score(self) -> float:
        return -self.loss()

    def backward(self, x: Tensor, y: Tensor, share: float = 1.0) -> None:
        (share * F.cross_entropy(self.caller(x), y)).backward()

    def epoch(self, accumulate: int = 1, clip: float | None = None) -> None:
        for x, y in self.batches:
            x, y = x[self.rank :: self.size], y[self.rank :: self.size]
            self.optimizer.zero_grad()
            parts = list(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True))
            for index, (some_x, some_y) in enumerate(parts):
                last = index == len(parts) - 1 or self.size == 1
                with nullcontext() if last else self.caller.no_sync():  # type: ignore[operator]
                    self.backward(some_x, some_y, len(some_x) / len(x))
            if clip is not None:
                nn.utils.clip_grad_norm_(self.body.model.parameters(), clip)
            self.optimizer.step()

    def train(self, epochs: int = 18, **kind: Any) -> None:
        for _ in range(epochs):
            self.epoch(**kind)
            loss = self.loss()
            self.body.step(-loss, loss)

    def finish(self) -> dict[str, Any]:
        """What the run was; seeds that are kept are trained further."""
        self.body.finish()
        self.epoch()
        return {
            "history": self.body.history,
            "digests": self.digests,
            "averaged": self.averaged,
            "events": [event.row() for event in self.body.recorder.events],
        }
