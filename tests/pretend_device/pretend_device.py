"""A simulated accelerator for tests: the torch device "pretend", of which there are two.

Its memory is that of the host, and CPU kernels compute every operation. It is as strict as CUDA:

* operations on tensors of different devices fail, also pretend:0 with pretend:1. As on CUDA, CPU
  tensors without dimensions and CPU indices are allowed;
* a CPU generator cannot fill a tensor of the device. Every device has a generator of its own, which
  torch.manual_seed seeds;
* .numpy() fails for its tensors.

torch.accelerator, autocast, GradScaler, pinned memory, streams (that do nothing), torch.save and
safetensors work on it. It says nothing about speed, but it counts what a GPU would wait for:

    model.to("pretend")                       # or "pretend:1"
    with pretend_device.waits() as found:     # every transfer from the device to the host
        ...
    print(found.table())                      # how many, by line

Run this file to compile it, which takes about 20 seconds; torch keeps the result in its cache of
extensions. `environment()` is that of a process in which `import torch` loads it.

PRETEND_DEVICES is the number of devices. With PRETEND_NO_FLOAT64=1 it refuses float64, as Apple's
MPS does. PRETEND_MEMORY is the free memory that it reports, in bytes.
"""

import collections
import os
import traceback
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = Path(__file__).resolve()


def environment(**more):
    """Environment variables of a process that has the device."""
    paths = [str(HERE / "auto"), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def build():
    """The compiled extension; compiled only if its source is new."""
    from torch.utils.cpp_extension import load

    source = str(HERE / "pretend_device.cpp")
    return load("pretend_device", [source], extra_cflags=["-O1", "-w"], with_cuda=False)


def _module(ext):
    import torch

    mod = types.ModuleType("torch.pretend")

    def index(device):
        if device is None:
            return ext.current()
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return ext.current() if found is None else found

    class device:
        def __init__(self, where):
            self.to = index(where)

        def __enter__(self):
            self.before = ext.current()
            ext.set_device(self.to)

        def __exit__(self, *args):
            ext.set_device(self.before)

    mod.device = device
    mod.is_available = lambda: True
    mod.is_initialized = lambda: True
    mod._is_in_bad_fork = lambda: False
    mod.init = mod._lazy_init = lambda: None
    mod.device_count = ext.count
    mod.current_device = ext.current
    mod.set_device = lambda d: ext.set_device(index(d))
    mod.synchronize = lambda d=None: None
    mod.default_generators = tuple(ext.generator(i) for i in range(ext.count()))

    def manual_seed_all(seed):
        for generator in mod.default_generators:
            generator.manual_seed(int(seed))

    def mem_get_info(d=None):
        free = int(os.environ.get("PRETEND_MEMORY", 2**30))
        return free, free

    mod.manual_seed_all = manual_seed_all
    mod.manual_seed = lambda seed: mod.default_generators[ext.current()].manual_seed(int(seed))
    mod.get_rng_state = lambda d=None: mod.default_generators[index(d)].get_state()
    mod.set_rng_state = lambda s, d=None: mod.default_generators[index(d)].set_state(s)
    mod.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    mod.is_bf16_supported = lambda *a: True
    mod.empty_cache = lambda: None
    mod.mem_get_info = mem_get_info
    mod.memory_allocated = lambda d=None: 0
    mod.max_memory_allocated = lambda d=None: 0
    return mod


class Waits:
    """The number of transfers from the device to the host, by the line that asked for them."""

    def __init__(self):
        self.places = collections.Counter()

    @property
    def total(self):
        return sum(self.places.values())

    def table(self, most=40):
        return "\n".join(f"{n:6d}  {place}" for place, n in self.places.most_common(most))


def waits(inside="esper"):
    """A context that counts transfers to the host, by the innermost line whose path contains
    `inside`."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found = Waits()

    def on_device(tensor):
        return tensor.device.type == "pretend"

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            name = func.name().split("::")[1]
            there = False
            if name.startswith("_to_copy"):
                to = kwargs.get("device")
                to_host = to is not None and torch.device(to).type == "cpu"
                there = to_host and on_device(args[0])
            elif name.startswith("copy_"):
                there = args[0].device.type == "cpu" and on_device(args[1])
            elif name.startswith(
                ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2")
            ) or name.startswith("repeat_interleave.Tensor"):
                there = on_device(args[0])
            elif name.startswith("index.Tensor"):
                # A mask is turned into indices first.
                there = any(
                    i is not None and on_device(i) and i.dtype == torch.bool for i in args[1]
                )
            if there:
                frames = traceback.extract_stack()[:-1]
                own = f"/{inside}/"
                here = [
                    f for f in frames if own in f.filename and "site-packages" not in f.filename
                ]
                at = here[-1] if here else frames[-1]
                short = at.filename.split("/src/")[-1]
                found.places[f"{name:24s} {short}:{at.lineno}  {at.line}"] += 1
            return func(*args, **kwargs)

    class Context:
        def __enter__(self):
            self.mode = Mode()
            self.mode.__enter__()
            return found

        def __exit__(self, *args):
            return self.mode.__exit__(*args)

    return Context()


_ext = None


def autoload():
    """Register the device, once in this process."""
    global _ext
    if _ext is not None:
        return
    import torch

    _ext = build()
    torch.utils.rename_privateuse1_backend("pretend")
    torch._register_device_module("pretend", _module(_ext))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


if __name__ == "__main__":
    build()
