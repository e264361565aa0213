"""The web page of a folder of runs: its data as JSON, and word when something changes."""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from esper.leyline import ConfigError
from esper.observatory.beside import side_by_side
from esper.observatory.described import describe, shown_line
from esper.observatory.guard import COOKIE, Guard, Receive, Scope, Send, is_token
from esper.observatory.report import web_file
from esper.observatory.runs import find_runs, is_run, look_at, stamp

LOOK = 0.5  # seconds between looks at a run that somebody watches
LOOK_AROUND = 2.0  # and at the whole folder
HEARTBEAT = 15.0
MOST_STREAMS, MOST_ANSWERS, MOST_COMPARED = 128, 32, 8
STATIC = {
    "app.js": "text/javascript",
    "views.js": "text/javascript",
    "evaluation.js": "text/javascript",
    "style.css": "text/css",
    "vendor/htm-preact.umd.js": "text/javascript",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
}


def make_app(root: Path, hosts: frozenset[str], token: str | None = None) -> Guard:
    """The guarded application. `root` is the folder that is shown; nothing outside it is read."""
    shop = Shop(root)

    async def page(request: Request) -> Response:
        return HTMLResponse(web_file("index.html"))

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            raise HTTPException(404, "there is no such file")
        return Response(web_file(name), media_type=STATIC[name])

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

    routes = [
        Route("/", page),
        Route("/login", login, methods=["GET", "POST"]),
        Route("/static/{name:path}", static),
        Route("/api/runs", shop.runs),
        Route("/api/run", shop.run),
        Route("/api/compare", shop.compare),
        Route("/api/live", shop.live),
    ]
    handlers: dict[Any, Any] = {HTTPException: _said, ConfigError: _not_there}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), hosts, token)


async def _said(request: Request, error: HTTPException) -> Response:
    return _json({"error": error.detail}, error.status_code)


async def _not_there(request: Request, error: ConfigError) -> Response:
    return _json({"error": "there is no such run"}, 404)


def _json(value: Any, status: int = 200) -> Response:
    return _as_json(json.dumps(value, allow_nan=False).encode(), status)


def _as_json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


class Shop:
    """Answers about the runs of a folder; equal questions are answered once.

    An answer is kept until the files that it is made from change, so many who look at one run cost
    hardly more than one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.streams = 0
        self._answers: OrderedDict[Any, bytes] = OrderedDict()
        self._stamps: dict[Path | None, tuple[float, str]] = {}
        self._locks: dict[Any, asyncio.Lock] = {}

    async def runs(self, request: Request) -> Response:
        mark = await self._stamp(None)
        return _as_json(await self._answer(("runs",), mark, self._list))

    async def run(self, request: Request) -> Response:
        folder = self._folder(request.query_params.get("id", ""))
        round_, env = _whole(request, "round"), _whole(request, "env") or 0

        def told() -> Any:
            return describe(folder, self.root, round_=round_, env=env)

        mark = await self._stamp(folder)
        return _as_json(await self._answer(("run", folder, round_, env), mark, told))

    async def compare(self, request: Request) -> Response:
        folders = [self._folder(id_) for id_ in request.query_params.getlist("id")]
        if not 0 < len(folders) <= MOST_COMPARED:
            raise HTTPException(400, f"up to {MOST_COMPARED} runs can be compared")

        def told() -> Any:
            lines = [shown_line(look_at(folder, self.root)) for folder in folders]
            return {"lines": lines, **side_by_side(folders, [line["name"] for line in lines])}

        mark = " ".join([await self._stamp(folder) for folder in folders])
        return _as_json(await self._answer(("compare", *folders), mark, told))

    async def live(self, request: Request) -> Response:
        """Server-sent events: `change` whenever the run, or without an id any run, does."""
        id_ = request.query_params.get("id")
        folder = None if id_ is None else self._folder(id_)
        if self.streams >= MOST_STREAMS:
            raise HTTPException(503, "too many are watching")
        self.streams += 1
        return _Counted(self, self._changes(folder))

    async def _changes(self, folder: Path | None) -> AsyncIterator[bytes]:
        """Until the one who listens has gone, when the server ends it."""
        before, said = await self._stamp(folder), monotonic()
        yield b": hello\n\n"
        while True:
            await asyncio.sleep(LOOK)
            mark = await self._stamp(folder)
            if mark != before:
                before, said = mark, monotonic()
                yield b"event: change\ndata: {}\n\n"
            elif monotonic() - said > HEARTBEAT:
                said = monotonic()
                yield b": still here\n\n"

    def _folder(self, id_: str) -> Path:
        """The run with this id. Raises 404 for anything that is no run below the root."""
        parts = [] if id_ == "." else id_.split("/")
        folder = self.root.joinpath(*parts)
        try:
            inside = (
                not any(part in ("", ".", "..") for part in parts)
                and folder.resolve().is_relative_to(self.root)
                and is_run(folder)
            )
        except (OSError, ValueError):
            inside = False  # too long, with a zero in it, or otherwise no name of a file
        if not inside:
            raise HTTPException(404, "there is no such run")
        return folder

    def _list(self) -> Any:
        return [shown_line(line) for line in find_runs(self.root)]

    async def _stamp(self, folder: Path | None) -> str:
        """Of one run, or of the list of all; looked up anew if the last look is some time ago."""
        async with self._lock(("stamp", folder)):
            looked, mark = self._stamps.get(folder, (float("-inf"), ""))
            if monotonic() - looked > (LOOK_AROUND if folder is None else LOOK):
                mark = await run_in_threadpool(self._look, folder)
                self._stamps[folder] = (monotonic(), mark)
                if len(self._stamps) > 4 * MOST_STREAMS:
                    self._stamps.clear()
            return mark

    def _look(self, folder: Path | None) -> str:
        if folder is not None:
            return stamp(folder)
        return hashlib.sha256(json.dumps(self._list()).encode()).hexdigest()

    async def _answer(self, question: Any, mark: str, told: Callable[[], Any]) -> bytes:
        async with self._lock(question):
            kept = (question, mark)
            if kept not in self._answers:
                value = await run_in_threadpool(told)
                self._answers[kept] = json.dumps(value, allow_nan=False).encode()
                while len(self._answers) > MOST_ANSWERS:
                    self._answers.popitem(last=False)
            self._answers.move_to_end(kept)
            return self._answers[kept]

    def _lock(self, name: Any) -> asyncio.Lock:
        if len(self._locks) > 8 * MOST_STREAMS:
            self._locks = {key: lock for key, lock in self._locks.items() if lock.locked()}
        return self._locks.setdefault(name, asyncio.Lock())


class _Counted(StreamingResponse):
    """A stream that is taken off the count however it ends, also before it has begun."""

    def __init__(self, shop: Shop, changes: AsyncIterator[bytes]) -> None:
        super().__init__(changes, media_type="text/event-stream")
        self.shop = shop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.shop.streams -= 1


def _whole(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise HTTPException(400, f"{name} is a whole number")
    return int(text)
