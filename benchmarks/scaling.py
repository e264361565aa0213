"""What a round of `esper train ppo --ray` costs, and what that means for 100 and 1,000 nodes.

    python benchmarks/scaling.py [--envs 8] [--steps 6] [--actors 4] [--calls 50] [--costs FILE]

First it measures, on this machine and in processor seconds, so that others on it do not matter: a
step of a worker's hosts; what the driver spends on acting, learning and recording, for one
worker's environments and for four times as many; what it spends on a message to an actor, with the
messages of a real worker; the bytes of these; what the object store takes. Then it simulates
rounds of many workers from these figures: `simulate` is deterministic, and all that is assumed is
in `Assumed`. `--costs` takes the figures of an earlier run instead of measuring. The last line is
one JSON object; what was measured and what is projected stand apart in it.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from esper.api.training import one_thread, train_ppo
from esper.simic.training import round_log
from esper.simic.training.config import load_config
from esper.simic.training.env_specs import ShardSpec
from esper.simic.training.workers import ShardServer
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.tasks import find_task

NODES = (1, 10, 100, 1000)
STEPS = 30  # of an episode on digits
HEAVY = 100


@dataclass(frozen=True)
class Costs:
    """Measured. Seconds are of a processor; `_fixed` is what a round costs in any case, `_per_step`
    what it costs more for each step of each environment.

    host_step      an epoch of a worker's hosts, all that belongs to it included
    host_spread    its standard deviation from step to step, as a share of it
    act, update, record   of the driver: deciding, learning, keeping what happened
    message        of the driver: to send an action to an actor and to receive what came of it
    """

    envs: int
    host_step: float
    host_spread: float
    act_fixed: float
    act_per_step: float
    update_fixed: float
    update_per_step: float
    record_fixed: float
    record_per_step: float
    message: float
    bytes_sent: int
    bytes_received: int
    bytes_first: int
    data_bytes: int
    put_seconds: float


@dataclass(frozen=True)
class Assumed:
    """Not measured: what nodes have, and the wire between them."""

    cpus: int = 8
    latency: float = 0.0005
    bytes_per_second: float = 125e6


# --- measuring -----------------------------------------------------------------------------------


def driver_costs(envs: int, steps: int) -> dict[str, float]:
    """Processor seconds of the second round of a run, by phase: the first pays for what is loaded
    on first use."""
    wall = round_log.time.perf_counter
    round_log.time.perf_counter = time.process_time
    try:
        with tempfile.TemporaryDirectory() as name:
            flags = {"envs": envs, "growth.steps": steps, "rounds": 2, "growth.population": "fused"}
            train_ppo(load_config(flags=flags), Path(name) / "run")
            lines = (Path(name) / "run" / "timings.jsonl").read_text().splitlines()
    finally:
        round_log.time.perf_counter = wall
    row = json.loads(lines[-1])
    return {
        "act": row["seconds.policy"],
        "update": row["seconds.update"],
        "record": row["seconds.telemetry"] + row["seconds.checkpoint"],
    }


def worker_costs(envs: int, steps: int) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """What a worker does in a round, with the messages of it."""
    task = find_task("digits")
    config = load_config(flags={"envs": envs, "growth.steps": steps, "growth.population": "fused"})
    data = task.load(data_root())
    server, seconds, messages = (
        ShardServer(ShardSpec(config, task, data, tuple(range(envs)))),
        [],
        [],
    )
    for round_ in range(2):
        call: tuple[str, Any] = ("reset", round_)
        seconds.clear()
        messages.clear()
        for step in range(steps + 1):
            began = time.process_time()
            kind, answer = server.answer(*call)
            assert kind == "done", answer
            messages.append((call, (kind, answer)))
            if step:
                seconds.append(time.process_time() - began)
            # Everybody waits: what hosts cost with seeds in them is a matter of the policy.
            call = ("step", np.zeros((envs, 4), dtype=np.int64))
    measured = {
        "host_step": fmean(seconds),
        "host_spread": pstdev(seconds) / fmean(seconds),
        "data_bytes": sum(getattr(data, each.name).nbytes for each in fields(DataSplits)),
    }
    return measured, messages


def cluster_costs(messages: list[tuple[Any, Any]], actors: int, calls: int) -> dict[str, Any]:
    """Of messages like these with actors that do nothing else, and of the object store."""
    import ray
    from ray import cloudpickle

    from esper.ray import Cluster  # first: it makes Ray quiet

    class Echo:
        def __init__(self, reply: Any) -> None:
            self.reply = reply

        def answer(self, name: str, argument: Any) -> Any:
            return self.reply

    first, later = messages[0], messages[len(messages) // 2]
    data = find_task("digits").load(data_root())
    with Cluster() as cluster:
        began = time.process_time()
        cluster._reference(data)
        put = time.process_time() - began
        echo = ray.remote(Echo).options(num_cpus=0)
        echoes = [echo.remote(later[1]) for _ in range(actors)]
        ray.get([actor.answer.remote(*later[0]) for actor in echoes])
        began = time.process_time()
        for _ in range(calls):
            due = [actor.answer.remote(*later[0]) for actor in echoes]
            for reference in due:
                ray.get(reference)
        message = (time.process_time() - began) / (actors * calls)
    return {
        "message": message,
        "put_seconds": put,
        "bytes_first": len(cloudpickle.dumps(first)),
        "bytes_sent": len(cloudpickle.dumps(later[0])),
        "bytes_received": len(cloudpickle.dumps(later[1])),
    }


def measure(envs: int, steps: int, actors: int, calls: int) -> Costs:
    few, many = driver_costs(envs, steps), driver_costs(4 * envs, steps)
    found: dict[str, Any] = {"envs": envs}
    for name in few:
        slope = max(0.0, (many[name] - few[name]) / (3 * envs * steps))
        found[f"{name}_per_step"] = slope
        found[f"{name}_fixed"] = max(0.0, few[name] - slope * envs * steps)
    of_worker, messages = worker_costs(envs, steps)
    return Costs(**found, **of_worker, **cluster_costs(messages, actors, calls))


# --- projecting ----------------------------------------------------------------------------------


def simulate(costs: Costs, assumed: Assumed, nodes: int, rounds: int = 3) -> dict[str, float]:
    """Rounds of `nodes` with a worker on each CPU: in each step all workers train their hosts, each
    for as long as it happens to take; the driver takes their answers one after another, as they
    arrive, then acts for all; then it learns. Times of steps are drawn once and for all."""
    workers = nodes * assumed.cpus
    rng = np.random.default_rng(0)
    env_steps = workers * costs.envs * STEPS
    wire = assumed.latency + (costs.bytes_sent + costs.bytes_received) / assumed.bytes_per_second
    acting = costs.act_fixed / STEPS + costs.act_per_step * workers * costs.envs
    spent = dict.fromkeys(("hosts", "messages", "act", "update", "record"), 0.0)
    for _ in range(rounds):
        for _ in range(STEPS):
            took = costs.host_step * np.maximum(0.1, rng.normal(1, costs.host_spread, workers))
            free = 0.0
            for arrival in np.sort(took + wire):
                free = max(free, arrival) + costs.message
            spent["hosts"] += float(took.max()) + wire
            spent["messages"] += free - float(took.max()) - wire
            spent["act"] += acting
        spent["update"] += costs.update_fixed + costs.update_per_step * env_steps
        spent["record"] += costs.record_fixed + costs.record_per_step * env_steps
    per_round = {name: seconds / rounds for name, seconds in spent.items()}
    seconds = sum(per_round.values())
    return {
        "workers": workers,
        "env_steps_per_round": env_steps,
        "seconds_per_round": seconds,
        "env_steps_per_second": env_steps / seconds,
        "efficiency": env_steps / seconds / (workers * costs.envs / costs.host_step),
        "node_hours_per_million_steps": nodes * 1e6 * seconds / env_steps / 3600,
        **{f"share.{name}": each / seconds for name, each in per_round.items()},
        "messages_bytes_per_second": env_steps
        / costs.envs
        * (costs.bytes_sent + costs.bytes_received)
        / seconds,
        "data_to_all_nodes_seconds": nodes * costs.data_bytes / assumed.bytes_per_second,
    }


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: float(f"{value:.3g}") if isinstance(value, float) else value
        for name, value in values.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=8, help="of a worker")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--costs", type=Path, help="JSON of an earlier run")
    flags = vars(parser.parse_args())
    earlier = flags.pop("costs")
    with one_thread():
        if earlier is None:
            costs = measure(**flags)
        else:
            costs = Costs(**json.loads(earlier.read_text().splitlines()[-1])["measured"])
    assumed = Assumed()
    # Hosts that are worth many machines: the driver has as much to do as before.
    heavy = replace(costs, host_step=HEAVY * costs.host_step)
    projected, of_heavy = (
        {str(nodes): rounded(simulate(each, assumed, nodes)) for nodes in NODES}
        for each in (costs, heavy)
    )
    for nodes, row in projected.items():
        print(nodes, row)
    result = {
        "measured": rounded(asdict(costs)),
        "assumed": asdict(assumed),
        "projected": projected,
        f"projected_for_hosts_{HEAVY}_times_as_heavy": of_heavy,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
