"""Rows of parameters and moments, and the arena in which an epoch trains them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.devices import on_device, wide_dtype
from esper.growth.snapshot import HALF

Params = dict[Tensor, Tensor]


class Kind:
    """What the rows of a bank have in common: a module whose parameters they replace."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.params = list(module.parameters())
        self.sizes = [param.numel() for param in self.params]
        self.size = sum(self.sizes)

    @torch.no_grad()
    def new_row(self, module: nn.Module) -> "Row":
        """The row of a module of this kind, with optimizer state as before the first step."""
        flat = torch.cat([param.flatten() for param in module.parameters()])
        values = flat.new_zeros(3, len(flat))
        values[0] = flat
        return Row(self, values)


@dataclass(frozen=True)
class Row:
    """`values` [3, P]: parameters, first and second moment; `steps` of the optimizer so far.

    `values` are never written to, so that snapshots can share rows.
    """

    kind: Kind
    values: Tensor
    steps: int = 0

    def rounded(self) -> "Row":
        """The same with moments as in a snapshot with half of them."""
        values = self.values.clone()
        values[1:] = values[1:].to(HALF)
        return replace(self, values=values)

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        flat = self.values[0].split(self.kind.sizes)
        for param, values in zip(module.parameters(), flat, strict=True):
            param.copy_(values.view_as(param))


def stack(rows: Sequence[Row]) -> Params:
    """Parameters [n, *shape] of rows of one kind; a row may occur several times."""
    kind = rows[0].kind
    flat = torch.stack([row.values[0] for row in rows]).split(kind.sizes, dim=1)
    return {p: values.reshape(-1, *p.shape) for p, values in zip(kind.params, flat, strict=True)}


class Arena:
    """The banks of one epoch: `leaves[b]` are the parameters of bank b, views of one vector.

    In the vector the parameters of a bank follow each other, each as [n, numel]: gradients have
    that order. `tensor` is the number of the parameter tensor of one row that an element belongs
    to, `row` that of the row; `owner` is the row of each parameter tensor.
    """

    def __init__(self, banks: Sequence[Sequence[Row]]) -> None:
        self.banks = [(rows[0].kind, len(rows)) for rows in banks]
        values: list[Tensor] = []
        lengths: list[int] = []
        owners: list[int] = []
        steps: list[int] = []
        for (kind, n), rows in zip(self.banks, banks, strict=True):
            stacked = torch.stack([row.values for row in rows], dim=1)
            values += [chunk.reshape(3, -1) for chunk in stacked.split(kind.sizes, dim=2)]
            lengths += [size for size in kind.sizes for _ in rows]
            owners += [len(steps) + i for _ in kind.sizes for i in range(n)]
            steps += [row.steps for row in rows]
        self.values = torch.cat(values, dim=1)
        device = self.values.device
        # On the CPU, in float64: see `step`.
        self.steps = torch.tensor(steps, dtype=torch.float64)
        self.owner = torch.tensor(owners, device=device)
        tensors = torch.arange(len(owners), device=device)
        self.tensor = tensors.repeat_interleave(torch.tensor(lengths, device=device))
        self.row = self.owner[self.tensor]
        self.leaves: list[Params] = [
            {
                param: chunk.view(n, *param.shape).requires_grad_()
                for param, chunk in zip(kind.params, chunks, strict=True)
            }
            for (kind, n), chunks in zip(self.banks, self._chunks(self.values[0]), strict=True)
        ]
        self.flat_leaves = [leaf for leaves in self.leaves for leaf in leaves.values()]

    def _chunks(self, values: Tensor) -> list[list[Tensor]]:
        """`values` [..., N] by bank and parameter, [..., n * numel] each."""
        sizes = [size * n for kind, n in self.banks for size in kind.sizes]
        chunks = iter(values.split(sizes, dim=-1))
        return [[next(chunks) for _ in kind.sizes] for kind, _ in self.banks]

    def gradient(self, loss: Tensor) -> Tensor:
        """[N]: the gradient of a scalar."""
        found = torch.autograd.grad(loss, self.flat_leaves, materialize_grads=True)
        return torch.cat([grad.reshape(-1) for grad in found])

    def norms(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of the gradient of every parameter tensor and of every row, as exact as the device
        can."""
        squares = gradient.to(wide_dtype(gradient.device.type)).square()
        tensors = squares.new_zeros(len(self.owner)).index_add_(0, self.tensor, squares)
        rows = squares.new_zeros(len(self.steps)).index_add_(0, self.owner, tensors)
        return tensors.sqrt(), rows.sqrt()

    def broken(self) -> Tensor:
        """[rows]: how many parameters of each row are not finite."""
        values = self.values[0].detach()
        broken = (~values.isfinite()).float()
        return broken.new_zeros(len(self.steps)).index_add_(0, self.row, broken)

    @torch.no_grad()
    def step(
        self, gradient: Tensor, settings: dict[str, Any], factors: Tensor | None = None
    ) -> None:
        """One step of AdamW with the `settings` of a parameter group of torch's; `factors` [rows],
        float64 on the CPU, multiply the learning rate of each row."""
        params, mean, square = self.values
        (beta1, beta2), decay = settings["betas"], settings["weight_decay"]
        self.steps += 1
        # In float64: in float32 `1 - beta2**t` is wrong by 1e-5 in the first steps.
        lr = settings["lr"] * (torch.ones_like(self.steps) if factors is None else factors)
        rate = lr / (1.0 - beta1**self.steps)
        scale = (1.0 - beta2**self.steps).rsqrt()
        of_rows = torch.stack([1.0 - lr * decay, rate, scale]).float()
        kept, rate, scale = on_device(of_rows, params.device).index_select(1, self.row)
        if decay:
            params.mul_(kept)
        mean.lerp_(gradient, 1.0 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        below = square.sqrt().mul_(scale).add_(settings["eps"])
        params.sub_(rate.mul_(mean).div_(below))

    def rows(self) -> dict[Kind, list[Row]]:
        """New rows of every bank, in memory of their own: a snapshot must not keep the arena."""
        steps = iter(self.steps.long().tolist())
        banks = {}
        for (kind, n), chunks in zip(self.banks, self._chunks(self.values.detach()), strict=True):
            stacked = torch.cat([chunk.view(3, n, -1) for chunk in chunks], dim=2)
            banks[kind] = [Row(kind, values.clone(), next(steps)) for values in stacked.unbind(1)]
        return banks
