"""Small networks and shortcuts that several tests share."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import esper
from esper.growth.blueprints.catalogue import BlueprintCatalogue, BlueprintSpec, default_catalogue
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.hosts import CNNHost, MLPHost, TransformerHost
from esper.leyline import Recorder, SeedStage
from esper.leyline.growth_settings import GrowthSettings
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.run import GrowthEnv
from esper.tolaria.fused.population import FusedPopulation
from esper.tolaria.tasks import Task, find_task

BLENDED = {SeedStage.BLENDING: 0.4, SeedStage.HOLDING: 1.0, SeedStage.FOSSILIZED: 1.0}


def cnn() -> tuple[nn.Module, Tensor]:
    with keyed(0):
        return CNNHost(base_channels=4, in_channels=1), torch.randn(6, 1, 8, 8)


def transformer() -> tuple[nn.Module, Tensor]:
    with keyed(0):
        host = TransformerHost(32, n_embd=16, n_head=4, n_layer=3, block_size=12, dropout=0.0)
        return host, torch.randint(0, 32, (4, 12))


def mlp() -> tuple[nn.Module, Tensor]:
    with keyed(0):
        return MLPHost(10, hidden=12, n_layers=3), torch.randn(6, 10)


HOSTS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "cnn": cnn,
    "transformer": transformer,
    "mlp": mlp,
}


def wrap(name: str, catalogue: BlueprintCatalogue | None = None) -> tuple[GrownModule, Tensor]:
    host, x = HOSTS[name]()
    return GrownModule.wrap(host, host.slot_modules, x, catalogue), x  # type: ignore[arg-type]


def fitting(name: str, kinds: tuple[str, ...] = ("residual", "branch", "bypass")) -> list[str]:
    """Blueprints that fit the hosts of a topology."""
    specs = default_catalogue().specs
    return [spec.name for spec in specs if name in spec.factories and spec.kind in kinds]


def plant(
    network: GrownModule,
    slot: int,
    blueprint: str,
    stage: SeedStage,
    alpha: float,
    blend: int = 0,
    shake: float = 0.0,
) -> None:
    """Put a seed at any stage into a slot; `shake` moves its weights away from birth."""
    network.germinate(slot, network.catalogue.index(blueprint), blend, key=slot + 1)
    with torch.no_grad(), keyed(slot):
        for parameter in network.seed_parameters(slot):
            parameter.add_(shake * torch.randn_like(parameter))
    network.set_blend(slot, stage, alpha)


def loss_of(output: Tensor) -> Tensor:
    """A loss with a gradient everywhere."""
    with keyed(3):
        return (output * torch.randn_like(output)).sum() + output.square().mean()


def grads(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.1),
    "adamw": lambda p: AdamW(p, lr=0.1, weight_decay=0.1),
    "adamw fused": lambda p: AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.1),
}


def step(network: GrownModule, optimizer: Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(network(x)).backward()
    optimizer.step()


class _Tick(torch.autograd.Function):
    """`x`, and for the clock a gradient of -1, with which Adam moves it on by its learning rate."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, clock: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.shape = inputs[1].shape

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], -torch.ones(ctx.shape)


class Clocked(nn.Module):
    """A seed that knows for how many batches it was trained, and multiplies by `factor` of it.

    The clock is a parameter, so that it is right in a loop over modules and in stacked rows, and
    goes back with a rollback."""

    rate = find_task("digits").learning_rate

    def __init__(self, channels: int, factor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels,), 1e-4))
        self.clock = nn.Parameter(torch.zeros(()))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, 1, 1) if x.dim() == 4 else (-1,)
        batches = (self.clock.detach() / self.rate).round()
        return _Tick.apply(x * self.weight.view(shape) * self.factor(batches), self.clock)


def nan_after(batches: int) -> Callable[[int], nn.Module]:
    """Blueprint of seeds that give NaN once they were trained for so many batches."""

    def factor(done: Tensor) -> Tensor:
        return torch.where(done >= batches, torch.nan, 1.0)

    return lambda channels: Clocked(channels, factor)


def exploding(channels: int) -> nn.Module:
    """A seed that is finite, and larger with every training batch."""
    return Clocked(channels, lambda done: 1.5 ** (done + 1))


def everywhere(name: str, make: Callable[[int], nn.Module]) -> BlueprintSpec:
    return BlueprintSpec(
        name, "residual", {"cnn": make, "transformer": make, "mlp": make}, "for tests"
    )


def small_digits(train: int = 128, val: int = 297) -> tuple[Task, Any]:
    """The digits task with less training data, to be quick."""

    task = find_task("digits")
    data = task.load(Path("unused"))
    small = replace(
        data,
        train_x=data.train_x[:train],
        train_y=data.train_y[:train],
        val_x=data.val_x[:val],
        val_y=data.val_y[:val],
    )
    return task, small


def episode_settings(max_steps: int, **own: Any) -> GrowthSettings:
    """As in training runs: a rollback ends an episode, which keeps its last epoch."""
    return GrowthSettings(max_steps, **{"on_panic": "terminate", "keep_best": False, **own})


def digits_env(
    keys: list[int],
    max_steps: int = 30,
    catalogue: BlueprintCatalogue | None = None,
    train: int = 128,
    kind: str = "looped",
    recorder: Recorder | None = None,
    **settings: Any,
) -> GrowthEnv:
    task, data = small_digits(train)
    recipe = task.recipe(data, catalogue)
    make: Any = {"looped": LoopedPopulation, "fused": FusedPopulation}[kind]
    return GrowthEnv(
        make(recipe, keys),
        episode_settings(max_steps, **settings),
        random_guess_loss=math.log(10),
        recorder=recorder,
    )


def network_of(env: GrowthEnv, index: int) -> GrownModule:
    """One host with its seeds: of a looped population the live one, of a fused one a copy."""
    population: Any = env.population
    if isinstance(population, FusedPopulation):
        return population.network(index)
    return population.networks[index]


def trained_params(env: GrowthEnv, index: int) -> int:
    """How many numbers the optimizer changes for this host."""
    population: Any = env.population
    if isinstance(population, FusedPopulation):
        held = [seed for seed in population.seeds[index] if seed is not None]
        rows = [
            population.hosts[index],
            *(s.row for s in held),
            *(s.valve for s in held if s.valve),
        ]
        return sum(row.values.shape[1] for row in rows)
    groups = population.optimizers[index].param_groups
    return sum(p.numel() for group in groups for p in group["params"])


def break_host(env: GrowthEnv, index: int) -> None:
    """What a blown-up update does: the governor finds it after the next epoch."""
    population: Any = env.population
    if isinstance(population, FusedPopulation):
        row = population.hosts[index]
        population.hosts[index] = replace(row, values=torch.full_like(row.values, torch.nan))
        return
    with torch.no_grad():
        for parameter in population.networks[index].host.parameters():
            parameter.fill_(torch.nan)


def grow_arguments(**options: Any) -> dict[str, Any]:
    """Arguments of `grow` or `attach`; settings and fields of `Slots` may be given by name."""
    known = {each.name for each in fields(GrowthSettings)} - {"steps", "budget", "start"}
    own = {name: options.pop(name) for name in list(options) if name in known}
    if own:
        options["settings"] = replace(options.get("settings") or GrowthSettings(), **own)
    about = {name: options.pop(name) for name in SLOT_FIELDS if name in options}
    if about:
        options["slots"] = esper.Slots(options["slots"], **about)
    if "scheduler" in options:
        options["optimizer"] = (options.get("optimizer"), options.pop("scheduler"))
    return options


SLOT_FIELDS = ("layout", "causal", "forward", "blueprints")
