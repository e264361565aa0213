"""How fast the web page opens a long run, and what it costs a run to be watched.

    python benchmarks/views.py [--rows 1000000] [--clients 50] [--repeats 5] [--folder /tmp]

Writes a training run with that many rows, serves it with `esper serve`, and measures the time to
the page and to its data (by request, and in Chromium if there is one), and the server's memory.
Then a process writes another run, a row after some 50 ms of arithmetic, in turns alone and watched
by so many clients, each of which requests the run whenever it changes. The last line is one JSON
object. It has two costs for the writer, as medians of the repeats: `cost` is its CPU time relative
to that alone, which also holds the noise of a busy machine; `cost_of_rows` is the additional CPU
time of writing rows, as a share of all its CPU time.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from esper.observatory.run_directory import RunDirectory

MODULES = ("blocks.0", "blocks.1", "blocks.2")
ENVS, STEPS, WRITTEN = 16, 30, 60
ESPER = [sys.executable, "-c", "from esper.cli import main; main()"]


def row(round_: int, env: int, step: int) -> dict[str, Any]:
    """A row of metrics with the columns that a run on digits has."""
    row: dict[str, Any] = {"round": round_, "kind": "step", "env": env, "step": step}
    row |= {"op": "WAIT", "slot": None, "blueprint": None, "blend": None, "train_loss": 0.2338428}
    row |= {"train_score": 93.41666, "val_loss": 0.3436757, "val_score": 60.0 + step}
    row |= {"plateau_epochs": 1, "host_stabilized": False, "rolled_back": False, "params": 986}
    row |= {"macs": 6160, "train_macs": 25055712}
    for module in MODULES:
        row |= {f"{module}.stage": "BLENDING", f"{module}.blueprint": "conv_light"}
        row |= {f"{module}.alpha": 0.4, f"{module}.contribution": 1.01010101}
        row |= {f"{module}.gradient_ratio": 0.0146986}
    return row


def write_long_run(run: Path, rows: int) -> int:
    """A finished training run of about so many rows; gives its size in bytes."""
    rounds = max(1, rows // (ENVS * (STEPS + 1)))
    config = {"task": "digits", "rounds": rounds, "envs": ENVS, "steps": STEPS, "key": 0}
    # One round's text with a mark for its number: a million dictionaries would take minutes.
    steps = [row(-7, env, step) for step in range(STEPS + 1) for env in range(ENVS)]
    mean = {"round": -7, "kind": "round", "return": 0.5, "val_score": 90.0, "params": 900.0}
    text = "".join(json.dumps(row) + "\n" for row in [*steps, mean]).encode()
    with RunDirectory.create(run, config), (run / "metrics.jsonl").open("wb") as file:
        for number in range(rounds):
            file.write(text.replace(b'"round": -7', f'"round": {number}'.encode()))
    return (run / "metrics.jsonl").stat().st_size


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[int, int]]:
    """(port, process id) of a server of the folder."""
    process = subprocess.Popen(
        [*ESPER, "serve", str(folder), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline().split(":")[-1].split("/")[0]), process.pid
    finally:
        process.terminate()
        process.wait()


def get(port: int, path: str) -> tuple[float, int]:
    """(seconds, bytes) of an answer."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, answer.status
    return time.perf_counter() - began, len(body)


def memory_mb(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def in_browser(port: int) -> dict[str, float] | None:
    """Seconds to the first paint and to the data of the long run, or None without a browser."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ModuleNotFoundError:
        return None
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(
                executable_path="/usr/bin/chromium", args=["--no-sandbox"]
            )
        except Error:
            return None
        page = browser.new_page()
        began = time.perf_counter()
        page.goto(f"http://127.0.0.1:{port}/#run=long")
        page.get_by_role("heading", name="Policy").wait_for()
        data = time.perf_counter() - began
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        browser.close()
    return {"first_paint": paint / 1000, "data": data}


# --- the writer ----------------------------------------------------------------------------------


def write_slowly(run: str, pipe: Any) -> None:
    """Sixty rows, each after some arithmetic; sends CPU seconds: of all, of the rows alone."""
    values = np.random.default_rng(0).standard_normal((260, 260))
    with RunDirectory.create(Path(run), {"task": "digits", "steps": WRITTEN}, overwrite=True) as to:
        began, rows = time.process_time(), 0.0
        for step in range(WRITTEN):
            for _ in range(40):
                np.tanh(values @ values)
            before = time.thread_time()
            to.metrics(row(0, 0, step))
            rows += time.thread_time() - before
        pipe.send((time.process_time() - began, rows))


async def watch_and_ask(port: int, path: str) -> None:
    """What a page does: listen, and ask for the run whenever it has changed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /api/live?id=live HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    while line := await reader.readline():
        if line.startswith(b"event: change"):
            asker, asking = await asyncio.open_connection("127.0.0.1", port)
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
            asking.write(head.encode())
            await asker.read()
            asking.close()


@contextlib.contextmanager
def clients(port: int, count: int) -> Iterator[None]:
    loop = asyncio.new_event_loop()

    async def all_of_them() -> None:
        await asyncio.gather(*(watch_and_ask(port, "/api/run?id=live") for _ in range(count)))

    task = loop.create_task(all_of_them())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(1)
    yield
    loop.call_soon_threadsafe(task.cancel)
    thread.join()


def writer_seconds(run: Path) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=write_slowly, args=(str(run), theirs))
    process.start()
    seconds = ours.recv()
    process.join()
    return seconds


def cost_to_writer(folder: Path, port: int, count: int, repeats: int) -> dict[str, Any]:
    writer_seconds(folder / "live")  # there must be a run before anybody can watch it
    alone, watched = [], []
    for _ in range(repeats):
        alone.append(writer_seconds(folder / "live"))
        with clients(port, count):
            watched.append(writer_seconds(folder / "live"))
    pairs = list(zip(alone, watched, strict=True))
    ratios = [b / a - 1 for (a, _), (b, _) in pairs]
    return {
        "alone_cpu_seconds": statistics.median(a for a, _ in alone),
        "watched_cpu_seconds": statistics.median(b for b, _ in watched),
        "cost": statistics.median(ratios),
        "costs": [round(ratio, 4) for ratio in sorted(ratios)],
        "cost_of_rows": statistics.median((b - a) / of_all for (of_all, a), (_, b) in pairs),
    }


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        size = write_long_run(folder / "long", given.rows)
        with served(folder) as (port, process):
            idle = memory_mb(process)
            page, _ = get(port, "/")
            data, length = get(port, "/api/run?id=long")
            other, _ = get(port, "/api/run?id=long&round=3&env=5")
            browser = in_browser(port)
            result = {
                "rows": given.rows,
                "run_mb": round(size / 1e6),
                "page_seconds": page,
                "data_seconds": data,
                "other_environment_seconds": other,
                "data_kb": length / 1000,
                "browser": browser,
                "server_mb": {"idle": idle, "after": memory_mb(process)},
                "clients": given.clients,
                "writer": cost_to_writer(folder, port, given.clients, given.repeats),
            }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
