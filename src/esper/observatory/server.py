"""`esper serve`: a web page of the runs in a folder, updated while they run."""

import asyncio
import hashlib
import ipaddress
import json
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar
from urllib.parse import parse_qs

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from esper.leyline import ConfigError
from esper.observatory.access import COOKIE, AccessControl, is_token
from esper.observatory.describe import describe, summary_as_dict
from esper.observatory.formatting import safe_text
from esper.observatory.report import web_file
from esper.observatory.runs import find_runs, fingerprint, is_run, summarize_run
from esper.observatory.summaries import compare_curves

POLL_RUN, POLL_LIST = 0.5, 2.0  # seconds between checks of one run, and of the whole folder
HEARTBEAT = 15.0
MAX_STREAMS, MAX_ANSWERS, MAX_COMPARED, MAX_CONNECTIONS = 128, 32, 8, 512
MAX_HEAD = 16_384  # bytes of a request before its body
REQUEST_SECONDS, MAX_INCOMPLETE = 10.0, 256  # for requests that have not arrived completely
MAX_PORT = 65_535
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


def serve(folder: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Show the runs of a folder on a web page until Ctrl-C.

    `say` gets the address and, if `host` is reachable from other machines, the token. Raises
    ConfigError if there is no such folder, or the address cannot be used.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the one that holds your runs")
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"port must be from 0 to {MAX_PORT}, got {port}")
    bound = _bind(host, port)
    token = None if _is_loopback(host) else secrets.token_urlsafe(24)
    hosts = LOOPBACK | {host.lower(), socket.gethostname().lower()}
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{bound.getsockname()[1]}/"
    say(f"runs of {safe_text(folder)} on {address} (stop with Ctrl-C)")
    if token is not None:
        say(f"token    {token}")
    config = uvicorn.Config(
        make_app(folder, hosts, token),
        log_level="critical",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        http=ImpatientProtocol,
        loop="asyncio",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=MAX_HEAD,
    )
    with bound:
        uvicorn.Server(config).run(sockets=[bound])


class ImpatientProtocol(H11Protocol):
    """Closes connections whose request is not complete in time, and the oldest of them as soon as
    there are too many, so that they cannot keep others out."""

    waiting: ClassVar[dict["ImpatientProtocol", asyncio.TimerHandle]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.waiting) >= MAX_INCOMPLETE:
            next(iter(self.waiting)).expire()
        self.watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.forget()
        super().connection_lost(exc)

    def watch(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self.forget()
        elif self not in self.waiting:
            self.waiting[self] = self.loop.call_later(REQUEST_SECONDS, self.expire)

    def forget(self) -> None:
        if (timer := self.waiting.pop(self, None)) is not None:
            timer.cancel()

    def expire(self) -> None:
        self.forget()
        self.transport.abort()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"cannot serve on {host}, port {port}: {getattr(error, 'strerror', None) or error}; "
            "choose another with --port or --host"
        ) from error
    return bound


def make_app(root: Path, hosts: frozenset[str], token: str | None = None) -> AccessControl:
    """The application with access control. Nothing outside the folder `root` is read."""
    api = RunApi(root)

    async def page(request: Request) -> Response:
        return HTMLResponse(web_file("index.html"))

    async def login(request: Request) -> Response:
        if request.method != "POST":
            return HTMLResponse(web_file("login.html"))
        form = parse_qs((await request.body()).decode("utf-8", "replace"))
        offered = form.get("token", [""])[0]
        if not is_token(offered, token):
            return HTMLResponse(web_file("login.html"), 401)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, offered, httponly=True, samesite="strict")
        return answer

    async def http_error(request: Request, error: HTTPException) -> Response:
        return _json(json.dumps({"error": error.detail}).encode(), error.status_code)

    async def no_run(request: Request, error: ConfigError) -> Response:
        return _json(b'{"error": "there is no such run"}', 404)

    routes = [
        Route("/", page),
        Route("/login", login, methods=["GET", "POST"]),
        Mount("/static", StaticFiles(directory=Path(__file__).parent / "web")),
        Route("/api/runs", api.runs),
        Route("/api/run", api.run),
        Route("/api/compare", api.compare),
        Route("/api/live", api.live),
    ]
    handlers: dict[Any, Any] = {HTTPException: http_error, ConfigError: no_run}
    return AccessControl(Starlette(routes=routes, exception_handlers=handlers), hosts, token)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


class RunApi:
    """Answers requests about the runs of a folder.

    An answer is cached until the files behind it change, so many viewers of one run cost hardly
    more than one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.streams = 0
        self._answers: OrderedDict[Any, bytes] = OrderedDict()
        self._marks: dict[Path | None, tuple[float, str]] = {}
        # One lock: Python threads would not compute two answers faster than one after the other.
        self._lock = asyncio.Lock()

    async def runs(self, request: Request) -> Response:
        return await self._answer(("runs",), await self._mark(None), self._list)

    async def run(self, request: Request) -> Response:
        folder = self._folder(request.query_params.get("id", ""))
        round_, env = _integer(request, "round"), _integer(request, "env") or 0

        def make() -> Any:
            return describe(folder, self.root, round_=round_, env=env)

        return await self._answer(("run", folder, round_, env), await self._mark(folder), make)

    async def compare(self, request: Request) -> Response:
        folders = [self._folder(id_) for id_ in request.query_params.getlist("id")]
        if not 0 < len(folders) <= MAX_COMPARED:
            raise HTTPException(400, f"up to {MAX_COMPARED} runs can be compared")

        def make() -> Any:
            runs = [summary_as_dict(summarize_run(folder, self.root)) for folder in folders]
            return {"runs": runs, **compare_curves(folders, [run["name"] for run in runs])}

        mark = " ".join([await self._mark(folder) for folder in folders])
        return await self._answer(("compare", *folders), mark, make)

    async def live(self, request: Request) -> Response:
        """Server-sent events: `change` whenever the run changes, or without an id any run."""
        id_ = request.query_params.get("id")
        folder = None if id_ is None else self._folder(id_)
        if self.streams >= MAX_STREAMS:
            raise HTTPException(503, "too many pages are open")
        self.streams += 1
        return _CountedStream(self, self._changes(folder))

    async def _changes(self, folder: Path | None) -> AsyncIterator[bytes]:
        before, sent = await self._mark(folder), monotonic()
        yield b": hello\n\n"
        while True:
            await asyncio.sleep(POLL_RUN)
            mark = await self._mark(folder)
            if mark != before:
                before, sent = mark, monotonic()
                yield b"event: change\ndata: {}\n\n"
            elif monotonic() - sent > HEARTBEAT:
                sent = monotonic()
                yield b": still here\n\n"

    def _folder(self, id_: str) -> Path:
        """The run with this id. Raises 404 for anything that is not a run below the root."""
        parts = [] if id_ == "." else id_.split("/")
        folder = self.root.joinpath(*parts)
        try:
            inside = (
                not any(part in ("", ".", "..") for part in parts)
                and folder.resolve().is_relative_to(self.root)
                and is_run(folder)
            )
        except (OSError, ValueError):
            inside = False  # too long, with a null byte, or otherwise not a file name
        if not inside:
            raise HTTPException(404, "there is no such run")
        return folder

    def _list(self) -> Any:
        return [summary_as_dict(run) for run in find_runs(self.root)]

    async def _mark(self, folder: Path | None) -> str:
        """The fingerprint of one run, or of the list of all; checked at most once per interval."""
        async with self._lock:
            checked, mark = self._marks.get(folder, (float("-inf"), ""))
            if monotonic() - checked > (POLL_LIST if folder is None else POLL_RUN):
                mark = await run_in_threadpool(self._read_mark, folder)
                self._marks[folder] = (monotonic(), mark)
                if len(self._marks) > 4 * MAX_STREAMS:
                    self._marks.clear()
            return mark

    def _read_mark(self, folder: Path | None) -> str:
        if folder is not None:
            return fingerprint(folder)
        return hashlib.sha256(json.dumps(self._list()).encode()).hexdigest()

    async def _answer(self, question: Any, mark: str, make: Callable[[], Any]) -> Response:
        async with self._lock:
            cached = (question, mark)
            if cached not in self._answers:
                value = await run_in_threadpool(make)
                self._answers[cached] = json.dumps(value, allow_nan=False).encode()
                while len(self._answers) > MAX_ANSWERS:
                    self._answers.popitem(last=False)
            self._answers.move_to_end(cached)
            return _json(self._answers[cached])


class _CountedStream(StreamingResponse):
    """A stream that leaves the count however it ends, even before it has begun."""

    def __init__(self, api: RunApi, changes: AsyncIterator[bytes]) -> None:
        super().__init__(changes, media_type="text/event-stream")
        self.api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.api.streams -= 1


def _integer(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise HTTPException(400, f"{name} must be a whole number")
    return int(text)
