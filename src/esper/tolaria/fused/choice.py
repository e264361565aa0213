"""Which population trains the hosts of a run: the user's choice, or a rule.

Fused hosts agree with looped ones to rounding, not bit for bit. So the choice is made once, before
the run, and stored with its settings.
"""

import logging
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Literal

import torch
from torch import nn
from torch.optim import AdamW

from esper.growth.blueprints.catalogue import BlueprintSpec, OutputSpec, count_params
from esper.growth.devices import keyed
from esper.growth.grown_module import GrownModule
from esper.growth.hosts import CNNHost, MLPHost
from esper.leyline import ConfigError, InjectionSpec
from esper.tolaria.engine.batches import TensorSource
from esper.tolaria.engine.recipe import HostRecipe, new_network
from esper.tolaria.fused.rows import Kind, stack
from esper.tolaria.fused.stacked import MAX_PIXELS, is_per_pixel, objectives, run

log = logging.getLogger("esper")

PopulationKind = Literal["looped", "fused"]

# Where the fused population is faster, by `python benchmarks/population.py table`.
FEWEST_FUSED_HOSTS = 4
MOST_FUSED_PARAMS = 30_000
MOST_FUSED_MACS = 200_000


def choose_population(
    recipe: HostRecipe, n_envs: int, choice: str = "auto", device: str | torch.device = "cpu"
) -> PopulationKind:
    """The population for `n_envs` hosts. `auto` decides by their shape and number alone, so that
    the same command gives the same results on every machine. The reason is logged.

    Raises ConfigError if `choice` is 'fused' and the hosts cannot be fused.
    """
    if choice == "looped":
        return "looped"
    if choice != "fused" and n_envs < FEWEST_FUSED_HOSTS:
        return _chosen("looped", f"{n_envs} are fewer than {FEWEST_FUSED_HOSTS}")
    template = new_network(recipe, 0, torch.device(device))
    if choice == "fused":
        refuse_unless_fusable(recipe, template)
        return "fused"
    reason = why_not_fused(recipe, template)
    if reason is not None:
        return _chosen("looped", reason)
    params, macs = count_params(template.host), template.host_macs
    small = params <= MOST_FUSED_PARAMS and macs <= MOST_FUSED_MACS
    size = f"{n_envs} hosts of {params:,} parameters and {macs:,} multiply-adds"
    return _chosen("fused" if small else "looped", size)


def _chosen(kind: PopulationKind, reason: str) -> PopulationKind:
    log.info("hosts are %s: %s", kind, reason)
    return kind


def refuse_unless_fusable(recipe: HostRecipe, template: GrownModule) -> None:
    """Raises ConfigError, with the reason, if these hosts cannot be fused."""
    reason = why_not_fused(recipe, template)
    if reason is not None:
        raise ConfigError(f"these hosts cannot be fused: {reason}; use population looped or auto")


def why_not_fused(recipe: HostRecipe, template: GrownModule) -> str | None:
    """None if `FusedPopulation` can train these hosts, else the reason in a few words.

    `template` is one of the hosts, without seeds.
    """
    return next(_reasons(recipe, template), None)


def _reasons(recipe: HostRecipe, template: GrownModule) -> Iterator[str]:
    """Only the first one is meaningful: each check relies on those before it."""
    data, host = recipe.data, template.host
    if recipe.precision != "fp32":
        yield f"precision {recipe.precision}"
    if not isinstance(data, TensorSource):
        yield f"data from {type(data).__name__}, not from tensors in memory"
        return
    if data.augment is not None:
        yield "augmented data"
    if data.train[0].dtype != torch.float32:
        yield f"inputs of {data.train[0].dtype}"
    if type(host) not in (CNNHost, MLPHost):
        yield f"no fused form of {type(host).__name__}"
    yield from (f"the host has {reason}" for reason in _module_reasons(host))
    blocks = [f"blocks.{i}" for i in range(len(host.get_submodule("blocks")._modules))]
    yield from (f"slot {s.module} inside a block" for s in template.sites if s.module not in blocks)
    if isinstance(host, CNNHost):
        yield from _image_reasons(host, data)
    yield from _optimizer_reasons(recipe, template)
    yield from _objective_reasons(recipe, data, host)
    for spec, site in product(template.catalogue.specs, template.sites):
        reason = _blueprint_reason(spec, site, template.output)
        if reason is not None:
            yield f"blueprint {spec.name!r} has {reason}"


def _image_reasons(host: CNNHost, data: TensorSource) -> Iterator[str]:
    height, width = data.example().shape[-2:]
    for block in host.blocks.children():
        convolution, *_ = layers = list(block.children())
        assert isinstance(convolution, nn.Conv2d)
        if height * width > MAX_PIXELS and not is_per_pixel(convolution):
            yield f"images of {height}x{width} pixels, more than {MAX_PIXELS}"
        if convolution.kernel_size[0] % 2 == 0:
            yield "a kernel of even size"
        if any(isinstance(layer, nn.MaxPool2d) for layer in layers):
            if height % 2 or width % 2:
                yield f"pooling of {height}x{width} pixels"
            height, width = height // 2, width // 2


def _module_reasons(module: nn.Module) -> Iterator[str]:
    # Dropout and RReLU draw random numbers, norms of batches have running statistics.
    unfit = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.modules.batchnorm._NormBase)
    yield from (type(each).__name__ for each in module.modules() if isinstance(each, unfit))
    if any(not param.requires_grad for param in module.parameters()):
        yield "frozen parameters"
    if any(param.dtype != torch.float32 for param in module.parameters()):
        yield "parameters that are not float32"
    if any(True for _ in module.buffers()):
        yield "buffers"


def _optimizer_reasons(recipe: HostRecipe, template: GrownModule) -> Iterator[str]:
    params = template.host_parameters()
    optimizer = recipe.optimizer(params)
    if type(optimizer) is not AdamW:
        yield f"optimizer {type(optimizer).__name__}, not AdamW"
    group, *others = optimizer.param_groups
    if others or len(group["params"]) != len(params):
        yield "several groups of parameters"
    if group["amsgrad"] or group["maximize"] or isinstance(group["lr"], torch.Tensor):
        yield "AdamW with amsgrad, maximize or a tensor as learning rate"


def _objective_reasons(recipe: HostRecipe, data: TensorSource, host: nn.Module) -> Iterator[str]:
    device = next(host.parameters()).device
    inputs, targets = (values[:2].to(device) for values in data.val)
    with torch.no_grad():
        output = host(inputs).expand(2, -1, -1)
    for objective in (recipe.loss, recipe.score):
        try:
            shape = objectives(objective)(output, targets.expand(2, *targets.shape)).shape
        except (RuntimeError, ValueError) as error:
            yield f"an objective that vmap cannot run ({_first_line(error)})"
        else:
            if shape != (2,):
                yield "an objective that is not one number"


# Training makes new populations of the same hosts in every round; without a cache, this would take
# a tenth of the time of a small one.
@lru_cache(maxsize=1024)
def _blueprint_reason(
    spec: BlueprintSpec, site: InjectionSpec, output: OutputSpec | None
) -> str | None:
    try:
        with keyed(0):
            seed = spec.build(site, output)
    except ConfigError:
        return None
    kind = Kind(seed)
    reason = next(_module_reasons(seed), None if kind.params else "no parameters")
    if reason is not None:
        return reason
    try:
        with torch.no_grad():
            run(seed, stack([kind.new_row(seed)] * 2), torch.zeros(2, *spec.reads(site, 2)))
    except (RuntimeError, TypeError, ValueError) as error:
        return f"a form that vmap cannot run ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:120]
