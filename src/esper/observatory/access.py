"""Access control of the web page: an ASGI application around another.

The page is read-only and meant for the user of this machine. Requests from other sites in the same
browser, from host names that an attacker has pointed here, and from other machines are refused.
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
MAX_BODY = 4096  # bytes; only the login has a body
MAX_PATH = 8192
PUBLIC = ("/login", "/static/")  # served without a token
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


class AccessControl:
    """`hosts` are the accepted host names; IP addresses are always accepted, because only names can
    be pointed elsewhere. With a `token`, requests without it are refused."""

    def __init__(self, app: App, hosts: frozenset[str], token: str | None = None) -> None:
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        refusal = self.refusal(scope)
        if refusal is not None and refusal[0] == 401 and scope["path"] == "/":
            # Without the token, the page asks for it.
            scope, refusal = {**scope, "path": "/login", "raw_path": b"/login"}, None
        if refusal is not None:
            await _answer(send_with_headers, *refusal)
        else:
            await self.app(scope, receive, send_with_headers)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """(status, reason) for a request that is refused."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        host = headers.get("host", [])
        if len(host) != 1 or not is_own_host(host[0], self.hosts):
            return 421, "the host name is not one of this server"
        path, method = scope["path"], scope["method"]
        if method not in ("GET", "HEAD") and (method, path) != ("POST", "/login"):
            return 405, "this server is read-only"
        origins = headers.get("origin", [])
        if any(origin != f"http://{host[0]}" for origin in origins):
            return 403, "requests from other sites are refused"
        if headers.get("sec-fetch-site") == ["cross-site"] and not _navigates(headers):
            return 403, "requests from other sites are refused"
        if len(path) + len(scope["query_string"]) > MAX_PATH:
            return 414, "the address is too long"
        if _body_size(headers) > (MAX_BODY if method == "POST" else 0):
            return 413, "the request is too large"
        if self.token is not None and not path.startswith(PUBLIC) and not self._has_token(headers):
            return 401, "the token is missing or wrong"
        return None

    def _has_token(self, headers: dict[str, list[str]]) -> bool:
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


def is_own_host(host: str, hosts: frozenset[str]) -> bool:
    """Whether a Host header names this server: one of `hosts`, or any IP address."""
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
    """Whether the user followed a link to the page."""
    return headers.get("sec-fetch-mode") == ["navigate"]


def _body_size(headers: dict[str, list[str]]) -> int:
    if "transfer-encoding" in headers:
        return MAX_BODY + 1
    sizes = headers.get("content-length", ["0"])
    return int(sizes[0]) if len(sizes) == 1 and sizes[0].isdecimal() else MAX_BODY + 1


async def _answer(send: Send, status: int, reason: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason.encode()})
