"""What Esper leaves on a user's model and optimizer, and for how long."""

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from esper.growth.hooks import copy_without_esper
from esper.growth.seed_slot import SeedSlot
from esper.leyline import ConfigError
from loop_support import Loop


def hooks_of(loop: Loop) -> int:
    """Hooks on the optimizer, on gradients, and on the modules, but for those of seeds."""
    on_gradients = sum(
        len(p._post_accumulate_grad_hooks or ())  # type: ignore[attr-defined]
        for p in loop.body.model.parameters()
    )
    on_modules = sum(
        not isinstance(getattr(hook, "__self__", None), SeedSlot)
        for module in loop.model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
        for hook in hooks.values()
    )
    on_optimizer = len(loop.optimizer._optimizer_step_pre_hooks)  # type: ignore[attr-defined]
    return on_gradients + on_modules + on_optimizer


def grown_loop(epochs: int = 6, **settings: Any) -> Loop:
    loop = Loop(**settings)
    loop.body.manage(loop.optimizer)
    for _ in range(epochs):
        loop.epoch()
        loop.body.step(loop.accuracy())
    return loop


def test_finish_leaves_a_model_that_can_be_fine_tuned_for_ever() -> None:
    loop = grown_loop(14)
    assert hooks_of(loop) > 0
    loop.body.finish()
    assert hooks_of(loop) == 0
    for _ in range(30):
        loop.accuracy()
        loop.epoch()
    assert loop.body.finish() is loop.body.outcome, "finishing twice changes nothing"


def test_a_with_block_finishes_and_cleans_up() -> None:
    with grown_loop(10).body as body:
        pass
    assert body.outcome is not None
    assert not body._on_gradients
    assert not body._on_optimizer


def test_an_exception_takes_the_hooks_along_and_leaves_the_model_as_it_is() -> None:
    loop = grown_loop()
    before = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
    with pytest.raises(ZeroDivisionError), loop.body:
        raise ZeroDivisionError
    assert hooks_of(loop) == 0
    assert loop.body.outcome is None
    assert all(torch.equal(t, before[name]) for name, t in loop.model.state_dict().items())


def test_an_exception_in_the_users_evaluation_takes_the_hooks_along() -> None:
    loop = grown_loop(epochs=8)
    loop.body.host.user_evaluate = lambda: 1 / 0
    loop.epoch()
    with pytest.raises(ConfigError, match="division by zero") as error:
        loop.body.step(loop.accuracy())
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert hooks_of(loop) == 0


WITHOUT_ESPER = """
import sys, io
sys.modules["esper"] = None
sys.path.insert(0, {tests!r})
import torch, architectures
plain = torch.load(sys.argv[1], weights_only=False)
torch.testing.assert_close(plain(torch.ones(2, 20)), torch.load(sys.argv[2]))
"""


def test_an_export_in_the_middle_is_plain_and_the_body_goes_on(tmp_path: Path) -> None:
    loop = grown_loop(9)
    plain = loop.body.export().eval()
    torch.save(plain, tmp_path / "plain.pt")
    torch.save(plain(torch.ones(2, 20)), tmp_path / "output.pt")
    code = WITHOUT_ESPER.format(tests=str(Path(__file__).parents[1]))
    files = [str(tmp_path / name) for name in ("plain.pt", "output.pt")]
    subprocess.run([sys.executable, "-c", code, *files], check=True)
    for _ in range(5):
        loop.epoch()
        loop.body.step(loop.accuracy())
    assert loop.body.finish().steps == 13


def test_the_export_pickles_with_a_lambda_as_evaluation() -> None:
    loop = grown_loop(3, evaluate=lambda: 50.0)
    torch.save(loop.body.export(), io.BytesIO())


def test_many_evaluations_in_an_epoch() -> None:
    loop = Loop()
    loop.body.manage(loop.optimizer)
    for _ in range(14):
        loop.epoch()
        for _ in range(25):
            with loop.body.evaluating():
                assert not loop.model.training
                score = loop.accuracy()
            assert loop.model.training
        loop.body.step(score)
    assert loop.body.finish().germinated == 1


def test_an_evaluation_with_the_body_is_not_repeated_for_its_valves(tmp_path: Path) -> None:
    script = tmp_path / "gated.txt"
    script.write_text("2 GERMINATE layer1 mlp_small gated\n")
    alphas = {}
    for marked in (True, False):
        asked = 0
        loop = Loop(controller=f"scripted:{script}")

        def evaluate(loop: Loop = loop) -> float:
            nonlocal asked
            out = loop.body.model.slot(0).muted
            asked += not out
            with loop.body.evaluating():  # as a user's own function would
                assert loop.body.model.slot(0).muted is out
                return loop.accuracy()

        loop.body.host.user_evaluate = evaluate
        loop.body.manage(loop.optimizer)
        for _ in range(8):
            loop.epoch()
            if marked:
                with loop.body.evaluating():
                    score = loop.accuracy()
            else:
                score = loop.accuracy()
            loop.body.step(score)
        alphas[marked] = [row["layer1.alpha"] for row in loop.body.history]
        assert any(0.0 < alpha < 1.0 for alpha in alphas[marked])
        assert (asked > 0) is not marked
    assert alphas[True] == pytest.approx(alphas[False])


def test_the_optimizer_keeps_its_groups_and_trains_on() -> None:
    loop = grown_loop(14)
    loop.body.finish()
    kept = [p for g in loop.optimizer.param_groups for p in g["params"]]
    before = [p.detach().clone() for p in kept]
    loop.epoch()
    assert all(not torch.equal(p, old) for p, old in zip(kept, before, strict=True))
    assert {id(p) for p in loop.body.model.parameters()} == {id(p) for p in kept}
    assert isinstance(loop.body.model, nn.Module)


def test_a_model_has_one_body_at_a_time() -> None:
    loop = Loop()
    with pytest.raises(ConfigError, match="MLP is growing already"):
        Loop(model=loop.model)
    loop.body.close()
    Loop(model=loop.model)
    Loop(model=copy.deepcopy(loop.model))


def test_copies_of_a_growing_model_are_not_growing(tmp_path: Path) -> None:
    loop = Loop()
    torch.save(loop.model, tmp_path / "model.pt")
    reloaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for copied in (copy.deepcopy(loop.model), reloaded):
        Loop(model=copied).body.close()
    assert not any(name.startswith("_esper") for name in vars(copy_without_esper(loop.model)))
