"""Let all growth events of a network come and go before anything is trained."""

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from esper.growth.devices import devices_of, keyed
from esper.growth.hooks import without_graphs
from esper.growth.outputs import compare_tensors, locate_in_output, tensors_in
from esper.growth.sites import call_model, evaluating
from esper.leyline import ConfigError, SeedStage

if TYPE_CHECKING:
    from esper.growth.grown_module import GrownModule


def check_growth(network: "GrownModule", example: Any) -> None:
    """Let all blocks come and go again. Raises ConfigError if one is not called, or if the output
    changes, because then the others do not do what they did."""
    name = type(network.host).__name__
    cure = "call the blocks in a plain loop over the list, with what they need inside them"
    before = _outputs(network, example)
    for index, site in enumerate(network.sites):
        network.germinate(index, 0, 0, key=0)
        silent = site.blocks is not None and site.blocks.silent
        network.set_blend(index, SeedStage.BLENDING, 1.0 if silent else 0.0)
        seed, called = network.slot(index).seed, set[nn.Module]()
        assert seed is not None
        blocks = list(seed.children())
        handles = [b.register_forward_pre_hook(partial(_note, called)) for b in blocks]
        try:
            after = _outputs(network, example)
        finally:
            for handle in handles:
                handle.remove()
        if len(called) < len(blocks):
            raise ConfigError(
                f"{name} does not call all blocks of {site.module!r} when there are more of them; "
                f"{cure}"
            )
        if not compare_tensors(before, after)[1]:
            raise ConfigError(
                f"{name} does something else with the blocks of {site.module!r} when others come "
                f"between them, perhaps by their number; {cure}"
            )
    for index, _ in network.each_slot():
        network.remove(index)


def _note(called: set[nn.Module], module: nn.Module, args: Any) -> None:
    called.add(module)


def _outputs(network: "GrownModule", example: Any) -> list[Tensor]:
    """The main output; others may be one for each block."""
    with evaluating(network.host), without_graphs(), keyed(0, devices_of(network.host)):
        output = call_model(network.host, example)
    main = locate_in_output(output)
    found = tensors_in(output) if main is None else [main.get(output)]
    return [tensor.cpu().double() for tensor in found if tensor.numel()]
