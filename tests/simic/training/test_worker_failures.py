"""What a worker reports when it cannot go on, and what happens when it dies again and again."""

import multiprocessing
import signal

import pytest

from esper.leyline import EsperError
from esper.simic.training import workers
from esper.simic.training.shard import Shard
from esper.simic.training.workers import MAX_RESTARTS, Worker, WorkerError, _serve
from training_support import tiny_config, tiny_spec

SPEC = tiny_spec(tiny_config(), (0, 1))


class InThisProcess(Worker):
    """Serves the first call at once, where we are, and then the pipe closes."""

    def _start(self) -> None:
        self.pipe, self.theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process()

    def begin(self, name, argument) -> None:
        super().begin(name, argument)
        _serve(self.spec, self.theirs)


@pytest.fixture(autouse=True)
def _keep_ctrl_c(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)


def test_a_defect_comes_with_its_traceback(monkeypatch):
    monkeypatch.setattr(Shard, "reset", lambda self, round_: 1 / 0)
    worker = InThisProcess(SPEC)
    worker.begin("reset", 0)
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        worker.result()


def test_bad_input_stays_one_sentence(monkeypatch):
    def refuse(self, round_):
        raise EsperError("the data is not there")

    monkeypatch.setattr(Shard, "reset", refuse)
    worker = InThisProcess(SPEC)
    worker.begin("reset", 0)
    with pytest.raises(EsperError, match=r"^the data is not there$"):
        worker.result()


def test_a_worker_that_dies_again_and_again_is_given_up(monkeypatch, caplog):
    starts = []

    def stillborn(self) -> None:
        starts.append(self)
        self.pipe, theirs = multiprocessing.Pipe()
        theirs.close()
        self.process = multiprocessing.get_context("spawn").Process(target=int)
        self.process.join = lambda timeout=None: None

    monkeypatch.setattr(workers.Worker, "_start", stillborn)
    worker = Worker(SPEC)
    worker.begin("reset", 0)
    with pytest.raises(WorkerError, match=f"died {1 + MAX_RESTARTS} times in the same step"):
        worker.result()
    assert len(starts) == 1 + MAX_RESTARTS
    assert caplog.text.count("its round is played again") == MAX_RESTARTS
