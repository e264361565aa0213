"""What a worker reports when it cannot go on, and what happens when it dies again and again."""

import pytest

from esper.leyline import EsperError
from esper.simic.training.shard import Shard
from esper.simic.training.workers import (
    MAX_RESTARTS,
    LostError,
    ShardServer,
    Worker,
    WorkerError,
)
from training_support import tiny_config, tiny_spec

SPEC = tiny_spec(tiny_config(), (0, 1))


class InThisProcess:
    """A line that leads nowhere else: what is asked is answered at once."""

    def __init__(self, spec) -> None:
        self.server = ShardServer(spec)

    def send(self, name, argument) -> None:
        self.reply = self.server.answer(name, argument)

    def receive(self):
        return self.reply

    def close(self) -> None:
        pass


def test_a_defect_comes_with_its_traceback(monkeypatch):
    monkeypatch.setattr(Shard, "reset", lambda self, round_: 1 / 0)
    worker = Worker(SPEC, InThisProcess)
    worker.begin("reset", 0)
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        worker.result()


def test_bad_input_stays_one_sentence(monkeypatch):
    def refuse(self, round_):
        raise EsperError("the data is not there")

    monkeypatch.setattr(Shard, "reset", refuse)
    worker = Worker(SPEC, InThisProcess)
    worker.begin("reset", 0)
    with pytest.raises(EsperError, match=r"^the data is not there$"):
        worker.result()


class Stillborn(InThisProcess):
    def receive(self):
        raise LostError("exit code -9")


def test_a_worker_that_dies_again_and_again_is_given_up(monkeypatch, caplog):
    starts = []

    def connect(spec):
        starts.append(spec)
        return Stillborn(spec)

    monkeypatch.setattr(ShardServer, "answer", lambda self, name, argument: None)
    worker = Worker(SPEC, connect)
    worker.begin("reset", 0)
    with pytest.raises(WorkerError, match=rf"died {1 + MAX_RESTARTS} times .* \(exit code -9\)"):
        worker.result()
    assert len(starts) == 1 + MAX_RESTARTS
    assert caplog.text.count("its round is played again") == MAX_RESTARTS
