"""Growth in several processes that train one model together with DistributedDataParallel (DDP).

Every process makes the same changes to its copy of the network, because all get the same numbers:
scores are averaged, gradients of seeds are averaged like DDP averages those of the host, and the
first process decides. At every step the processes check that their networks are still equal.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from esper.growth.grown_module import GrownModule
from esper.growth.hooks import original
from esper.leyline import ConfigError, EsperError

# Integers of the size of an element, to compare and to send values as they are.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_parallel(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Raises ConfigError if the model or its optimizer is spread over devices or processes in a way
    in which it cannot grow."""
    if _is(optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
        raise ConfigError(
            "ZeroRedundancyOptimizer leaves each process only a part of the state, but growth "
            "saves and restores all of it; use the optimizer that it wraps"
        )
    for module in model.modules():
        if isinstance(module, DataParallel):
            raise ConfigError(
                "DataParallel copies the model to other devices in every pass, and there the "
                "copies would call the seeds of the first device; use DistributedDataParallel"
            )
        if any(_is(module, "torch.distributed.fsdp", name) for name in _SHARDING):
            raise ConfigError(
                "FSDP leaves each process only a part of every parameter, but growth saves and "
                "restores whole networks; use DistributedDataParallel"
            )
    for name, parameter in model.named_parameters():
        if _is(parameter, "torch.distributed.tensor", "DTensor"):
            raise ConfigError(
                f"{name} is a DTensor (tensor parallelism), and a seed needs the whole output of "
                "its layer in one process; use DistributedDataParallel"
            )


def check_wrapper(model: nn.Module, network: GrownModule) -> None:
    """Raises ConfigError if the model is a DDP module that waits for gradients of parameters of
    `network` which are not trained now."""
    parallel = original(model)
    if network.stacks is None or not isinstance(parallel, DistributedDataParallel):
        return
    waits = not parallel.find_unused_parameters or parallel.static_graph
    if waits and (network.stacks.spare_parameters() or network.stacks.frozen):
        raise ConfigError(
            "DistributedDataParallel was made before esper.attach took blocks out of the model or "
            "froze it, and would wait for their gradients; call esper.attach with the model itself "
            "and then DistributedDataParallel, or give that find_unused_parameters=True (without "
            "static_graph)"
        )


_SHARDING = ("FSDPModule", "FullyShardedDataParallel")


def _is(value: Any, module: str, name: str) -> bool:
    """`isinstance` without an import: without it there is no such object."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def in_processes() -> bool:
    """Whether torch.distributed runs with several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Processes:
    """The processes that train one model together. Each calls the same methods in the same order;
    a process that is alone exchanges nothing.

    `weight` is that of the scores of this process in means.
    """

    def __init__(self, group: Any = None) -> None:
        self.size = 1 if group is None else dist.get_world_size(group)
        # None is the default group: it must be free to end before this object does.
        self.group = None if group is None or group is dist.group.WORLD else group
        self.weight = 1.0

    @staticmethod
    def of(model: nn.Module) -> "Processes":
        """Those of a DDP module, else all that there are."""
        parallel = original(model)
        if isinstance(parallel, DistributedDataParallel):
            return Processes(parallel.process_group)
        return Processes(dist.group.WORLD if in_processes() else None)

    @property
    def alone(self) -> bool:
        return self.size == 1

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in order."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        with _explained():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def first(self, value: Any) -> Any:
        """The value of the first process."""
        return self.gather(value)[0]

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The mean over the processes, by their weights; NaN counts unless its weight is 0."""
        if self.alone:
            return values
        found = [(weight, each) for weight, each in self.gather((self.weight, values)) if weight]
        if not found:
            raise ConfigError("no process has evaluated any sample: samples is 0 in all of them")
        weights, each = zip(*found, strict=True)
        return np.asarray(np.average(np.stack(each), axis=0, weights=weights))

    def check_same(self, values: Mapping[str, Any]) -> None:
        """Raises ConfigError in all processes, with the name, if a value differs."""
        found = self.gather(dict(values))
        for number, name in _differences(found):
            raise ConfigError(
                f"{name} is {found[number].get(name)} in process {number}, but "
                f"{found[0].get(name)} in process 0; all processes must train the same model in "
                "the same way"
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """If one process fails inside, all fail; nothing may be exchanged inside."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below
            problem = error
        found = self.gather(None if problem is None else f"{problem}")
        if problem is not None:
            raise problem
        for number, other in enumerate(found):
            if other is not None:
                raise EsperError(f"process {number} failed: {other}")

    @torch.no_grad()
    def share(self, module: nn.Module, *, parameters: bool = True) -> None:
        """Replace the buffers of a module, and its parameters, by those of the first process."""
        if self.alone:
            return
        for tensor in (*(module.parameters() if parameters else ()), *module.buffers()):
            sent = tensor.detach().contiguous()
            if sent.numel() > 0:
                with _explained():
                    dist.broadcast(_bits(sent), group=self.group, group_src=0)
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)

    @torch.no_grad()
    def check_equal(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raises EsperError in all processes, with the name, if a tensor differs."""
        if self.alone:
            return
        names, tensors = zip(*named, strict=True)
        found = self.gather(dict(zip(names, _checksums(tensors), strict=True)))
        for number, name in _differences(found):
            raise EsperError(
                f"{name} differs between the processes 0 and {number}; train by calling the "
                "DistributedDataParallel module, not the model inside it, and load the same state "
                "in all processes"
            )

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their means; a gradient that is missing in some processes counts as
        0 there."""
        kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for params in kinds.values():
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            used = [float(p.grad is not None) for p in params]
            # Divided first, so that the sum does not overflow in half precision.
            flat = torch.cat([part.reshape(-1) / self.size for part in parts])
            flat = torch.cat([flat, flat.new_tensor(used)])
            with _explained():
                dist.all_reduce(flat, group=self.group)
            *means, known = flat.split([*(p.numel() for p in params), len(params)])
            for index, (param, mean) in enumerate(zip(params, means, strict=True)):
                if param.grad is not None:
                    param.grad.copy_(mean.view_as(param))
                elif known[index] > 0:  # this waits for the device, but is rare
                    param.grad = mean.view_as(param).clone()


def _bits(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor as integers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(-1).view(_BITS[tensor.element_size()])


def _checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Sums of the bits, which depend on no order."""
    sums = [_bits(t.detach().contiguous()).sum(dtype=torch.int64) for t in tensors]
    return list(torch.stack([each.to(sums[0].device) for each in sums]).tolist())


def _differences(found: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """The processes whose values are not those of the first, with the names of the values."""
    for number, others in enumerate(found):
        for name in {**found[0], **others}:
            if others.get(name) != found[0].get(name):
                yield number, name


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise EsperError(
            "another process of this run has ended or does not answer, so this one ends too; look "
            f"at the output of the others ({str(error).splitlines()[0]})"
        ) from error


class SeedGradients:
    """Averages the gradients of seeds in every backward pass in which DDP averages those of the
    host. DDP cannot do it itself: it knows only the parameters that existed when it was made."""

    def __init__(self, network: GrownModule, processes: Processes) -> None:
        self.network, self.processes = network, processes
        self.averages = True
        self._pass = -1
        self._handles: list[RemovableHandle] = []
        self._then: Callable[[], None] = lambda: None

    def watch(self, then: Callable[[], None] = lambda: None) -> None:
        """Hooks for the seeds that the network has now, instead of those before; `then` is called
        after gradients were averaged."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._then = [], then
        seeds = self._seeds()
        if seeds and not self.processes.alone:
            # Those of the host too: a process may leave a seed out in a pass, and others not.
            host = (p for p in self.network.host_parameters() if p.requires_grad)
            params = [*host, *seeds]
            self._handles = [
                self.network.host.register_forward_pre_hook(self._before_pass),
                *(p.register_post_accumulate_grad_hook(self._on_gradient) for p in params),
            ]

    def _seeds(self) -> list[nn.Parameter]:
        network = self.network
        return [p for index, _ in network.each_slot() for p in network.seed_parameters(index)]

    @torch.compiler.disable
    def _before_pass(self, module: nn.Module, args: Any) -> None:
        """DDP decides in the forward pass whether the backward pass averages."""
        if not torch.is_grad_enabled():
            return
        # Without it every pass averages, which is as exact.
        ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if ddp is not None and ddp._join_config.enable:
            raise ConfigError(
                "inside join() the gradients of seeds cannot be averaged; give all processes the "
                "same number of batches, for example with a DistributedSampler"
            )
        self.averages = ddp is None or ddp.require_backward_grad_sync

    def _on_gradient(self, parameter: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        # Without the group, training has gone on in one process after the end of growth.
        if self.averages and task != self._pass and dist.is_initialized():
            self._pass = task
            _at_end_of_pass(self._after_pass)

    def _after_pass(self) -> None:
        # Once more to the end of the queue: after DDP, which has to finish first.
        _at_end_of_pass(self._average)

    def _average(self) -> None:
        self.processes.average_gradients(self._seeds())
        self._then()


def _at_end_of_pass(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)
