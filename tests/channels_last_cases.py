"""Every blueprint, slot, stage and blend on channels-last hosts: gradients as on contiguous ones,
and those of an export as those of the live network.

A script of its own, because what it guards against kills the process. It prints each case before
it is run, and `done` at the end.
"""

from itertools import product

import torch
from torch import Tensor

from esper.growth.export import export
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.hosts import CNNHost
from esper.leyline import BLEND_NAMES, SeedStage
from helpers import BLENDED, fitting, grads, loss_of, plant

STAGES = {SeedStage.GERMINATED: 0.0, SeedStage.TRAINING: 0.0, **BLENDED}
BLENDS = [BLEND_NAMES.index(name) for name in ("linear", "gated")]


def network_in(
    layout: torch.memory_format, width: int, *, frozen: bool
) -> tuple[GrownModule, Tensor]:
    with keyed(0):
        # Maps of 4x4, 2x2 and 1x1 pixels.
        host = CNNHost(base_channels=width, in_channels=2)
        x = torch.randn(3, 2, 8, 8)
    host.blocks.requires_grad_(not frozen)
    host.to(memory_format=layout)
    x = x.contiguous(memory_format=layout)
    return GrownModule.wrap(host, host.slot_modules, x), x


def gradients(network: GrownModule, x: Tensor) -> dict[str, Tensor]:
    network.zero_grad()
    loss_of(network(x)).backward()
    return grads(network)


def compare(width: int, *, frozen: bool) -> None:
    last, x_last = network_in(torch.channels_last, width, frozen=frozen)
    plain, x_plain = network_in(torch.contiguous_format, width, frozen=frozen)
    alone = gradients(last, x_last)
    for case in product(fitting("cnn"), range(3), STAGES, BLENDS):
        print(width, frozen, *case, flush=True)
        blueprint, slot, stage, blend = case
        for network in (last, plain):
            plant(network, slot, blueprint, stage, STAGES[stage], blend, shake=0.3)
        found, expected = gradients(last, x_last), gradients(plain, x_plain)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)
        if stage == SeedStage.TRAINING:
            assert all(torch.equal(found[name], gradient) for name, gradient in alone.items())
        for network in (last, plain):
            network.remove(slot)


def train_exports(width: int) -> None:
    for blueprint in fitting("cnn"):
        for slot in range(3):
            print("export", width, blueprint, slot, flush=True)
            network, x = network_in(torch.channels_last, width, frozen=True)
            plant(network, slot, blueprint, SeedStage.HOLDING, 1.0, shake=0.3)
            plain = export(network, x).train()
            loss_of(plain(x)).backward()
            trained = {n: g for n, g in grads(plain).items() if "seed" in n}
            loss_of(network(x)).backward()
            live = grads(network.slot(slot))
            assert len(trained) == len(live)
            for found, expected in zip(trained.values(), live.values(), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    compare(4, frozen=False)
    compare(1, frozen=True)
    train_exports(4)
    print("done")
