"""`esper serve` as tests meet it: a process of its own, and requests of every kind."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from command_support import start_esper


@dataclass
class Served:
    host: str
    port: int
    said: list[str]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def raw(self, request: bytes, timeout: float = 10.0) -> bytes:
        """The answer to these bytes; what came until the server closed, or fell silent."""
        answer = b""
        with socket.create_connection((self.host, self.port), timeout) as connection:
            connection.settimeout(timeout)
            try:
                connection.sendall(request)
                while block := connection.recv(65536):
                    answer += block
            except OSError:
                pass  # the server has had enough of it
        return answer

    def get(self, path: str, **headers: str) -> tuple[int, str, str]:
        """(status, head, body) of a GET with these headers besides Host and Connection."""
        given = {"Host": f"{self.host}:{self.port}", "Connection": "close"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        return parsed(self.raw(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode()))


def parsed(answer: bytes) -> tuple[int, str, str]:
    head, _, body = answer.decode("utf-8", "replace").partition("\r\n\r\n")
    return int(head.split()[1]), head, body


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Served]:
    process = start_esper("serve", str(folder), "--port", "0", *words)
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        found = re.search(r"http://(.+):(\d+)/", first)
        assert found, first + process.stdout.read()
        said = [first]
        if "--host" in words:
            said.append(process.stdout.readline())
        yield Served("127.0.0.1", int(found[2]), said)
    finally:
        process.terminate()
        rest = process.stdout.read()
        process.wait(20)
    assert "Traceback" not in rest, rest
