"""Which recipes can be fused, and why others cannot."""

from functools import lru_cache

import torch
from torch import nn
from torch.optim import AdamW

from esper.growth.blueprints.catalogue import BlueprintSpec, OutputSpec
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.hosts.cnn import CNNHost
from esper.growth.hosts.mlp import MLPHost
from esper.leyline import ConfigError, InjectionSpec
from esper.tolaria.engine.batches import TensorSource
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.fused.rows import Kind
from esper.tolaria.fused.stacked import MAX_PIXELS, is_per_pixel, objectives, run

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)
_STATEFUL = (nn.modules.batchnorm._NormBase,)


def why_not_fused(recipe: HostRecipe, template: GrownModule) -> str | None:
    """None if `FusedPopulation` can train these hosts, else the reason in a few words.

    `template` is one of the hosts, with nothing planted in it.
    """
    return (
        _data(recipe)
        or _host(template.host, template.sites, recipe)
        or _optimizer(recipe, template)
        or _objectives(recipe, template)
        or _blueprints(template)
    )


def refuse_unless_fusable(recipe: HostRecipe, template: GrownModule) -> None:
    """Raises ConfigError, with the reason, if these hosts cannot be fused."""
    reason = why_not_fused(recipe, template)
    if reason is not None:
        raise ConfigError(f"these hosts cannot be fused: {reason}; use population looped or auto")


def _data(recipe: HostRecipe) -> str | None:
    data = recipe.data
    if recipe.precision != "fp32":
        return f"precision {recipe.precision}"
    if not isinstance(data, TensorSource):
        return f"data from {type(data).__name__}, not from tensors in memory"
    if data.augment is not None:
        return "augmented data"
    if data.train[0].dtype != torch.float32:
        return f"inputs of {data.train[0].dtype}"
    return None


def _host(host: nn.Module, sites: list[InjectionSpec], recipe: HostRecipe) -> str | None:
    if type(host) not in (CNNHost, MLPHost):
        return f"no fused form of {type(host).__name__}"
    reason = _modules(host)
    if reason is not None:
        return f"the host has {reason}"
    blocks = [f"blocks.{i}" for i in range(len(host.get_submodule("blocks")._modules))]
    other = [site.module for site in sites if site.module not in blocks]
    if other:
        return f"slot {other[0]} inside a block"
    return _images(host, recipe) if isinstance(host, CNNHost) else None


def _images(host: CNNHost, recipe: HostRecipe) -> str | None:
    height, width = recipe.data.example().shape[-2:]
    for block in host.blocks.children():
        convolution, *_ = layers = list(block.children())
        assert isinstance(convolution, nn.Conv2d)
        if height * width > MAX_PIXELS and not is_per_pixel(convolution):
            return f"images of {height}x{width} pixels, more than {MAX_PIXELS}"
        if convolution.kernel_size[0] % 2 == 0:
            return "a kernel of even size"
        if any(isinstance(layer, nn.MaxPool2d) for layer in layers):
            if height % 2 or width % 2:
                return f"pooling of {height}x{width} pixels"
            height, width = height // 2, width // 2
    return None


def _modules(module: nn.Module) -> str | None:
    for part in module.modules():
        if isinstance(part, (*_RANDOM, *_STATEFUL)):
            return type(part).__name__
    if any(not param.requires_grad for param in module.parameters()):
        return "frozen parameters"
    if any(param.dtype != torch.float32 for param in module.parameters()):
        return "parameters that are not float32"
    return "buffers" if any(True for _ in module.buffers()) else None


def _optimizer(recipe: HostRecipe, template: GrownModule) -> str | None:
    params = template.host_parameters()
    optimizer = recipe.optimizer(params)
    if type(optimizer) is not AdamW:
        return f"optimiser {type(optimizer).__name__}, not AdamW"
    group, *others = optimizer.param_groups
    if others or len(group["params"]) != len(params):
        return "several groups of parameters"
    if group["amsgrad"] or group["maximize"] or isinstance(group["lr"], torch.Tensor):
        return "AdamW with amsgrad, maximize or a tensor as learning rate"
    return None


def _objectives(recipe: HostRecipe, template: GrownModule) -> str | None:
    assert isinstance(recipe.data, TensorSource)
    inputs, targets = (part[:2] for part in recipe.data.val)
    device = next(template.host.parameters()).device
    with torch.no_grad():
        output = template.host(inputs.to(device)).expand(2, -1, -1)
    for objective in (recipe.loss, recipe.score):
        try:
            shape = objectives(objective)(
                output, targets.to(device).expand(2, *targets.shape)
            ).shape
        except (RuntimeError, ValueError) as error:
            return f"an objective that vmap cannot run ({_first_line(error)})"
        if shape != (2,):
            return "an objective that is not one number"
    return None


def _blueprints(template: GrownModule) -> str | None:
    reasons = (
        _blueprint(spec, site, template.output)
        for spec in template.catalogue.specs
        for site in template.sites
    )
    return next((reason for reason in reasons if reason is not None), None)


# A training makes populations of the same hosts in every round; this is a tenth of a small one's.
@lru_cache(maxsize=1024)
def _blueprint(spec: BlueprintSpec, site: InjectionSpec, output: OutputSpec | None) -> str | None:
    try:
        with keyed(0):
            seed = spec.build(site, output)
    except ConfigError:
        return None
    reason = _modules(seed) or _cannot_run(seed, spec.reads(site, 2))
    return None if reason is None else f"blueprint {spec.name!r} has {reason}"


def _cannot_run(seed: nn.Module, reads: tuple[int, ...]) -> str | None:
    kind = Kind(seed)
    if not kind.params:
        return "no parameters"
    params = kind.stack([kind.newborn(seed)] * 2)
    try:
        with torch.no_grad():
            run(seed, params, torch.zeros(2, *reads))
    except (RuntimeError, TypeError, ValueError) as error:
        return f"a form that vmap cannot run ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:120]
