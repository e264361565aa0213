import gzip
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from urllib.error import URLError

import pytest

from esper.leyline import ConfigError, DataMissingError
from esper.tolaria.data import catalogue, fetch
from esper.tolaria.data.catalogue import DataSet, State
from esper.tolaria.data.fetch import DataFile, Source, SourceError

CONTENTS = {"one.bin": b"first file", "two.bin": b"second file"}
FILES = tuple(DataFile(name, sha256(data).hexdigest()) for name, data in CONTENTS.items())


def giving(contents: dict[str, bytes], label: str = "a fake") -> Source:
    def download(scratch: Path, folder: Path, on_progress: fetch.Progress) -> None:
        for name, data in contents.items():
            (folder / name).write_bytes(data)

    return Source(label, download)


def failing(error: BaseException, label: str = "a failure") -> Source:
    def download(scratch: Path, folder: Path, on_progress: fetch.Progress) -> None:
        (folder / "one.bin").write_bytes(b"first")
        raise error

    return Source(label, download)


@pytest.fixture
def offer(monkeypatch):
    """Put a data set `toy` into the catalogue with the given sources."""

    def put(*sources: Source) -> None:
        toy = DataSet("toy", "a toy", "none", files=FILES, sources=sources)
        monkeypatch.setitem(catalogue.CATALOGUE, "toy", toy)

    return put


def names_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


WHOLE = ["toy", "toy/one.bin", "toy/two.bin"]


def test_get_brings_the_files_and_leaves_nothing_else(offer, tmp_path):
    offer(giving({**CONTENTS, "README": b"not wanted"}))
    lines: list[str] = []
    root = tmp_path / "deep" / "data"
    assert catalogue.status("toy", root).state is State.MISSING
    assert catalogue.get("toy", root, lines.append).state is State.PRESENT
    assert names_in(root) == WHOLE
    assert (root / "toy" / "two.bin").read_bytes() == b"second file"
    assert lines[0] == "downloading a fake"


def test_get_does_nothing_if_the_data_is_there(offer, tmp_path):
    offer(giving(CONTENTS))
    catalogue.get("toy", tmp_path)
    offer(failing(AssertionError("fetched again")))
    assert catalogue.get("toy", tmp_path).state is State.PRESENT


def test_compressed_files_are_verified_by_their_contents(offer, tmp_path):
    offer(giving({f"{name}.gz": gzip.compress(data) for name, data in CONTENTS.items()}))
    assert catalogue.get("toy", tmp_path).state is State.PRESENT
    assert names_in(tmp_path) == ["toy", "toy/one.bin.gz", "toy/two.bin.gz"]


@pytest.mark.parametrize("two", [b"sEcond file", b"second", b"second file and more"])
def test_a_checksum_that_differs_is_refused(offer, tmp_path, two):
    offer(giving({**CONTENTS, "two.bin": two}))
    with pytest.raises(DataMissingError, match=r"two\.bin has another SHA-256"):
        catalogue.get("toy", tmp_path)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "contents",
    [b"", b"not gzip", gzip.compress(CONTENTS["two.bin"])[:-4], gzip.compress(b"?" * 99)],
    ids=["empty", "not gzip", "cut off", "too long"],
)
def test_damaged_files_are_reported_and_never_overwritten(offer, tmp_path, contents):
    offer(giving(CONTENTS))
    path = tmp_path / "toy" / "two.bin.gz"
    path.parent.mkdir()
    path.write_bytes(contents)
    found = catalogue.status("toy", tmp_path)
    assert found.state is State.DAMAGED
    assert str(path) in found.detail
    with pytest.raises(ConfigError, match="delete it and run `esper data get toy`"):
        catalogue.get("toy", tmp_path)
    assert path.read_bytes() == contents


def test_only_what_is_missing_is_added(offer, tmp_path):
    offer(giving(CONTENTS))
    (tmp_path / "toy").mkdir()
    mine = tmp_path / "toy" / "one.bin.gz"
    mine.write_bytes(gzip.compress(CONTENTS["one.bin"]))
    assert catalogue.status("toy", tmp_path).state is State.MISSING
    assert catalogue.get("toy", tmp_path).state is State.PRESENT
    assert names_in(tmp_path) == ["toy", "toy/one.bin.gz", "toy/two.bin"]


def test_the_second_source_serves_when_the_first_fails(offer, tmp_path):
    offer(failing(SourceError("npm is not installed")), giving(CONTENTS))
    lines: list[str] = []
    assert catalogue.get("toy", tmp_path, lines.append).state is State.PRESENT
    assert "failed: a failure (npm is not installed)" in lines
    assert names_in(tmp_path) == WHOLE


def test_when_all_sources_fail_the_error_has_every_reason_and_nothing_is_left(offer, tmp_path):
    offer(
        failing(SourceError("npm is not installed"), "npm package x"),
        failing(URLError("no route"), "https://example.org/x"),
        giving({"one.bin": CONTENTS["one.bin"]}, "half"),
    )
    with pytest.raises(DataMissingError) as error:
        catalogue.get("toy", tmp_path)
    for part in ("npm package x (npm is not installed)", "no route", "half (no two.bin)"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert names_in(tmp_path) == []


def test_an_interrupted_fetch_leaves_nothing(offer, tmp_path):
    offer(failing(KeyboardInterrupt()), giving(CONTENTS))
    with pytest.raises(KeyboardInterrupt):
        catalogue.get("toy", tmp_path)
    assert names_in(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from esper.tolaria.data.fetch import Source, fetch
from esper.tolaria.data.fetch import DataFile

def download(scratch, folder, on_progress):
    (folder / "one.bin").write_bytes(b"first")
    os.kill(os.getpid(), signal.SIGKILL)

fetch([DataFile("one.bin", "")], [Source("killer", download)], Path(sys.argv[1]), print)
"""


def test_a_killed_fetch_leaves_nothing_that_looks_like_data(offer, tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "toy")], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".fetching-toy-")
    offer(giving(CONTENTS))
    assert catalogue.status("toy", tmp_path).state is State.MISSING
    assert catalogue.get("toy", tmp_path).state is State.PRESENT


def test_a_data_folder_that_cannot_be_written_is_named(offer, tmp_path):
    offer(giving(CONTENTS))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write data to .*file"):
        catalogue.get("toy", tmp_path / "file")


def test_unknown_names_list_the_known():
    for function in (catalogue.status, catalogue.get):
        with pytest.raises(ConfigError, match=r"'cifar11'.*digits, pydocs"):
            function("cifar11", Path("data"))


def test_embedded_sets_need_no_folder(tmp_path):
    for name in ("digits", "pydocs"):
        assert catalogue.status(name, tmp_path).state is State.EMBEDDED
        assert catalogue.get(name, tmp_path / "none").state is State.EMBEDDED
    assert names_in(tmp_path) == []


def test_data_root_follows_the_environment(monkeypatch):
    monkeypatch.setenv("ESPER_DATA", "/somewhere/else")
    assert catalogue.data_root() == Path("/somewhere/else")
    monkeypatch.setenv("ESPER_DATA", "")
    assert catalogue.data_root() == Path("data")


def test_the_catalogue_is_quick_to_import():
    code = "import sys, esper.tolaria.data.catalogue; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
