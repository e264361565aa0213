"""The web page's server as others meet it: what it tells, to whom, and what it refuses."""

import json
import os
import random
import re
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from command_support import esper_here
from esper.observatory.access import is_own_host
from serve_support import Served, parsed, serving
from view_support import write_evaluation_folder, write_growth, write_training

SECRET = "the-secret-outside"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("base")
    runs = base / "runs"
    write_growth(runs / "grown")
    write_training(runs / "deep" / "trained")
    write_evaluation_folder(runs / "evaluated")
    write_growth(base / "outside", task=SECRET)
    (runs / "link").symlink_to(base / "outside")
    (runs / "half").mkdir()
    (runs / "half" / "metrics.jsonl").symlink_to(base / "outside" / "metrics.jsonl")
    (runs / "half" / "config.toml").symlink_to(base / "outside" / "config.toml")
    (base / "secret.txt").write_text(SECRET)
    return runs


@pytest.fixture(scope="module")
def served(folder: Path):
    with serving(folder) as server:
        yield server


def test_runs_are_listed(served: Served):
    status, _, body = served.get("/api/runs")
    assert status == 200
    assert {line["id"] for line in json.loads(body)} >= {"grown", "deep/trained", "evaluated"}
    status, _, body = served.get("/api/run?id=deep/trained&round=1&env=2")
    data = json.loads(body)
    assert (data["episode"]["round"], data["episode"]["env"]) == (1, 2)
    assert data["last_round"] == 2
    status, _, body = served.get("/api/compare?id=grown&id=deep/trained")
    assert [curve["over"] for curve in json.loads(body)["curves"]] == ["epoch", "round"]


def test_every_answer_is_guarded(served: Served):
    for path in ("/", "/api/runs", "/static/app.js", "/nothing", "/api/run?id=nothing"):
        _, head, _ = served.get(path)
        head = head.lower()
        policy = re.search(r"content-security-policy: (.*)", head)
        assert policy is not None
        assert "default-src 'none'" in policy[1]
        assert "unsafe" not in policy[1]
        assert "x-content-type-options: nosniff" in head
        assert "server:" not in head
    _, _, page = served.get("/")
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=|https?://", page)


@pytest.mark.parametrize(
    "path",
    [
        "/api/run?id=../outside",
        "/api/run?id=grown/../../outside",
        "/api/run?id=%2e%2e%2foutside",
        "/api/run?id=/etc",
        "/api/run?id=link",
        "/api/run?id=grown%00",
        "/api/run?id=",
        "/api/run",
        "/api/run?id=" + "a/" * 3000,
        "/api/run?id=" + "a" * 5000,
        "/api/live?id=../outside",
        "/api/compare?id=grown&id=../outside",
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2f..%2fsecret.txt",
        "/static//etc/passwd",
        "/../../secret.txt",
    ],
)
def test_nothing_outside_the_folder_is_served(served: Served, path: str):
    status, _, body = served.get(path)
    assert status in (400, 404)
    assert SECRET not in body
    assert "root:" not in body


def test_files_that_are_links_are_not_followed(served: Served):
    status, _, body = served.get("/api/run?id=half")
    assert status in (200, 404)
    assert SECRET not in body
    assert "conv_light" not in body
    _, _, body = served.get("/api/runs")
    assert SECRET not in body


def test_other_names_and_other_sites_are_refused(served: Served):
    own = f"{served.host}:{served.port}"
    for host in ("evil.example", f"evil.example:{served.port}", "127.0.0.1.evil.example", "a:b"):
        assert served.get("/api/runs", Host=host)[0] == 421
    assert served.get("/api/runs", Host=f"localhost:{served.port}")[0] == 200
    assert parsed(served.raw(b"GET / HTTP/1.0\r\n\r\n"))[0] == 421
    two = f"GET / HTTP/1.1\r\nHost: {own}\r\nHost: evil.example\r\n\r\n".encode()
    assert parsed(served.raw(two))[0] in (400, 421)
    assert served.get("/api/runs", Origin="http://evil.example")[0] == 403
    assert served.get("/api/runs", Origin="null")[0] == 403
    assert served.get("/api/runs", Origin=f"http://{own}")[0] == 200
    cross = {"Sec_Fetch_Site": "cross-site"}
    assert served.get("/api/runs", **cross, Sec_Fetch_Mode="no-cors")[0] == 403
    assert served.get("/", **cross, Sec_Fetch_Mode="navigate")[0] == 200


def test_addresses_are_known_and_names_only_if_they_are_ours():
    ours = frozenset({"localhost", "box"})
    known = ["localhost", "LOCALHOST:80", "box:1", "10.0.0.7:8642", "[::1]:80", "[::1]"]
    assert [is_own_host(host, ours) for host in known] == [True] * len(known)
    for host in ("", "box.evil", "10.0.0.7.evil:1", "localhost:x", "[::1", "localhost:80:80"):
        assert not is_own_host(host, ours) or host == "[::1", host


def test_it_is_only_read(served: Served, folder: Path):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    host = f"Host: {served.host}:{served.port}\r\nConnection: close\r\n"
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert parsed(served.raw(f"{method} /api/runs HTTP/1.1\r\n{host}\r\n".encode()))[0] == 405
    body = f"GET / HTTP/1.1\r\n{host}Content-Length: 100000\r\n\r\n" + "x" * 100_000
    assert parsed(served.raw(body.encode()))[0] == 413
    chunked = f"POST /login HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
    assert parsed(served.raw(chunked.encode()))[0] == 413
    huge = f"GET / HTTP/1.1\r\n{host}X: {'x' * 200_000}\r\n\r\n"
    assert served.raw(huge.encode())[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 431")
    assert served.get("/?" + "a" * 9000)[0] == 414
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_another_address_needs_the_token(folder: Path):
    with serving(folder, "--host", "0.0.0.0") as served:
        token = served.said[1].split()[1]
        assert len(token) >= 32
        assert served.get("/api/runs")[0] == 401
        assert served.get("/api/live")[0] == 401
        status, _, page = served.get("/")
        assert (status, "Token" in page, "app.js" in page) == (200, True, False)
        assert served.get("/api/runs", Authorization="Bearer wrong")[0] == 401
        assert served.get("/api/runs", Authorization="Bearer " + "é")[0] == 401
        assert served.get(f"/api/runs?token={token}")[0] == 401
        assert served.get("/api/runs", Authorization=f"Bearer {token}")[0] == 200
        assert served.get("/api/runs", Cookie=f"a=b; esper_token={token}")[0] == 200
        for offered, status in (("wrong", 401), (token, 303)):
            form = f"token={offered}"
            request = (
                f"POST /login HTTP/1.1\r\nHost: {served.host}:{served.port}\r\n"
                f"Content-Length: {len(form)}\r\nConnection: close\r\n\r\n{form}"
            )
            got, head, _ = parsed(served.raw(request.encode()))
            assert got == status
            cookie = re.search(r"set-cookie: (.*)", head.lower())
            assert (cookie is not None) == (status == 303)
        assert cookie is not None
        assert "httponly" in cookie[1]
        assert "samesite=strict" in cookie[1]


def test_malformed_requests_break_nothing(served: Served):
    """2,000 requests from a key: bytes flipped, cut and glued; never a 500, never a secret."""
    draw = random.Random(7)
    seeds = [
        b"GET /api/run?id=grown HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
        b"GET /api/run?id=deep%2Ftrained&round=1&env=1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /api/compare?id=grown&id=evaluated HTTP/1.0\r\nHost: localhost\r\n\r\n",
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 7\r\n\r\ntoken=a",
        b"GET /static/../../secret.txt HTTP/1.1\r\nHost: localhost\r\nCookie: a\r\n\r\n",
    ]
    pieces = [b"\0", b"%00", b"../", b"%2e%2e/", b"\r\n", b"\xff\xfe", b"?id=", b"&id=", b"9" * 40]
    pieces += [b"/etc/passwd", b"Content-Length: -1\r\n", b"Transfer-Encoding: x\r\n", b"%"]
    statuses = set()
    for _ in range(2000):
        request = bytearray(draw.choice(seeds))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(request))
            if draw.random() < 0.5:
                request[at : at + draw.randint(0, 6)] = draw.choice(pieces)
            else:
                request[at] = draw.randrange(256)
        # Whatever the first request has become, a second one behind it ends the connection.
        end = b"\r\n\r\nGET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = served.raw(bytes(request) + end, timeout=0.3)
        if answer:
            status = int(answer.split()[1])
            statuses.add(status)
            assert status < 500, bytes(request)
            assert SECRET.encode() not in answer
            assert b"Traceback" not in answer
    assert {200, 400, 404} <= statuses
    assert served.get("/api/runs")[0] == 200


def test_streams_tell_of_changes_and_are_limited(folder: Path, tmp_path: Path):
    run = write_growth(tmp_path / "runs" / "run")
    with serving(tmp_path / "runs") as served:
        request = (
            f"GET /api/live?id=run HTTP/1.1\r\nHost: {served.host}:{served.port}\r\n\r\n".encode()
        )
        first = socket.create_connection((served.host, served.port), 20)
        first.sendall(request)
        _read_until(first, b": hello")
        with (run / "metrics.jsonl").open("a") as file:
            file.write("{}\n")
        _read_until(first, b"event: change")
        others = []
        for _ in range(140):
            other = socket.create_connection((served.host, served.port), 20)
            other.sendall(request)
            others.append(other)
        heads = [_read_until(other, b"\r\n\r\n")[:12] for other in others]
        assert heads.count(b"HTTP/1.1 503") == 140 - 127
        for connection in (first, *others):
            connection.close()


def _read_until(connection: socket.socket, mark: bytes) -> bytes:
    seen = b""
    while mark not in seen:
        block = connection.recv(4096)
        assert block, seen
        seen += block
    return seen


def test_what_cannot_be_served_is_said_in_a_sentence(tmp_path, monkeypatch, capsys):
    assert esper_here(monkeypatch, "serve", str(tmp_path / "nothing")) == 2
    assert "there is no folder" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert esper_here(monkeypatch, "serve", str(tmp_path), "--port", port) == 2
    assert "choose another with --port" in capsys.readouterr().err
    monkeypatch.setitem(os.sys.modules, "uvicorn", None)
    monkeypatch.delitem(os.sys.modules, "esper.observatory.server")
    assert esper_here(monkeypatch, "serve", str(tmp_path)) == 2
    assert "pip install 'esper-grow[serve]'" in capsys.readouterr().err


def is_closed(connection: socket.socket, timeout: float) -> bool:
    connection.settimeout(timeout)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_requests_that_never_end_keep_nobody_out(folder: Path):
    """Also not before the token is checked."""
    halves = (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
    halves += (b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\ntoken=",)
    with serving(folder, "--host", "0.0.0.0") as served, ExitStack() as stack:
        for i in range(600):
            connection = socket.create_connection((served.host, served.port), 10)
            stack.enter_context(connection)
            connection.sendall(halves[i % len(halves)])
        assert served.get("/")[0] == 200
        assert served.get("/api/runs")[0] == 401


def test_a_request_that_does_not_end_is_given_up(folder: Path, monkeypatch):
    with serving(folder) as served:
        address = (served.host, served.port)
        with socket.create_connection(address, 10) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
            began = time.monotonic()
            while not is_closed(slow, 0.5) and time.monotonic() - began < 30:
                with suppress(OSError):
                    slow.sendall(b"x")  # slowly is not fast enough
            assert time.monotonic() - began < 30
