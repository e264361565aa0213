"""Models and training loops as users bring them: each grows and its export equals the live network,
also where Esper is not installed, or it is refused in a sentence that says why."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import AveragedModel

import esper
from esper.growth.export import export, largest_difference
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.outputs import tensors_in
from esper.growth.sites import call_model
from esper.leyline import BLEND_NAMES, ConfigError, EsperError, SeedStage
from helpers import plant
from model_cases import MODELS, ModelCase, perceptron

GATED = BLEND_NAMES.index("gated")
WORKING = [name for name, case in MODELS.items() if not case.refused]
Export = tuple[nn.Module, Any]


def loss_of_output(output: Any) -> Tensor:
    floats = [t for t in tensors_in(output) if t.is_floating_point()]
    return torch.stack([t.float().square().mean() for t in floats]).sum()


def wrapped(case: ModelCase) -> tuple[GrownModule, Any]:
    with keyed(0):
        model, x = case.make(), case.example()
    return GrownModule.wrap(model, list(case.slots), x, **case.settings), x


@cache
def grown_model(name: str) -> Export:
    """A life of every seed in a few steps, with the gradients that it should have; its export."""
    case = MODELS[name]
    network, x = wrapped(case)
    optimizer = optim.SGD(network.host_parameters(), lr=1e-3)
    for stage, alpha in (
        (SeedStage.TRAINING, 0.0),
        (SeedStage.BLENDING, 0.4),
        (SeedStage.FOSSILIZED, 1.0),
    ):
        for index, site in enumerate(network.sites):
            if stage == SeedStage.TRAINING:
                plant(network, index, case.slots[site.module], stage, alpha, GATED, shake=0.1)
            network.set_blend(index, stage, alpha)
        optimizer.param_groups[0]["params"] = list(network.parameters())
        network.train()
        network.zero_grad()
        loss_of_output(call_model(network, x)).backward()
        for index, site in enumerate(network.sites):
            norms = [p.grad is not None and float(p.grad.norm()) for p in _seed(network, index)]
            assert all(norms), (name, site.module, stage)
        optimizer.step()
        assert largest_difference(export(network, x), network, x) <= 1e-5
    return export(network, x).eval(), x


def _seed(network: GrownModule, index: int) -> Iterable[nn.Parameter]:
    seed = network.slot(index).seed
    assert seed is not None
    return seed.parameters()


@pytest.mark.parametrize("name", WORKING)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_model_grows_and_is_exported(name: str) -> None:
    plain, _ = grown_model(name)
    live = sum(p.numel() for p in plain.parameters())
    assert live > sum(p.numel() for p in MODELS[name].make().parameters())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WORKING])
def test_a_model_is_refused_in_a_sentence(name: str) -> None:
    case = MODELS[name]
    with pytest.raises(ConfigError, match=case.refused):
        plant_everywhere(case)


def plant_everywhere(case: ModelCase) -> None:
    network, _ = wrapped(case)
    for index, site in enumerate(network.sites):
        plant(network, index, case.slots[site.module], SeedStage.HOLDING, 1.0)


def test_layout_and_causality_reach_the_network() -> None:
    case = MODELS["own layer, told"]
    x, y = case.example(), torch.zeros(4, dtype=torch.int64)
    slots = esper.Slots(["own"], x, {"own": "BTC"})
    grown = esper.grow(case.make(), [(x, y)], [(x, y)], slots=slots, controller="static", steps=2)
    causal = replace(slots, causal=True)
    body = esper.attach(case.make(), slots=causal, evaluate=lambda: 0.0, steps=2)
    assert [(s.layout, s.causal) for s in grown.model.sites] == [("BTC", False)]
    assert [(s.layout, s.causal) for s in body.model.sites] == [("BTC", True)]
    assert esper.list_slots(case.make(), x, {"own": "BTC"})[0].layout == "BTC"


# --- loops -----------------------------------------------------------------------------------


class Loop:
    """A training loop on a small problem; cases change a part of it."""

    def __init__(self, model: nn.Module | None = None, **settings: Any) -> None:
        with keyed(0):
            self.model = perceptron() if model is None else model
            self.y = torch.arange(60) % 3
            self.x = torch.randn(60, 8) + self.y[:, None]
        self.forward: Callable[[Tensor], Tensor] = self.model
        self.settings = {"slots": ["0", "2"], **settings}
        self.optimizer: optim.Optimizer = optim.SGD(self.model.parameters(), lr=0.05)
        self.scheduler: Any = None

    def score(self) -> float:
        self.model.eval()
        with torch.no_grad():
            right = self.forward(self.x).argmax(1) == self.y
        self.model.train()
        return 100.0 * float(right.float().mean())

    def loss(self, rows: Tensor) -> Tensor:
        return F.cross_entropy(self.forward(self.x[rows]), self.y[rows])

    def update(self, rows: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(rows).backward()
        self.optimizer.step()

    def run(self) -> Export:
        body = esper.attach(
            self.model,
            example=self.x[:4],
            evaluate=self.score,
            steps=9,
            controller="scripted:early",
            **self.settings,
        )
        before = [p.detach().clone() for p in self.model.parameters()]
        body.manage(self.optimizer, *([self.scheduler] if self.scheduler else []))
        for _ in range(9):
            for rows in torch.arange(60).split(20):
                self.update(rows)
            score = self.score()
            if self.scheduler:
                plateau = isinstance(self.scheduler, lr.ReduceLROnPlateau)
                self.scheduler.step(*([score] if plateau else []))
            body.step(score)
        slot = body.model.slot(0)
        assert slot.seed is not None, "something grew"
        assert any(
            float(p.detach().abs().max()) > 1e-3 for p in slot.seed.parameters() if p.dim() > 1
        )
        after = list(self.model.parameters())
        moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert all(m == p.requires_grad for m, p in zip(moved, after, strict=True))
        plain = body.export()
        assert largest_difference(plain, body.model, self.x[:4]) <= 1e-5
        return plain.eval(), self.x[:4]


def optimised(make: Callable[..., optim.Optimizer]) -> Callable[[], Loop]:
    def loop() -> Loop:
        loop = Loop()
        loop.optimizer = make(loop.model.parameters())
        return loop

    return loop


def scheduled(make: Callable[[optim.Optimizer], Any]) -> Callable[[], Loop]:
    def loop() -> Loop:
        loop = Loop()
        loop.optimizer = optim.SGD(loop.model.parameters(), lr=0.05, momentum=0.9)
        loop.scheduler = make(loop.optimizer)
        return loop

    return loop


class Accumulating(Loop):
    def update(self, rows: Tensor) -> None:
        self.optimizer.zero_grad()
        for part in rows.split(5):
            (self.loss(part) * len(part) / len(rows)).backward()
        self.optimizer.step()


class Clipping(Loop):
    def update(self, rows: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(rows).backward()
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, 0.5)
        self.optimizer.step()


class SharpnessAware(Loop):
    """Two passes per step: the gradient is taken where the loss is worst nearby."""

    def update(self, rows: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(rows).backward()
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        moves = [(p, 0.02 * p.grad / (p.grad.norm() + 1e-8)) for p in params if p.grad is not None]
        with torch.no_grad():
            for p, move in moves:
                p += move
        self.optimizer.zero_grad()
        self.loss(rows).backward()
        with torch.no_grad():
            for p, move in moves:
                p -= move
        self.optimizer.step()


class Averaged(Loop):
    """An average of the weights of the model's own part, kept beside the training."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.model[4])  # type: ignore[index]

    def update(self, rows: Tensor) -> None:
        super().update(rows)
        self.average.update_parameters(self.model[4])  # type: ignore[index]


class Autocast(Loop):
    def loss(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(rows)


def per_layer() -> Loop:
    loop = Loop()
    first, *others = (m for m in loop.model if isinstance(m, nn.Linear))  # type: ignore[union-attr]
    loop.optimizer = optim.SGD(
        [{"params": first.parameters(), "lr": 0.1}]
        + [{"params": layer.parameters(), "lr": 0.02, "weight_decay": 1e-3} for layer in others]
    )
    return loop


def frozen() -> Loop:
    loop = Loop()
    loop.model[0].requires_grad_(False)  # type: ignore[index]
    loop.optimizer = optim.SGD([p for p in loop.model.parameters() if p.requires_grad], lr=0.05)
    return loop


def compiled() -> Loop:
    loop = Loop()
    loop.forward = torch.compile(loop.model, backend="eager")
    return loop


def flat(optimizer: str, **settings: Any) -> Callable[[], Loop]:
    return optimised(lambda params: getattr(optim, optimizer)(params, **settings))


LOOPS: dict[str, Callable[[], Loop]] = {
    "SGD": flat("SGD", lr=0.05),
    "SGD, Nesterov": flat("SGD", lr=0.05, momentum=0.9, nesterov=True),
    "Adam": flat("Adam", lr=0.01),
    "Adam, amsgrad": flat("Adam", lr=0.01, amsgrad=True),
    "AdamW": flat("AdamW", lr=0.01),
    "AdamW, fused": flat("AdamW", lr=0.01, fused=True),
    "NAdam": flat("NAdam", lr=0.01),
    "RAdam": flat("RAdam", lr=0.01),
    "Adamax": flat("Adamax", lr=0.01),
    "Adadelta": flat("Adadelta", lr=1.0),
    "Adafactor": flat("Adafactor", lr=0.05),
    "ASGD": flat("ASGD", lr=0.05),
    "RMSprop": flat("RMSprop", lr=0.005),
    "Rprop": flat("Rprop", lr=0.01),
    "StepLR": scheduled(lambda o: lr.StepLR(o, 3)),
    "MultiStepLR": scheduled(lambda o: lr.MultiStepLR(o, [3, 6])),
    "CosineAnnealingLR": scheduled(lambda o: lr.CosineAnnealingLR(o, 12)),
    "CosineAnnealingWarmRestarts": scheduled(lambda o: lr.CosineAnnealingWarmRestarts(o, 4)),
    "ExponentialLR": scheduled(lambda o: lr.ExponentialLR(o, 0.95)),
    "LinearLR": scheduled(lambda o: lr.LinearLR(o, 0.3, 1.0, 4)),
    "LambdaLR": scheduled(lambda o: lr.LambdaLR(o, lambda epoch: 0.95**epoch)),
    "OneCycleLR": scheduled(lambda o: lr.OneCycleLR(o, 0.1, 12)),
    "CyclicLR": scheduled(lambda o: lr.CyclicLR(o, 0.01, 0.1, 3)),
    "ReduceLROnPlateau": scheduled(lambda o: lr.ReduceLROnPlateau(o, "max", patience=1)),
    "SequentialLR": scheduled(
        lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.3, 1.0, 3), lr.ExponentialLR(o, 0.95)], [3])
    ),
    "gradient accumulation": Accumulating,
    "clipping": Clipping,
    "sharpness-aware": SharpnessAware,
    "averaged weights": Averaged,
    "autocast": Autocast,
    "per-layer rates": per_layer,
    "frozen backbone": frozen,
    "torch.compile": compiled,
}


@cache
def grown_loop(name: str) -> Export:
    with keyed(0):
        return LOOPS[name]().run()


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loop_grows_its_model(name: str) -> None:
    plain, _ = grown_loop(name)
    assert sum(p.numel() for p in plain.parameters()) > sum(
        p.numel() for p in perceptron().parameters()
    )


@pytest.mark.parametrize("name", ["Adagrad", "LBFGS"])
def test_an_optimizer_that_cannot_take_new_parameters_is_refused(name: str) -> None:
    with pytest.raises(EsperError, match=f"{name} cannot take new parameters"):
        flat(name, lr=0.01)().run()


# --- without Esper ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_every_export_runs_where_esper_is_not_installed(tmp_path: Path) -> None:
    cases = {f"model {name}": grown_model(name) for name in WORKING}
    cases |= {f"loop {name}": grown_loop(name) for name in LOOPS}
    assert len(cases) + len(MODELS) - len(WORKING) >= 45
    for i, (name, (plain, x)) in enumerate(cases.items()):
        with torch.no_grad():
            outputs = list(tensors_in(call_model(plain, x)))
        file = tmp_path / f"{i:03}.pt"
        # Torch itself saves modules with parametrisations only as programs.
        if any(is_parametrized(module) for module in plain.modules()):
            torch.export.save(torch.export.export(plain, (x,)), file.with_suffix(".pt2"))
            plain = None
        torch.save((name, plain, x, outputs), file)
    tests = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, tests / "exports_without_esper.py", tmp_path, tests],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(len(cases)), "exports", "equal"]
