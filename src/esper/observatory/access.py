"""Access control of the web page: an ASGI application around another.

The page is read-only and meant for the user of this machine. Requests from other sites in the same
browser, from host names that an attacker has pointed here, and from other machines are refused.
"""

import hmac
import ipaddress

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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

    def __init__(self, app: ASGIApp, hosts: frozenset[str], token: str | None = None) -> None:
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app, refusal = self.app, self.refusal(scope)
        if refusal is not None and refusal[0] == 401 and scope["path"] == "/":
            # Without the token, the page asks for it.
            scope = {**scope, "path": "/login", "raw_path": b"/login"}
        elif refusal is not None:
            status, reason = refusal
            app = PlainTextResponse(reason, status, headers={"connection": "close"})
        await app(scope, receive, send_with_headers)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """(status, reason) for a request that is refused."""
        headers = Headers(scope=scope)
        host = headers.getlist("host")
        if len(host) != 1 or not is_own_host(host[0], self.hosts):
            return 421, "the host name is not one of this server"
        path, method = scope["path"], scope["method"]
        if method not in ("GET", "HEAD") and (method, path) != ("POST", "/login"):
            return 405, "this server is read-only"
        foreign = any(origin != f"http://{host[0]}" for origin in headers.getlist("origin"))
        navigates = headers.get("sec-fetch-mode") == "navigate"  # the user followed a link
        if foreign or (headers.get("sec-fetch-site") == "cross-site" and not navigates):
            return 403, "requests from other sites are refused"
        if len(path) + len(scope["query_string"]) > MAX_PATH:
            return 414, "the address is too long"
        if _body_size(headers) > (MAX_BODY if method == "POST" else 0):
            return 413, "the request is too large"
        if self.token is not None and not path.startswith(PUBLIC) and not self._has_token(headers):
            return 401, "the token is missing or wrong"
        return None

    def _has_token(self, headers: Headers) -> bool:
        offered = [cookie_parser(text).get(COOKIE, "") for text in headers.getlist("cookie")]
        offered += [text.removeprefix("Bearer ") for text in headers.getlist("authorization")]
        return any(is_token(text, self.token) for text in offered[:4])


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


def _body_size(headers: Headers) -> int:
    if "transfer-encoding" in headers:
        return MAX_BODY + 1
    sizes = headers.getlist("content-length") or ["0"]
    return int(sizes[0]) if len(sizes) == 1 and sizes[0].isdecimal() else MAX_BODY + 1
