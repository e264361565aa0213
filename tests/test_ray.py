"""Many machines: workers on a cluster of Ray give the bits of workers here, whatever is lost."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import ray
import ray.cluster_utils
from ray import cloudpickle

import scaling
from command_support import esper_here
from esper.api.training import choose_devices, resume_ppo
from esper.leyline import ConfigError, EsperError
from esper.proof import EvaluationSettings, evaluate
from esper.proof import evaluation as module
from esper.proof.report import EvaluationReport
from esper.ray import ActorConnection, Cluster
from esper.simic.training.loop import Hooks
from esper.tamiyo.controllers import make_controller
from evaluation_support import Killed, make_arm, narrow_digits, numbers
from training_support import remember_pools, same_run, tiny_run, tiny_task

pytestmark = pytest.mark.heavy
STORE = 100_000_000
# A node that is gone is found after two seconds without a sign of life, not fifteen; workers do not
# make way for other tests.
QUICK = {
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "worker_niceness": 0,
}


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """A cluster of two nodes with a CPU each, which find our modules; more can be added and taken
    away."""
    how = {"num_cpus": 1, "object_store_memory": STORE}
    head = {**how, "include_dashboard": False, "_system_config": QUICK}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(each for each in sys.path if each))
        cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(**how)
        yield cluster
        cluster.shutdown()


@pytest.fixture(scope="module")
def connected(machines: Any) -> Iterator[Any]:
    with Cluster(machines.address) as cluster:
        yield cluster


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """What happens to nodes is known to the others only after a while."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:.0f} seconds"
        time.sleep(0.1)


# --- training ------------------------------------------------------------------------------------


class Weighed(ActorConnection):
    """Remembers how much is sent and received."""

    weights: ClassVar[list[int]] = []

    def send(self, name: str, argument: Any) -> None:
        self.weights.append(len(cloudpickle.dumps((name, argument))))
        super().send(name, argument)

    def receive(self) -> Any:
        reply = super().receive()
        content = cloudpickle.dumps(reply)
        assert b"torch" not in content, "tensors travel"
        self.weights.append(len(content))
        return reply


def test_a_run_is_the_same_on_a_cluster_that_loses_a_node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    machines: Any,
    connected: Any,
) -> None:
    """Begun here and resumed there, and the other way round. The data is stored once, and what
    travels in messages is far smaller."""
    tiny_run(tmp_path / "here", rounds=1)
    pools, steps, stored, put = remember_pools(monkeypatch), [], [], ray.put
    doomed = machines.add_node(num_cpus=1, object_store_memory=STORE)
    # Then each of three workers reserves a CPU, and one of them is that node's.
    wait_until(lambda: ray.available_resources().get("CPU", 0) == 3)
    monkeypatch.setattr("esper.ray.ActorConnection", Weighed)
    monkeypatch.setattr(ray, "put", lambda thing: stored.append(thing) or put(thing))

    def lose(step: int) -> None:
        steps.append(step)
        if len(steps) == 3:
            machines.remove_node(doomed, allow_graceful=False)
            # Its worker lives on for a moment, and would answer.
            wait_until(lambda: ray.cluster_resources()["CPU"] == 2)

    tiny_run(tmp_path / "there", rounds=1, workers=3, cluster=connected, hooks=Hooks(on_step=lose))
    assert [worker.spec.envs for worker in pools[0].workers] == [(0, 1), (2,), (3,)]
    assert "its round is replayed" in caplog.text
    same_run(tmp_path / "here", tmp_path / "there")
    (arrays,) = stored
    assert sum(array.nbytes for array in arrays) > 100_000 > 3 * max(Weighed.weights)
    # Where hosts are trained is no setting of a run.
    resume_ppo(tmp_path / "here", task=tiny_task(), rounds=2, workers=1, cluster=connected)
    resume_ppo(tmp_path / "there", task=tiny_task(), rounds=2)
    assert len(pools[1].workers) == 1
    same_run(tmp_path / "here", tmp_path / "there")


def test_there_is_a_worker_for_each_cpu_unless_somebody_says_otherwise(connected: Any) -> None:
    assert choose_devices(None, None, connected) == ("cpu",) * 2
    assert choose_devices("auto", None, connected) == ("cpu",) * 2
    assert choose_devices(5, None, connected) == ("cpu",) * 5


def test_devices_are_not_for_clusters(tmp_path: Path, connected: Any) -> None:
    with pytest.raises(ConfigError, match="leave out devices"):
        tiny_run(tmp_path / "run", rounds=1, devices=["cpu"], cluster=connected)
    assert not (tmp_path / "run").exists()


# --- evaluation ----------------------------------------------------------------------------------

SCRATCH = EvaluationSettings(("static", "random", "grow"), keys=2, steps=3)
TRAINED = EvaluationSettings(("grow",), keys=1, steps=6, scenario="trained", extra=(0.9,))


def kept(folder: Path) -> dict[str, Any]:
    """All that an evaluation leaves, but the time it took."""
    found: dict[str, Any] = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        content: Any = path.read_bytes()
        if path.suffix == ".jsonl":
            content = [json.loads(line) for line in content.splitlines()]
            for row in content:
                row.pop("cpu_seconds", None)
        found[str(path.relative_to(folder))] = content
    return found


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(SCRATCH, id="scratch", marks=pytest.mark.soak),
        pytest.param(TRAINED, id="trained"),
    ],
)
def test_an_evaluation_is_the_same_on_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connected: Any, settings: EvaluationSettings
) -> None:
    """The same rows in the same order; and it goes on where another left it."""
    monkeypatch.setattr(module, "TUNING_KEYS", 1)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    told: list[list[str]] = [[], []]

    def run(folder: Path, number: int, most: int | None = None, **how: Any) -> EvaluationReport:
        def on_run(label: str, run: Any) -> None:
            told[number].append(f"{label} {run.outcome.key}")
            if len(told[number]) == most:
                raise Killed

        return evaluate(*narrow_digits(), settings, make_arm, folder=folder, on_run=on_run, **how)

    alone = run(here, 0)
    with pytest.raises(Killed):
        run(there, 1, len(told[0]) // 2, workers=connected)
    together = run(there, 1, workers=connected)
    assert told[0] == told[1]
    assert numbers(alone) == numbers(together)
    assert kept(here) == kept(there)


def test_a_network_that_cannot_be_trained_says_why_in_one_sentence(connected: Any) -> None:
    here = os.getpid()

    class Refuses:
        name = "refuses"

        def reset(self, n_envs: int) -> None:
            self.asked = 0

        def act(self, situation: Any) -> np.ndarray:
            if os.getpid() != here:
                raise EsperError("not on a Tuesday")
            return make_controller("static").act(situation)

    settings = EvaluationSettings(("refuses",), keys=1, steps=2, controls=False)
    with pytest.raises(EsperError, match=r"^not on a Tuesday$"):
        evaluate(*narrow_digits(), settings, lambda name: Refuses(), workers=connected)


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "ppo", "--ray", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1 (Conn"),
        (["evaluate", "--ray", "127.0.0.1:1"], "use the address local"),
        (["evaluate", "--ray", "everywhere"], "'everywhere' is not the address of a Ray cluster"),
        (["train", "ppo", "--ray", "local", "--device", "cpu"], "leave out --device"),
    ],
)
def test_bad_addresses_are_one_sentence(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert esper_here(monkeypatch, *words, cwd=tmp_path) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connected: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[1] / "docs" / "training.md"
    _, block = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "example"}
    # One process less: to start them is what takes time here.
    exec(block.replace("workers=2", "workers=1"), names)
    assert names["state"].round == 1


def test_without_ray_the_cure_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "esper.ray")
    assert esper_here(monkeypatch, "evaluate", "--ray", "local", "--keys", "1", cwd=tmp_path) == 2
    assert capsys.readouterr().err == (
        "esper: esper.ray needs ray; install it with: pip install 'esper-grow[ray]'\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_command_trains_on_a_cluster(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machines: Any,
    connected: Any,
) -> None:
    words = ["train", "ppo", "--ray", machines.address, "--workers", "1", "--rounds", "1"]
    words += ["--envs", "2", "--steps", "1", "--out", "run", "--json"]
    assert esper_here(monkeypatch, *words, cwd=tmp_path) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 1


# --- the projection ------------------------------------------------------------------------------


def test_the_simulation_is_what_can_be_reckoned_where_nothing_varies() -> None:
    """All answers arrive at once, and are taken one after another."""
    costs = scaling.Costs(
        envs=4,
        host_step=0.5,
        host_spread=0.0,
        act_fixed=0.3,
        act_per_step=0.001,
        update_fixed=2.0,
        update_per_step=0.01,
        record_fixed=0.1,
        record_per_step=0.02,
        message=0.003,
        bytes_sent=100,
        bytes_received=900,
        bytes_first=1,
        data_bytes=1,
        put_seconds=1.0,
    )
    assumed = scaling.Assumed(cpus=2, latency=0.01, bytes_per_second=1e5)
    found = scaling.simulate(costs, assumed, nodes=5)
    workers, steps = 10, 10 * 4 * 30
    seconds = 30 * (0.5 + 0.01 + 1000 / 1e5 + workers * 0.003) + (0.3 + steps * 0.001)
    seconds += 2.0 + steps * 0.01 + 0.1 + steps * 0.02
    assert found["workers"] == workers
    assert found["seconds_per_round"] == pytest.approx(seconds)
    assert found["node_hours_per_million_steps"] == pytest.approx(5e6 * seconds / steps / 3600)
    shares = [value for name, value in found.items() if name.startswith("share.")]
    assert sum(shares) == pytest.approx(1.0)
