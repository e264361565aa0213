"""Scale a network's output by a factor that is folded into its last layers."""

from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.devices import input_device, keyed, on_device
from esper.growth.grown_module import GrownModule
from esper.growth.hooks import without_graphs
from esper.growth.outputs import locate_in_output
from esper.growth.seed_slot import SeedSlot
from esper.growth.sites import call_model, evaluating

# Layers whose output is linear in weight and bias.
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
TOLERANCE = 1e-5


def scale_output(network: GrownModule, example: Any, factor: float) -> str | None:
    """Multiply the network's output by `factor`, in the parameters of the host's last layer and of
    the seeds that add to the output.

    The result is checked on the example. If it is wrong, all parameters are restored and the reason
    is returned.
    """
    example = on_device(example, input_device(network.host))
    with evaluating(network):
        before, last = _run(network, example)
        if before is None:
            return "its output holds no tensor that is clearly the one to scale"
        adding = _adding(network, last[0])
        layers = [(f"the host's last layer {last[0]}", last[1]), *_seed_layers(adding)]
        for name, layer in layers:
            if layer is None or not isinstance(layer._parameters.get("weight"), nn.Parameter):
                return f"{name} is no linear layer or convolution with a weight of its own"
        old = _seed_outputs(network, adding)
        held = [p for _, layer in layers if layer for p in layer._parameters.values()]
        params = {id(param): param for param in held if param is not None}
        saved = [(param, param.clone()) for param in params.values()]
        for param in params.values():
            param.mul_(factor)
        after, _ = _run(network, example)
        expected = [factor * each for each in (before, *old)]
        found = [after, *_seed_outputs(network, adding)]
        if all(_close(*pair) for pair in zip(found, expected, strict=True)):
            return None
        for param, values in saved:
            param.copy_(values)
    return (
        f"its output does not scale with {layers[0][0]}: weights are tied, or an operation follows"
    )


def _run(network: GrownModule, example: Any) -> tuple[Tensor | None, tuple[str, nn.Module | None]]:
    """The main tensor of the output, and the name and module of the host's last layer."""
    seen: list[tuple[str, nn.Module | None]] = [("", None)]
    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: seen.append((name, m)))
        for name, module in network.host.named_modules()
        if isinstance(module, LAYERS)
    ]
    try:
        with without_graphs():
            output = call_model(network, example)
    finally:
        for handle in handles:
            handle.remove()
    location = locate_in_output(output)
    return None if location is None else location.get(output).clone(), seen[-1]


def _adding(network: GrownModule, last: str) -> list[SeedSlot]:
    """Slots whose seeds add to the network's output: branches, and bypasses to the last layer."""
    found = []
    for _, slot in network.each_slot():
        widened = slot.site.widening if slot.kind == "bypass" else None
        if slot.kind == "branch" or (widened is not None and widened.second.module == last):
            found.append(slot)
    return found


def _seed_layers(adding: list[SeedSlot]) -> list[tuple[str, nn.Module | None]]:
    found: list[tuple[str, nn.Module | None]] = []
    for slot in adding:
        assert slot.seed is not None
        layers = [module for module in slot.seed.modules() if isinstance(module, LAYERS)]
        last = layers[-1] if layers else None
        found.append((f"the end of the seed in {slot.site.module}", last))
    return found


def _seed_outputs(network: GrownModule, adding: list[SeedSlot]) -> list[Tensor]:
    """The seeds' outputs for fixed random features, whether they act yet or not."""
    found = []
    for slot in adding:
        assert slot.seed is not None
        like = next(slot.seed.parameters())
        shape = network.catalogue[slot.blueprint].reads(slot.site, 2)
        with keyed(0):
            features = torch.randn(shape).to(like.device, like.dtype)
        found.append(slot.seed(features).clone())
    return found


def _close(found: Tensor | None, expected: Tensor) -> bool:
    """Equal up to rounding, relative to the largest value; False if anything is not finite."""
    if found is None:
        return False
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())
