"""`esper serve`: a socket, a token if it is open to others, and the server on it."""

import ipaddress
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from esper.leyline import ConfigError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
MOST_CONNECTIONS = 256
LONGEST_HEAD = 16_384  # bytes of a request before its body


def serve(folder: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Show the runs of a folder on a web page until Ctrl-C.

    `say` is told the address and, if `host` is not this machine alone, the token. Raises
    ConfigError, in a sentence, for what cannot be served, and without the libraries.
    """
    try:
        import uvicorn

        from esper.observatory.server import make_app
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the web page needs {error.name}; install it with: pip install 'esper-grow[serve]'"
        ) from None
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the one that holds your runs")
    bound = _bind(host, port)
    token = None if _is_loopback(host) else secrets.token_urlsafe(24)
    hosts = LOOPBACK | {host.lower(), socket.gethostname().lower()}
    shown = f"[{host}]" if ":" in host else host
    say(f"runs of {folder} on http://{shown}:{bound.getsockname()[1]}/ (Ctrl-C ends)")
    if token is not None:
        say(f"token    {token}")
    config = uvicorn.Config(
        make_app(folder, hosts, token),
        log_level="critical",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        http="h11",
        loop="asyncio",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=LONGEST_HEAD,
    )
    with bound:
        uvicorn.Server(config).run(sockets=[bound])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot serve on {host}, port {port}: {getattr(error, 'strerror', None) or error}; "
            "choose another with --port or --host"
        ) from error
    return bound
