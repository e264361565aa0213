"""Loops of every kind around a body: mixed precision, SAM, averages, rates of their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import esper
from architectures import MLP
from esper.growth.export import largest_difference
from esper.leyline import IS_ACTIVE, ConfigError
from esper.tamiyo.controllers.scripted import ScriptedController
from loop_support import Loop

GROWN = "scripted:early"


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around another optimizer, as it is usually written."""

    def __init__(self, params: Any, base: Callable[..., Any], rho: float = 0.05, **kw: Any) -> None:
        super().__init__(params, {"rho": rho, **kw})
        self.base_optimizer = base(self.param_groups, **kw)
        self.param_groups = self.base_optimizer.param_groups

    def _each(self) -> Any:
        return (p for g in self.param_groups for p in g["params"] if p.grad is not None)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self._each()]).norm() + 1e-12
        for p in self._each():
            self.state[p]["offset"] = p.grad * (0.05 / norm)
            p.add_(self.state[p]["offset"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._each():
            p.sub_(self.state[p].get("offset", 0.0))
        self.base_optimizer.step()
        self.zero_grad()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def losses(loop: Loop) -> Any:
    return (
        F.cross_entropy(loop.model(loop.x[rows]), loop.y[rows])
        for rows in torch.arange(80).split(20)
    )


def grow(loop: Loop, epoch: Callable[[Loop], None], epochs: int = 14) -> None:
    """A whole life; then the export equals the live network, and every seed was trained."""
    loop.body.manage(loop.optimizer)
    for _ in range(epochs):
        acts = IS_ACTIVE[loop.body.model.slot(0).stage]
        params = loop.body.model.seed_parameters(0) if acts else []
        born = [p.detach().clone() for p in params]
        epoch(loop)
        assert all(not torch.equal(p, old) for p, old in zip(params, born, strict=True))
        loop.body.step(loop.accuracy())
    assert loop.body.finish().germinated == 1
    assert largest_difference(loop.body.export(), loop.body.model, loop.x[:3]) <= 1e-5


class AutocastInside(MLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize(
    ("inside", "blueprint"), [(True, "mlp_small"), (False, "mlp_small"), (False, "branch")]
)
def test_autocast(inside: bool, blueprint: str) -> None:
    def epoch(loop: Loop) -> None:
        for rows in torch.arange(80).split(20):
            loop.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
                loss = F.cross_entropy(loop.model(loop.x[rows]).float(), loop.y[rows])
            loss.backward()
            loop.optimizer.step()

    script = ScriptedController(f"2 GERMINATE layer1 {blueprint} linear", "one")
    grow(Loop(model=AutocastInside() if inside else None, controller=script), epoch)


def test_a_scaler_of_gradients() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def epoch(loop: Loop) -> None:
        for loss in losses(loop):
            loop.optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(loop.optimizer)
            nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
            scaler.step(loop.optimizer)
            scaler.update()

    loop = Loop(controller=GROWN)
    grow(loop, epoch)
    ratios = [row["layer1.gradient_ratio"] for row in loop.body.history]
    plain = Loop(controller=GROWN)
    grow(plain, Loop.epoch)
    assert ratios[3] == pytest.approx(plain.body.history[3]["layer1.gradient_ratio"], rel=0.5)


def test_accumulation_of_gradients() -> None:
    def epoch(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        for number, loss in enumerate(losses(loop), start=1):
            (loss / 2).backward()
            if number % 2 == 0:
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    grow(Loop(controller=GROWN), epoch)


def sam_loop(**settings: Any) -> Loop:
    loop = Loop(**settings)
    loop.optimizer = SAM(loop.model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    return loop


def sam_epoch(loop: Loop) -> None:
    for rows in torch.arange(80).split(20):
        for step in (loop.optimizer.first_step, loop.optimizer.second_step):  # type: ignore[attr-defined]
            F.cross_entropy(loop.model(loop.x[rows]), loop.y[rows]).backward()
            step()


def test_an_optimizer_inside_another() -> None:
    grow(sam_loop(controller=GROWN), sam_epoch)


def test_a_rollback_brings_back_the_inner_state_too() -> None:
    loop = sam_loop(controller=GROWN)
    loop.body.manage(loop.optimizer)
    for _ in range(5):
        sam_epoch(loop)
        loop.body.step(loop.accuracy())
    base = loop.optimizer.base_optimizer  # type: ignore[attr-defined]
    host = loop.body.model.host_parameters()
    momenta = [base.state[p]["momentum_buffer"].clone() for p in host]
    sam_epoch(loop)
    loop.body.step(loop.accuracy(), validation_loss=float("nan"))
    found = [base.state[p]["momentum_buffer"] for p in host]
    assert all(torch.equal(a, b) for a, b in zip(found, momenta, strict=True))
    assert base.param_groups is loop.optimizer.param_groups
    sam_epoch(loop)
    loop.body.step(loop.accuracy())


# --- averages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_body", [True, False])
def test_an_average_grows_with_the_model(of_body: bool) -> None:
    """Every parameter, of host and seeds, is the average that is computed here by hand."""
    loop, decay = Loop(controller=GROWN), 0.9
    loop.body.manage(loop.optimizer)
    source = loop.body.model if of_body else loop.model
    averaged = AveragedModel(source, multi_avg_fn=get_ema_multi_avg_fn(decay))
    network = loop.body.follow(averaged)
    by_hand: dict[str, Tensor] = {}
    for _ in range(14):
        live = dict(loop.body.model.named_parameters())
        # Of the whole body, torch averages a newborn from its birth on; of the model alone it
        # copies what it averages for the first time.
        newborn = {name for name in live if name not in by_hand}
        copied = newborn if not of_body or not by_hand else set()
        by_hand = {n: by_hand.get(n, p.detach().clone()) for n, p in live.items()}
        for rows in torch.arange(80).split(20):
            loop.optimizer.zero_grad()
            F.cross_entropy(loop.model(loop.x[rows]), loop.y[rows]).backward()
            loop.optimizer.step()
            averaged.update_parameters(source)
            for name, param in live.items():
                old = param if name in copied else by_hand[name]
                by_hand[name] = (decay * old + (1 - decay) * param).detach()
            copied = set()
        mine = dict(network.named_parameters())
        assert mine.keys() == by_hand.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], by_hand[name], rtol=1e-4, atol=1e-6)
        loop.body.step(loop.accuracy())
    assert int(averaged.n_averaged) == 56
    loop.body.finish()
    assert [s.stage for _, s in network.each_slot()] == [
        s.stage for _, s in loop.body.model.each_slot()
    ]
    averaged.update_parameters(source)
    network.eval()
    assert torch.equal(averaged(loop.x), network(loop.x))
    plain = esper.export(network, loop.x[:2])
    assert largest_difference(plain, network, loop.x) <= 1e-5


def test_after_a_rollback_an_average_starts_over() -> None:
    loop = Loop(controller=GROWN)
    loop.body.manage(loop.optimizer)
    averaged = AveragedModel(loop.model)
    network = loop.body.follow(averaged)
    for broken in (False, False, False, True):
        loop.epoch()
        if broken:
            with torch.no_grad():
                loop.model.layer1.weight.fill_(torch.nan)
        averaged.update_parameters(loop.model)
        loop.body.step(loop.accuracy(), validation_loss=float("nan") if broken else None)
    assert int(averaged.n_averaged) == 0
    ours, theirs = network.state_dict(), loop.body.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_averages_that_cannot_follow_are_refused() -> None:
    loop = Loop(controller=GROWN)
    loop.body.manage(loop.optimizer)
    with pytest.raises(ConfigError, match="another model"):
        loop.body.follow(AveragedModel(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="got MLP"):
        loop.body.follow(loop.model)  # type: ignore[arg-type]
    for _ in range(4):
        loop.epoch()
        loop.body.step(loop.accuracy())
    with pytest.raises(ConfigError, match="had already grown"):
        loop.body.follow(AveragedModel(loop.model))


# --- rates of seeds ------------------------------------------------------------------------------


def seed_groups(loop: Loop) -> list[dict[str, Any]]:
    return [group for group in loop.optimizer.param_groups if "esper_slot" in group]


def test_seeds_have_rates_of_their_own() -> None:
    loop = Loop(controller=GROWN)
    loop.body.manage(loop.optimizer, seed_lr=0.5, seed_weight_decay=0.25)
    assert {group["lr"] for group in seed_groups(loop)} == {0.5}
    assert {group["weight_decay"] for group in seed_groups(loop)} == {0.25}
    assert loop.optimizer.param_groups[0]["lr"] == 3e-3
    for wrong in ("seed_lr", "seed_weight_decay"):
        other = Loop()
        with pytest.raises(ConfigError, match=f"{wrong} must be"):
            other.body.manage(other.optimizer, **{wrong: -1.0})


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr.CosineAnnealingLR(o, 10),
        lambda o: lr.StepLR(o, 2, 0.5),
        lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch),
        lambda o: lr.OneCycleLR(o, max_lr=3e-3, total_steps=12),
        lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.ExponentialLR(o, 0.5)], [4]),
    ],
)
def test_schedulers_apply_to_the_rate_of_seeds(make: Any, after: int) -> None:
    """Always the same multiple of the first group's rate, whenever the scheduler was made."""
    loop = Loop()
    scheduler = make(loop.optimizer)
    for _ in range(after):
        loop.optimizer.step()
        scheduler.step()
    base = loop.optimizer.param_groups[0]["initial_lr"]
    loop.body.manage(loop.optimizer, scheduler, seed_lr=10.0 * base)
    for _ in range(6):
        loop.optimizer.step()
        scheduler.step()
        first = loop.optimizer.param_groups[0]["lr"]
        assert [g["lr"] for g in seed_groups(loop)] == pytest.approx([10.0 * first] * 2)


def test_gradients_of_a_closure_are_measured_like_any_others() -> None:
    """Some loops compute them inside the optimizer's step."""
    histories = []
    for how in ("before", "closure", "named closure"):
        loop = Loop()
        loop.model.dropout.p = 0.0
        loop.body.manage(loop.optimizer)
        for _ in range(8):
            for rows in torch.arange(80).split(20):

                def closure(rows: Tensor = rows, loop: Loop = loop) -> Tensor:
                    loop.optimizer.zero_grad()
                    loss = F.cross_entropy(loop.model(loop.x[rows]), loop.y[rows])
                    loss.backward()
                    return loss

                if how == "before":
                    closure()
                    loop.optimizer.step()
                elif how == "closure":
                    loop.optimizer.step(closure)
                else:
                    loop.optimizer.step(closure=closure)
            loop.body.step(loop.accuracy())
        histories.append(loop.body.history)
    assert any(row["layer1.gradient_ratio"] for row in histories[0])
    assert histories[0] == histories[1] == histories[2]
