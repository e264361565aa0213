"""Esper without what only Linux and macOS have."""

import subprocess
import sys
from pathlib import Path

# Runs in a process of its own, because it takes parts of `os` away.
WITHOUT_POSIX = """
import errno, os, pathlib, pkgutil, sys
import torch, numpy, safetensors.torch, typer, rich.live, matplotlib.pyplot, sklearn.datasets
from torch import nn

for name in ("fcntl", "resource"):
    sys.modules[name] = None
for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "sched_getaffinity"):
    delattr(os, name)
opened = os.open

def open_no_folder(path, *args, **kwargs):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "a folder")
    return opened(path, *args, **kwargs)

os.open = open_no_folder

import esper

other = ("lightning", "transformers", "trackers", "ray", "__main__")
for module in pkgutil.walk_packages(esper.__path__, "esper."):
    if module.name.split(".")[1] not in other:
        __import__(module.name)

folder = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
data = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(2)]
quiet = esper.GrowthSettings(progress=False)
options = dict(slots=["0"], steps=3, settings=quiet, out=folder / "run")
esper.grow(model, data, data, **options)
assert (folder / "run" / "grown").is_dir()

from esper.observatory.reading import UnreadableError, is_locked, open_regular

assert not is_locked(folder / "run" / ".lock")
(folder / "link").symlink_to(folder / "run" / "config.toml")
try:
    open_regular(folder / "link")
    raise SystemExit("a link was followed")
except UnreadableError as error:
    assert "is a link" in str(error)
"""


def test_esper_imports_and_grows_without_posix(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
