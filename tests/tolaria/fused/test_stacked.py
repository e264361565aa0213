"""Stacked forms against the modules themselves, one row at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from esper.growth.blueprints.bypass import Mean
from esper.growth.grown_module import keyed
from esper.growth.hosts import CNNHost
from esper.tolaria.fused.rows import Kind, stack
from esper.tolaria.fused.stacked import (
    _pool,
    cnn_block,
    conv,
    in_windows,
    per_pixel,
    run,
)

MODULES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv": (nn.Conv2d(3, 4, 3, padding=1, bias=False), (3, 4, 6)),
    "strided": (nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (3, 7, 5)),
    "grouped": (nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 4, 4)),
    "depthwise": (nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), (4, 4, 4)),
    "one pixel": (nn.Conv2d(4, 2, 3, padding=1), (4, 1, 1)),
    "many pixels": (nn.Conv2d(2, 2, 3, padding=1), (2, 9, 9)),
    "per pixel": (nn.Conv2d(3, 2, 1), (3, 9, 10)),
    "reflected": (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (2, 4, 4)),
    "same": (nn.Conv2d(2, 2, 3, padding="same"), (2, 4, 4)),
    "group norm": (nn.GroupNorm(2, 4), (4, 3, 3)),
    "plain group norm": (nn.GroupNorm(2, 4, affine=False), (4, 3, 3)),
    "layer norm": (nn.LayerNorm(5), (5,)),
    "wide layer norm": (nn.LayerNorm((4, 3)), (2, 4, 3)),
    "layer norm without bias": (nn.LayerNorm(5, bias=False), (5,)),
    "linear": (nn.Linear(5, 3), (5,)),
    "linear of positions": (nn.Linear(5, 3, bias=False), (2, 5)),
    "pool up": (nn.AdaptiveAvgPool2d(2), (3, 1, 1)),
    "pool": (nn.AdaptiveAvgPool2d((2, 3)), (3, 5, 4)),
    "pool one side": (nn.AdaptiveAvgPool2d((None, 2)), (3, 5, 4)),
    "max pool": (nn.MaxPool2d(2), (3, 4, 6)),
    "mean": (Mean((2, 3)), (3, 4, 6)),
    "flatten": (nn.Flatten(), (3, 2, 2)),
    "flatten a part": (nn.Flatten(2), (3, 2, 2)),
    "unknown": (nn.PReLU(3), (3, 2)),
}


def rows_of(module: nn.Module, n: int) -> tuple[Kind, dict[Tensor, Tensor]]:
    kind = Kind(module)
    params = {
        param: (param.detach() + torch.randn(n, *param.shape)).requires_grad_()
        for param in kind.params
    }
    return kind, params


def by_rows(kind: Kind, params: dict[Tensor, Tensor], x: Tensor) -> Tensor:
    names = [name for name, _ in kind.module.named_parameters()]
    named = dict(zip(names, params.values(), strict=True))
    return torch.stack(
        [
            functional_call(kind.module, {name: p[i] for name, p in named.items()}, (x[i],))
            for i in range(len(x))
        ]
    )


def assert_same(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    slope = torch.randn_like(theirs)
    grads = [torch.autograd.grad((y * slope).sum(), leaves) for y in (ours, theirs)]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODULES)
def test_every_row_has_its_own_parameters(name: str) -> None:
    module, shape = MODULES[name]
    with keyed(1):
        kind, params = rows_of(module, 3)
        x = torch.randn(3, 5, *shape, requires_grad=True)
        assert_same(run(module, params, x), by_rows(kind, params, x), [x, *params.values()])


@pytest.mark.parametrize(
    ("index", "kernel", "side"), [(0, 3, 4), (2, 3, 4), (0, 1, 16), (2, 1, 16)]
)
def test_a_block_pools_as_the_host_does_also_between_equals(
    index: int, kernel: int, side: int
) -> None:
    """Whole numbers as inputs and taps give many equal pixels."""
    with keyed(2):
        host = CNNHost(10, 3, 2, pool_layers=1, kernel_size=kernel, in_channels=1)
        block = host.blocks[index]
        kind, params = rows_of(block, 3)
        channels = kind.params[0].shape[1]
        taps = torch.randint(-1, 2, (3, *kind.params[0].shape)).float().requires_grad_()
        params[kind.params[0]] = taps
        x = torch.randint(0, 2, (3, 5, channels, side, 6)).float().requires_grad_()
        ours, theirs = cnn_block(block, params, x), by_rows(kind, params, x)
        assert_same(ours, theirs, [x, *params.values()])


def test_a_convolution_of_one_channel_has_the_same_gradient_alone_and_among_others() -> None:
    """Bit for bit: a newcomer of a narrow layer may be one channel that reads one."""
    module = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    torch.manual_seed(0)
    for _ in range(20):
        weights, x = torch.randn(3, *module.weight.shape), torch.randn(3, 16, 1, 8, 8)

        def gradient(
            rows: slice, weights: torch.Tensor = weights, x: torch.Tensor = x
        ) -> torch.Tensor:
            own = weights[rows].clone().requires_grad_()
            conv(module, {module.weight: own}, x[rows]).square().sum().backward()
            assert own.grad is not None
            return own.grad

        together = gradient(slice(None))
        for i in range(3):
            assert torch.equal(gradient(slice(i, i + 1))[0], together[i])


@pytest.mark.parametrize("windows", [True, False])
def test_a_pool_is_that_of_torch_ties_included(windows: bool) -> None:
    # Few different values: most windows have several that are largest.
    x = torch.randint(0, 3, (2, 3, 2, 6, 4), generator=torch.Generator().manual_seed(0)).float()
    x.requires_grad_()
    weights = torch.randn(2, 3, 2, 3, 2, generator=torch.Generator().manual_seed(1))
    ours = _pool(in_windows(x) if windows else x, x.shape[-2:], windows=windows)
    theirs = F.max_pool2d(x.flatten(0, 1), 2).view(ours.shape)
    assert torch.equal(ours, theirs)
    gradients = [torch.autograd.grad((out * weights).sum(), x)[0] for out in (ours, theirs)]
    assert torch.equal(*gradients)


def test_a_convolution_of_single_pixels_is_the_same_for_examples_that_all_rows_share() -> None:
    module = nn.Conv2d(3, 2, 1)
    kind = Kind(module)
    params = stack([kind.new_row(nn.Conv2d(3, 2, 1)) for _ in range(4)])
    x = torch.randn(5, 3, 6, 6)
    shared = per_pixel(module, params, x.expand(4, *x.shape))
    apart = per_pixel(module, params, x.repeat(4, 1, 1, 1, 1))
    torch.testing.assert_close(shared, apart)
    torch.testing.assert_close(shared[2], F.conv2d(x, *(values[2] for values in params.values())))
