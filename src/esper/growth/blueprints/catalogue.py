"""The catalogue of blueprints, from which the action space is derived, and what seeds cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from esper.growth.blueprints import bypass, modules
from esper.leyline import SEED_LAYOUTS, ConfigError, EsperError, InjectionSpec

ENTRY_POINT_GROUP = "esper.blueprints"

BlueprintKind = Literal["residual", "branch", "bypass", "block"]
Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class OutputSpec:
    """The host's output as a branch sees it; `per_position` for (B, T, outputs).

    `positions` is T on the example; the slot of a branch must have as many.
    """

    outputs: int
    per_position: bool
    positions: int | None = None


@dataclass(frozen=True, eq=False)
class BlueprintSpec:
    """How to make one kind of seed.

    factories  for each supported topology a function that makes the module:
               `f(channels)` for a residual seed, which returns the change to its input;
               `f(channels, outputs, per_position=bool)` for a branch, which returns the change to
               the network's output; `f(widening)` for a bypass, which reads the input of the
               widening's first layer and returns the change to the output of its second; none for
               blocks, which the model itself provides
    mixes_positions  the factory for sequences also takes `causal=bool`
    """

    name: str
    kind: BlueprintKind
    factories: Mapping[str, Factory]
    description: str
    mixes_positions: bool = False

    def build(self, site: InjectionSpec, output: OutputSpec | None) -> nn.Module:
        """A new seed for a slot; raises ConfigError if the blueprint does not fit there."""
        if site.topology not in self.factories:
            raise ConfigError(
                f"blueprint {self.name!r} does not fit slot {site.slot_id}: it serves "
                f"{', '.join(self.factories) or 'no slot'}, the slot is {site.topology}"
            )
        if self.kind == "bypass":
            if site.widening is None:
                raise ConfigError(
                    f"blueprint {self.name!r} does not fit slot {site.slot_id}: no layer in "
                    f"{site.module!r} is used once in a pass and read by one other layer only"
                )
            return self._make(site, site.widening)
        arguments: dict[str, Any] = {}
        if self.kind == "branch":
            arguments = self._branch_arguments(site, output)
        if self.mixes_positions and site.topology == "transformer":
            arguments["causal"] = site.causal
        return self._make(site, site.channels, **arguments)

    def _make(self, site: InjectionSpec, *given: Any, **arguments: Any) -> nn.Module:
        """Raises EsperError for a factory that fails; a ConfigError says that it does not fit."""
        try:
            seed = self.factories[site.topology](*given, **arguments)
        except EsperError:
            raise
        except Exception as error:  # whatever a user's factory raises
            raise EsperError(
                f"the factory of blueprint {self.name!r} fails in slot {site.slot_id}: {error}"
            ) from error
        if not isinstance(seed, nn.Module):
            raise EsperError(
                f"the factory of blueprint {self.name!r} must return a torch.nn.Module, and "
                f"returned {type(seed).__name__}"
            )
        return seed

    def reads(self, site: InjectionSpec, batch: int) -> tuple[int, ...]:
        """The shape that a seed reads at a slot for `batch` examples; for a bypass the batch is
        that of the example the slot was found with."""
        if self.kind == "bypass" and site.widening is not None:
            return site.widening.reads
        return (batch, *site.shape)

    def _branch_arguments(self, site: InjectionSpec, output: OutputSpec | None) -> dict[str, Any]:
        if output is None:
            raise ConfigError(
                f"blueprint {self.name!r} needs a host whose output is one tensor of shape "
                "(batch, outputs) or (batch, positions, outputs), or holds one such tensor or one "
                "called logits"
            )
        if output.per_position:
            if site.topology != "transformer":
                raise ConfigError(
                    f"blueprint {self.name!r} does not fit slot {site.slot_id}: the host's "
                    "output has positions and the slot has none"
                )
            if output.positions not in (None, site.shape[0]):
                raise ConfigError(
                    f"blueprint {self.name!r} does not fit slot {site.slot_id}: it has "
                    f"{site.shape[0]} positions and the host's output has {output.positions}"
                )
        return {"outputs": output.outputs, "per_position": output.per_position}


@dataclass(frozen=True)
class BlueprintCatalogue:
    """Blueprints in the order of their indices in the action space."""

    specs: tuple[BlueprintSpec, ...]

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.specs):
            raise ConfigError(f"blueprint names must be distinct, got {list(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __getitem__(self, index: int) -> BlueprintSpec:
        return self.specs[index]

    def index(self, name: str) -> int:
        """Raises ConfigError, listing the names, if there is no such blueprint."""
        if name not in self.names:
            raise ConfigError(f"no blueprint {name!r}; there are {', '.join(self.names)}")
        return self.names.index(name)

    def with_blueprint(self, spec: BlueprintSpec) -> "BlueprintCatalogue":
        return BlueprintCatalogue((*self.specs, spec))


NOOP = "noop"


def _spec(
    name: str,
    description: str,
    kind: BlueprintKind = "residual",
    *,
    maps: Factory | None = None,
    sequences: Factory | None = None,
    vectors: Factory | None = None,
    mixes_positions: bool = False,
) -> BlueprintSpec:
    """`maps` takes the number of `dims` of a feature map."""
    factories: dict[str, Factory | None] = {"transformer": sequences, "mlp": vectors}
    if maps is not None:
        dims = {"cnn1d": partial(maps, dims=1), "cnn3d": partial(maps, dims=3)}
        factories = {"cnn": maps, **dims, **factories}
    given = {topology: factory for topology, factory in factories.items() if factory is not None}
    return BlueprintSpec(name, kind, given, description, mixes_positions)


def _channels_last(name: str, description: str, factory: Factory) -> BlueprintSpec:
    return _spec(name, description, sequences=factory, vectors=factory)


def _widening(name: str, description: str, share: float) -> BlueprintSpec:
    factories = dict.fromkeys(SEED_LAYOUTS, partial(bypass.widen, share=share))
    return BlueprintSpec(name, "bypass", factories, description)


BUILT_IN = BlueprintCatalogue(
    (
        _spec(NOOP, "nothing; keeps index 0 free"),
        _spec("conv_light", "convolution of width 3", maps=partial(modules.convolution, kernel=3)),
        _spec(
            "attention",
            "re-weights channels (maps) or attends to other positions (transformer)",
            maps=modules.ChannelAttention,
            sequences=modules.SequenceAttention,
            mixes_positions=True,
        ),
        _spec(
            "norm",
            "moves features towards their normalised form",
            maps=modules.cnn_norm,
            sequences=modules.sequence_norm,
            vectors=modules.sequence_norm,
        ),
        _spec("depthwise", "depthwise of width 3, then width 1", maps=modules.depthwise),
        _spec("bottleneck", "width 1, 3, 1, narrow", maps=modules.bottleneck),
        _spec("conv_small", "convolution of width 1", maps=partial(modules.convolution, kernel=1)),
        _spec("conv_heavy", "two convolutions of width 3", maps=modules.two_convolutions),
        _channels_last("lora", "linear map of rank 8", partial(modules.low_rank, rank=8)),
        _channels_last("lora_large", "linear map of rank 32", partial(modules.low_rank, rank=32)),
        _channels_last(
            "mlp_small",
            "two-layer perceptron, twice as wide inside",
            partial(modules.feed_forward, expansion=2),
        ),
        _channels_last(
            "mlp",
            "two-layer perceptron, four times as wide inside",
            partial(modules.feed_forward, expansion=4),
        ),
        _spec(
            "flex_attention",
            "attends to other positions, near ones more",
            sequences=partial(modules.SequenceAttention, distance_bias=True),
            mixes_positions=True,
        ),
        _spec(
            "branch",
            "a path around the trunk, from the slot straight to the output",
            "branch",
            maps=modules.cnn_branch,
            sequences=modules.sequence_branch,
            vectors=modules.mlp_branch,
        ),
        _spec(
            "transformer_block",
            "one more layer: attention and perceptron, both pre-norm",
            sequences=partial(modules.Blocks, count=1),
            mixes_positions=True,
        ),
        _spec(
            "transformer_blocks",
            "three more layers in a row",
            sequences=partial(modules.Blocks, count=3),
            mixes_positions=True,
        ),
        _widening("widen_half", "half as many channels again in the slot's last hidden layer", 0.5),
        _widening("widen_double", "as many channels again in the slot's last hidden layer", 1.0),
    )
)


@cache
def default_catalogue() -> BlueprintCatalogue:
    """The built-in blueprints, then those of installed packages (entry points), by name."""
    found = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)
    return BlueprintCatalogue((*BUILT_IN.specs, *(point.load() for point in found)))


# --- costs -----------------------------------------------------------------------------------


def flop_counter() -> FlopCounterMode:
    """Counts what runs inside it: two for every multiply-add, the same on every device.

    Torch's counter does not know the attention kernel of the CPU and would not count it. As for
    the other kernels, masked positions are counted.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mapping = {
        kernel: lambda query, key, value, *args, **kwargs: sdpa_flop_count(query, key, value)
    }
    return FlopCounterMode(display=False, custom_mapping=mapping)


def count_params(module: nn.Module) -> int:
    """Trainable parameters, shared ones once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


class SeedTraits(NamedTuple):
    """Properties of an untrained seed; multiply-adds are per example.

    `layers` counts its weight matrices and kernels, `reach` is the widest of its kernels.
    """

    params: int
    macs: int
    layers: int
    reach: int


@dataclass(frozen=True)
class _Place:
    """A slot, equal to all others in which a seed is the same: its cost is counted once."""

    site: InjectionSpec = field(compare=False)
    like: tuple[Any, ...]

    @staticmethod
    def of(site: InjectionSpec, *, wide: bool = False) -> "_Place":
        """As a bypass sees it if `wide`, else as other seeds do."""
        like: tuple[Any, ...] = (site.topology, site.channels, site.shape, site.calls, site.causal)
        if wide and site.widening is not None:
            w = site.widening
            layers = [replace(layer, module="") for layer in (w.first, w.second)]
            like = (*like, *layers, w.steps, w.reads, w.adds, w.batch)
        return _Place(site, like)


@lru_cache(maxsize=32_768)
def _seed_traits(
    blueprint: BlueprintSpec, place: _Place, output: OutputSpec | None
) -> SeedTraits | None:
    site = place.site
    try:
        with torch.device("meta"):
            seed = blueprint.build(site, output)
            features = torch.zeros(blueprint.reads(site, 1))
    except ConfigError:
        return None
    with flop_counter() as counter, torch.no_grad():
        try:
            seed.eval()(features)
        except Exception as error:  # whatever a user's seed raises
            raise EsperError(
                f"a seed of blueprint {blueprint.name!r} fails on features of shape "
                f"{tuple(features.shape)} in slot {site.slot_id}: {error}"
            ) from error
    macs = counter.get_total_flops() // 2
    if blueprint.kind == "bypass" and site.widening is not None:
        macs //= site.widening.batch
    else:
        macs *= site.calls
    weights = [p.shape for p in seed.parameters() if p.dim() > 1]
    reach = max((extent for shape in weights for extent in shape[2:]), default=1)
    return SeedTraits(count_params(seed), macs, len(weights), reach)


def _block_traits(site: InjectionSpec) -> SeedTraits | None:
    blocks = site.blocks
    if blocks is None:
        return None
    count = sum(after - before for _, before, after in blocks.depths)
    return SeedTraits(blocks.params, blocks.macs, count, 1)


def seed_traits(
    catalogue: BlueprintCatalogue, sites: list[InjectionSpec], output: OutputSpec | None
) -> tuple[np.ndarray, np.ndarray]:
    """(fits, traits), bool [S, B] and int [S, B, 4]: SeedTraits are 0 where a blueprint does not
    fit."""
    shape = (len(sites), len(catalogue))
    fits, traits = np.zeros(shape, dtype=bool), np.zeros((*shape, 4), dtype=np.int64)
    for s, site in enumerate(sites):
        narrow, wide = _Place.of(site), _Place.of(site, wide=True)
        for b, blueprint in enumerate(catalogue.specs):
            if blueprint.kind == "block":
                found = _block_traits(site)
            else:
                place = wide if blueprint.kind == "bypass" else narrow
                found = _seed_traits(blueprint, place, output)
            if found is not None:
                fits[s, b], traits[s, b] = True, found
    return fits, traits


def seed_costs(
    catalogue: BlueprintCatalogue, sites: list[InjectionSpec], output: OutputSpec | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(fits, params, macs), each [S, B]; multiply-adds are per example; 0 where nothing fits."""
    fits, traits = seed_traits(catalogue, sites, output)
    return fits, traits[..., 0], traits[..., 1]
