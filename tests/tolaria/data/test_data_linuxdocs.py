"""The documentation of Linux: out of its package, and as tokens. The package here is tiny."""

import gzip
import shutil
import subprocess
from dataclasses import astuple, replace
from hashlib import sha256
from pathlib import Path

import pytest

from command_support import esper_here
from esper.leyline import DataMissingError
from esper.tolaria.data import catalogue, fetch
from esper.tolaria.data.fetch import DataFile
from esper.tolaria.data.text import LINUXDOCS_FILE, load_documents
from esper.tolaria.tasks import find_task

INNER = "usr/share/doc/linux-doc-6.1/Documentation"
LONG = b"This notice is part of many documents. " * 8
SPLITS = {"block_size": 8, "val_bytes": 300, "test_bytes": 300}


def documents() -> dict[str, bytes]:
    texts = {f"d{i:02}.rst": b"Document %d.\n\n" % i + LONG + b"\n\nEnd %d." % i for i in range(40)}
    return {**texts, "more/x.yaml": b"x: 1", "translations/y.rst": b"nein", "figure.svg": b"<svg/>"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A real .deb with these documents, the first of them gzipped."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not installed")
    root = tmp_path / "package"
    for name, text in documents().items():
        path = root / INNER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    (root / INNER / "d00.rst").unlink()
    (root / INNER / "d00.rst.gz").write_bytes(gzip.compress(documents()["d00.rst"]))
    (root / INNER / "link.rst").symlink_to("d01.rst")
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN" / "control").write_text(
        "Package: linux-doc-6.1\nVersion: 1\nArchitecture: all\n"
        "Maintainer: T <t@example.org>\nDescription: test\n"
    )
    subprocess.run(["dpkg-deb", "-b", "package", "tiny.deb"], cwd=tmp_path, check=True)
    return tmp_path / "tiny.deb"


@pytest.fixture
def offered(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package from a registry; everything but its client is real."""
    run = fetch.run

    def without_network(command, folder):
        if command[0] == "apt-get":
            assert command[:2] == ["apt-get", "download"]
            assert command[2].startswith("linux-doc-6.1=")
            shutil.copy(package, folder)
        else:
            run(command, folder)

    monkeypatch.setattr(fetch, "run", without_network)
    inner = [name for name in sorted(documents()) if name.endswith((".rst", ".yaml"))]
    texts = [documents()[name] for name in inner if "translations" not in name]
    whole = b"\n<|endoftext|>\n".join(texts) + b"\n"
    known = catalogue.CATALOGUE["linuxdocs"]
    file = DataFile(LINUXDOCS_FILE, sha256(whole).hexdigest())
    monkeypatch.setitem(catalogue.CATALOGUE, "linuxdocs", replace(known, files=(file,)))
    return package


def test_the_command_fetches_and_verifies_the_documents(offered, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    assert esper_here(monkeypatch, "data", "get", "linuxdocs") == 0
    assert "verified" in capsys.readouterr().out
    text = (tmp_path / "data" / "linuxdocs" / LINUXDOCS_FILE).read_bytes()
    assert text.startswith(b"Document 0.")
    assert text.endswith(b"x: 1\n")
    assert (text.count(b"endoftext"), b"nein" in text, b"svg" in text) == (40, False, False)


def test_another_package_is_refused_by_its_checksum(offered, tmp_path, monkeypatch):
    known = catalogue.CATALOGUE["linuxdocs"]
    other = replace(known, files=(DataFile(LINUXDOCS_FILE, "0" * 64),), sources=known.sources[:1])
    monkeypatch.setitem(catalogue.CATALOGUE, "linuxdocs", other)
    with pytest.raises(DataMissingError, match="another SHA-256"):
        catalogue.get("linuxdocs", tmp_path / "data")
    assert not (tmp_path / "data" / "linuxdocs").exists()


def test_splits_are_whole_documents_and_long_paragraphs_occur_once(offered, tmp_path):
    catalogue.get("linuxdocs", tmp_path)
    data = load_documents(tmp_path, **SPLITS)
    texts = {}
    for name in ("train", "val", "test"):
        inputs, targets = getattr(data, f"{name}_x"), getattr(data, f"{name}_y")
        assert (inputs[:, 1:] == targets[:, :-1]).all()
        texts[name] = bytes(inputs.flatten().tolist())
    assert sum(text.count(LONG.strip()) for text in texts.values()) == 1
    # Each document is in one split; the last one of validation and of test may be cut off.
    numbers = [{i for i in range(40) if b"Document %d." % i in text} for text in texts.values()]
    assert not numbers[0] & numbers[1]
    assert not numbers[0] & numbers[2]
    assert not numbers[1] & numbers[2]
    assert min(map(len, numbers)) > 1
    again = load_documents(tmp_path, **SPLITS)
    assert all((a == b).all() for a, b in zip(astuple(data), astuple(again), strict=True))


def test_without_the_file_the_error_says_how_to_get_it(tmp_path):
    with pytest.raises(DataMissingError, match="esper data get linuxdocs"):
        load_documents(tmp_path)


def test_the_task_is_a_transformer_of_four_layers_and_grows_after_each():
    host = find_task("linuxdocs").build()
    assert len(host.blocks) == 4
    assert host.token.embedding_dim == 128
    assert find_task("linuxdocs").slots == host.slot_modules
