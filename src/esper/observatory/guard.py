"""What stands between a web page of ours and everybody else: who may ask, for what, how much.

An ASGI application around another. The page is read-only and meant for the person at this machine;
a page of another site in the same browser, a name that was made to point here, and a neighbour on
the network are kept out.
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "esper_token"
MOST_BODY = 4096  # bytes; only the login has one
MOST_PATH = 8192
OPEN = ("/login", "/static/")  # seen by everybody: the form, and what is public anyway
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """`hosts` are the names under which the page may be asked for; any address is one, since only
    names can be made to point elsewhere. With a `token` nothing is told without it."""

    def __init__(self, app: App, hosts: frozenset[str], token: str | None = None) -> None:
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *ours]
            await send(message)

        refusal = self.refusal(scope)
        if refusal is not None and refusal[0] == 401 and scope["path"] == "/":
            # Whoever opens the page without the token is asked for it.
            scope, refusal = {**scope, "path": "/login", "raw_path": b"/login"}, None
        if refusal is not None:
            await _answer(send_guarded, *refusal)
        else:
            await self.app(scope, receive, send_guarded)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """(status, sentence) for a request that is not answered."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        host = headers.get("host", [])
        if len(host) != 1 or not is_known(host[0], self.hosts):
            return 421, "this server is not the one that you asked for"
        path, method = scope["path"], scope["method"]
        if method not in ("GET", "HEAD") and (method, path) != ("POST", "/login"):
            return 405, "this server is only read"
        origins = headers.get("origin", [])
        if any(origin != f"http://{host[0]}" for origin in origins):
            return 403, "other sites may not ask"
        if headers.get("sec-fetch-site") == ["cross-site"] and not _navigates(headers):
            return 403, "other sites may not ask"
        if len(path) + len(scope["query_string"]) > MOST_PATH:
            return 414, "the address is too long"
        if _body_size(headers) > (MOST_BODY if method == "POST" else 0):
            return 413, "the request is too large"
        if self.token is not None and not path.startswith(OPEN) and not self._knows(headers):
            return 401, "the token is missing or wrong"
        return None

    def _knows(self, headers: dict[str, list[str]]) -> bool:
        offered = [
            value.removeprefix("Bearer ")
            for value in headers.get("authorization", [])
            if value.startswith("Bearer ")
        ]
        for cookies in headers.get("cookie", []):
            for cookie in cookies.split(";"):
                name, _, value = cookie.strip().partition("=")
                if name == COOKIE:
                    offered.append(value)
        return any(is_token(value, self.token) for value in offered[:4])


def is_token(offered: str, token: str | None) -> bool:
    return token is not None and hmac.compare_digest(offered.encode(), token.encode())


def is_known(host: str, hosts: frozenset[str]) -> bool:
    """Whether a Host header names this server: one of `hosts`, or any address."""
    name, port = host.rsplit(":", 1) if ":" in host and not host.endswith("]") else (host, "")
    if port and not port.isdecimal():
        return False
    name = name.lower()
    if name in hosts:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _navigates(headers: dict[str, list[str]]) -> bool:
    """A link to the page that somebody clicked, wherever it stood."""
    return headers.get("sec-fetch-mode") == ["navigate"]


def _body_size(headers: dict[str, list[str]]) -> int:
    if "transfer-encoding" in headers:
        return MOST_BODY + 1
    sizes = headers.get("content-length", ["0"])
    return int(sizes[0]) if len(sizes) == 1 and sizes[0].isdecimal() else MOST_BODY + 1


async def _answer(send: Send, status: int, sentence: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": sentence.encode()})
