"""Modules as functions of stacked parameters: `[n, B, ...]` in, `[n, B, ...]` out, row by row.

A module whose type is in FORMS runs in a few kernels for all rows; any other one goes through
`vmap(functional_call)`. Only pools have a backward pass of their own: for convolutions and norms
that was no faster.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from esper.growth.blueprints.bypass import Mean
from esper.growth.blueprints.modules import ChannelAttention, Renormalize
from esper.tolaria.engine.objectives import Objective, accuracy, cross_entropy
from esper.tolaria.fused.rows import Params

MAX_PIXELS = 64
ALIGNED_BATCH = 16
Form = Callable[[Any, Params, Tensor], Tensor]
# Adds something to the output of a layer; the second argument says whether that is in windows.
Add = Callable[[Tensor, bool], Tensor]


def aligned(size: int) -> Tensor:
    """Indices of a batch, repeated from 0 up to a multiple of ALIGNED_BATCH.

    The features of every host then begin at the same alignment, on which the rounding of a BLAS may
    depend: a host has the same bits alone and among others.
    """
    return torch.arange(-(-size // ALIGNED_BATCH) * ALIGNED_BATCH) % size


def run(module: nn.Module, params: Params, x: Tensor) -> Tensor:
    """`module` with the i-th stacked parameters on x[i], for every i."""
    return _form(module)(module, params, x)


def _form(module: nn.Module) -> Form:
    hooked = module._forward_pre_hooks or module._forward_hooks
    return _mapped if hooked else FORMS.get(type(module), _mapped)


def depends_on_mode(module: nn.Module) -> bool:
    """May it differ between training and evaluation? What is in FORMS does not."""
    return any(_form(part) is _mapped for part in module.modules())


def _mapped(module: nn.Module, params: Params, x: Tensor) -> Tensor:
    named = {name: params[param] for name, param in module.named_parameters()}
    return vmap(lambda values, inputs: functional_call(module, values, (inputs,)))(named, x)


# --- layers ----------------------------------------------------------------------------------


def _run_all(layers: Iterable[nn.Module], params: Params, x: Tensor) -> Tensor:
    for layer in layers:
        x = run(layer, params, x)
    return x


def _pointwise(module: nn.Module, params: Params, x: Tensor) -> Tensor:
    return module(x)


def _linear(module: nn.Linear, params: Params, x: Tensor) -> Tensor:
    weight = params[module.weight].transpose(1, 2)
    flat = x.reshape(len(x), -1, x.shape[-1])
    if module.bias is None:
        out = torch.bmm(flat, weight)
    else:
        out = torch.baddbmm(params[module.bias].unsqueeze(1), flat, weight)
    return out.view(*x.shape[:-1], -1)


def _affine(x: Tensor, weight: Tensor, bias: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.addcmul(bias.view(shape), x, weight.view(shape))


def _layer_norm(module: nn.LayerNorm, params: Params, x: Tensor) -> Tensor:
    out = F.layer_norm(x, module.normalized_shape, eps=module.eps)
    if not module.elementwise_affine:
        return out
    shape = (len(x), *[1] * (x.dim() - 1 - len(module.normalized_shape)), *module.normalized_shape)
    bias = torch.zeros_like(params[module.weight]) if module.bias is None else params[module.bias]
    return _affine(out, params[module.weight], bias, shape)


def group_norm(module: nn.GroupNorm, params: Params, x: Tensor) -> Tensor:
    """Channels are the third dimension; those behind it are pixels, in any order."""
    groups = x.reshape(len(x), x.shape[1], module.num_groups, -1)
    out = F.layer_norm(groups, groups.shape[-1:], eps=module.eps).view(x.shape)
    if not module.affine:
        return out
    shape = (len(x), 1, module.num_channels, *[1] * (x.dim() - 3))
    return _affine(out, params[module.weight], params[module.bias], shape)


@lru_cache(maxsize=256)
def _basis(
    numbers: tuple[int, ...], image: tuple[int, int], windows: bool, device: torch.device
) -> tuple[Tensor, tuple[int, int]]:
    """What each tap of a convolution does to an image: 0/1 [taps, pixels * pixels out], and the
    shape of the output image; with `windows` that is (4, windows of 2x2). `numbers` are kernel,
    stride, padding and dilation, two each."""
    kernel, stride, padding, dilation = (numbers[i : i + 2] for i in range(0, 8, 2))
    taps, pixels = kernel[0] * kernel[1], image[0] * image[1]
    out = F.conv2d(
        torch.eye(pixels).view(pixels, 1, *image),
        torch.eye(taps).view(taps, 1, *kernel),
        stride=stride,
        padding=padding,
        dilation=dilation,
    )
    height, width = shape = (out.shape[2], out.shape[3])
    if windows:
        out = out.view(pixels, taps, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
        shape = (4, height * width // 4)
    return out.reshape(pixels, taps, -1).transpose(0, 1).reshape(taps, -1).to(device), shape


def is_per_pixel(convolution: nn.Module) -> bool:
    """Is its kernel 1x1? Then its images may have any size."""
    assert isinstance(convolution, nn.Conv2d)
    numbers = (convolution.kernel_size, convolution.stride, convolution.padding)
    return numbers == ((1, 1), (1, 1), (0, 0)) and convolution.groups == 1


def in_windows(x: Tensor) -> Tensor:
    """[n, B, C, H, W] to [n, B, C, 4, windows]: pixels that a 2x2 pool compares."""
    *lead, height, width = x.shape
    x = x.reshape(*lead, height // 2, 2, width // 2, 2)
    return x.permute(0, 1, 2, 4, 6, 3, 5).reshape(*lead, 4, -1)


def per_pixel(module: nn.Conv2d, params: Params, x: Tensor) -> Tensor:
    """A 1x1 convolution as a product of matrices."""
    n, batch, channels, *shape = x.shape
    weight = params[module.weight].view(n, 1, module.out_channels, channels)
    if batch > 1 and x.stride(0) == 0:
        # All rows read the same examples: do not copy these for each.
        pixels = x[0].flatten(2).transpose(0, 1).reshape(1, channels, -1)
        y = torch.bmm(weight.squeeze(1), pixels.expand(n, -1, -1))
        y = y.view(n, -1, batch, *shape).transpose(1, 2)
    else:
        y = (weight @ x.reshape(n, batch, channels, -1)).view(n, batch, -1, *shape)
    return y if module.bias is None else y + params[module.bias].view(n, 1, -1, 1, 1)


def _grouped(module: nn.Conv2d, params: Params, x: Tensor) -> Tensor:
    """The rows as groups of one convolution: what `vmap` does, without its overhead."""
    n = len(x)
    y = F.conv2d(
        x.transpose(0, 1).flatten(1, 2),
        params[module.weight].flatten(0, 1),
        None if module.bias is None else params[module.bias].flatten(),
        module.stride,
        module.padding,
        module.dilation,
        groups=n * module.groups,
    )
    return y.unflatten(1, (n, -1)).transpose(0, 1)


def conv(module: nn.Conv2d, params: Params, x: Tensor, *, windows: bool = False) -> Tensor:
    """A convolution as a dense matrix. With `windows` the output is as `in_windows` makes it."""
    n, batch, channels, height, width = x.shape
    pixels = height * width
    if pixels > MAX_PIXELS and is_per_pixel(module):
        y = per_pixel(module, params, x)
        return in_windows(y) if windows else y
    if module.padding_mode != "zeros":
        return _mapped(module, params, x)
    if pixels > MAX_PIXELS or isinstance(module.padding, str):
        y = _grouped(module, params, x)
        return in_windows(y) if windows else y
    numbers = (*module.kernel_size, *module.stride, *module.padding, *module.dilation)
    basis, shape = _basis(numbers, (height, width), windows, x.device)
    out, pixels_out = module.out_channels, shape[0] * shape[1]
    taps = params[module.weight].reshape(n, -1, len(basis))
    # Host by host: the rounding of one large product depends on the number of its rows.
    matrix = torch.bmm(taps, basis.expand(n, -1, -1)).view(n, out, -1, pixels, pixels_out)
    if module.groups > 1:
        matrix = _ungroup(matrix, module.groups)
    matrix = matrix.permute(0, 2, 3, 1, 4).reshape(n, channels * pixels, out * pixels_out)
    y = torch.bmm(x.reshape(n, batch, -1), matrix).view(n, batch, out, *shape)
    return y if module.bias is None else y + params[module.bias].view(n, 1, out, 1, 1)


def _ungroup(matrix: Tensor, groups: int) -> Tensor:
    """[n, out, in / groups, ...] to [n, out, in, ...], zero between groups."""
    n, out, inside, *rest = matrix.shape
    same = torch.eye(groups, device=matrix.device).repeat_interleave(out // groups, dim=0)
    blocks = matrix.unsqueeze(2) * same.view(1, out, groups, 1, 1, 1)
    return blocks.reshape(n, out, groups * inside, *rest)


@lru_cache(maxsize=64)
def _pooling(size: object, image: tuple[int, int], device: torch.device) -> Tensor:
    pixels = image[0] * image[1]
    eye = torch.eye(pixels).view(pixels, 1, *image)
    return F.adaptive_avg_pool2d(eye, size).flatten(1).to(device)  # type: ignore[arg-type]


def _per_example(module: nn.Module, params: Params, x: Tensor) -> Tensor:
    """A module without parameters that treats examples separately."""
    return module(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def _adaptive_pool(module: nn.AdaptiveAvgPool2d, params: Params, x: Tensor) -> Tensor:
    size = module.output_size
    height, width = size if isinstance(size, tuple) else (size, size)
    if height is None or width is None:
        return _mapped(module, params, x)
    matrix = _pooling((height, width), (x.shape[-2], x.shape[-1]), x.device)
    return (x.flatten(3) @ matrix).view(*x.shape[:3], height, width)


# --- seeds and hosts -------------------------------------------------------------------------


def _renormalize(module: Renormalize, params: Params, x: Tensor) -> Tensor:
    strength = params[module.strength].tanh().view(-1, *[1] * (x.dim() - 1))
    return strength * (run(module.norm, params, x) - x)


def _channel_attention(module: ChannelAttention, params: Params, x: Tensor) -> Tensor:
    z = module.act(run(module.squeeze, params, x.flatten(3).mean(-1)))
    return x * torch.tanh(run(module.excite, params, z) / 2)[..., None, None]


class _MaxOfPairs(torch.autograd.Function):
    """The largest of x's 2x2 values along the dimensions `row` < `column`. Of equal ones the first,
    by row and then by column, gets the gradient, as in torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: int, column: int) -> Tensor:
        best = torch.maximum(*x.unbind(column))
        ctx.save_for_backward(x, best)
        ctx.dims = row, column
        return torch.maximum(*best.unbind(row))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x, best), (row, column) = ctx.saved_tensors, ctx.dims
        return _to_larger(_to_larger(grads[0], best, row), x, column), None, None


def _to_larger(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    """`grad` at the larger of the two values of x along `dim`, 0 at the other."""
    first, second = x.unbind(dim)
    found = torch.empty_like(x)
    # `grad` where the difference is above 0, in one pass.
    right = torch.ops.aten.threshold_backward(grad, second - first, 0)
    found.select(dim, 1).copy_(right)
    torch.sub(grad, right, out=found.select(dim, 0))
    return found


def _pool(x: Tensor, image: torch.Size, *, windows: bool) -> Tensor:
    """2x2 max pool of images of this size, [n, B, C, ...]; `windows` as `conv` gives them."""
    *lead, height, width = *x.shape[:3], image[0] // 2, image[1] // 2
    if windows:
        pairs, row, column = x.reshape(-1, 2, 2, height * width), 1, 2
    else:
        pairs, row, column = x.reshape(-1, height, 2, width, 2), 2, 4
    return _MaxOfPairs.apply(pairs, row, column).view(*lead, height, width)


def cnn_block(
    block: nn.Module, params: Params, x: Tensor, add: Add | None = None, *, large: bool = False
) -> Tensor:
    """A block of CNNHost; `add` changes the output of its convolution. In a host of `large` images
    a 1x1 convolution is never a matrix over all pixels, not even behind a pool."""
    layers: list[Any] = list(block.children())
    convolution, norm, *pool, relu = layers
    pixelwise = large and is_per_pixel(convolution)
    image, windows = x.shape[-2:], bool(pool) and not pixelwise
    if pixelwise:
        x = per_pixel(convolution, params, x)
    else:
        x = conv(convolution, params, x, windows=windows)
    if add is not None:
        x = add(x, windows)
    x = group_norm(norm, params, x)
    return relu(_pool(x, image, windows=windows) if pool else x)


def mlp_block(block: nn.Module, params: Params, x: Tensor, add: Add | None = None) -> Tensor:
    """A block of MLPHost; `add` changes the output of its linear layer."""
    linear, *others = block.children()
    x = run(linear, params, x)
    if add is not None:
        x = add(x, False)
    return _run_all(others, params, x)


FORMS: dict[type[nn.Module], Form] = {
    nn.Sequential: _run_all,
    nn.Linear: _linear,
    nn.Conv2d: conv,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: _layer_norm,
    nn.AdaptiveAvgPool2d: _adaptive_pool,
    nn.MaxPool2d: _per_example,
    nn.Flatten: _per_example,
    Mean: _per_example,
    Renormalize: _renormalize,
    ChannelAttention: _channel_attention,
    **dict.fromkeys((nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity), _pointwise),
}


# --- objectives ------------------------------------------------------------------------------


def objectives(objective: Objective) -> Objective:
    """The same objective for every row: [n, B, ...] and targets [n, B, ...] to [n]."""
    if objective is cross_entropy:
        return _cross_entropies
    return _accuracies if objective is accuracy else vmap(objective)


def _cross_entropies(output: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return losses.view(target.shape).mean(1)


def _accuracies(output: Tensor, target: Tensor) -> Tensor:
    return 100.0 * (output.argmax(dim=-1) == target).float().mean(1)
