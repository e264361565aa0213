"""Wrong types and values of any argument of the front door name the argument."""

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import esper
from architectures import MLP
from esper.api import imitate, learn_offline, load_policy, record, resume_ppo, train_ppo
from esper.api.checks import RULES, Rule, checked
from esper.growth.grown_module import GrownModule
from esper.leyline import ConfigError
from esper.simic.training.config import TrainingConfig

X, Y = torch.zeros(6, 20), torch.zeros(6).long()
LOADER = [(X, Y)]
FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "grow": (
        esper.grow,
        {"model": MLP(), "train_loader": LOADER, "val_loader": LOADER, "slots": ["layer1"]},
    ),
    "attach": (
        esper.attach,
        {"model": MLP(), "slots": ["layer1"], "example": X, "evaluate": float, "steps": 3},
    ),
    "list_slots": (esper.list_slots, {"model": MLP(), "example": X}),
    "export": (
        esper.export,
        {"network": GrownModule.wrap(MLP(), ["layer1"], X), "example": X, "fold": True},
    ),
    "load_policy": (load_policy, {"path": "nowhere"}),
    "record": (record, {"controller": "random", "out": "out"}),
    "imitate": (imitate, {"teacher": "heuristic", "out": "out"}),
    "learn_offline": (learn_offline, {"runs": ["nowhere"], "out": "out"}),
    "train_ppo": (train_ppo, {"config": TrainingConfig(), "out": "out"}),
    "resume_ppo": (resume_ppo, {"run": "out"}),
    "step": (esper.Body.step, {"self": None, "validation_score": 1.0}),
    "manage": (esper.Body.manage, {"self": None, "optimizer": torch.optim.SGD([X.clone()])}),
}
# Nothing of these is right anywhere, but for those that take anything callable or iterable.
WRONG: list[Any] = [object(), 3 + 4j, b"bytes", -1, float("nan"), 10**400, -(10**5000), {"a": 1}, X]


def arguments_of(name: str) -> list[str]:
    return [n for n in signature(FUNCTIONS[name][0]).parameters if n not in ("self", "schedulers")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_has_a_rule(name: str) -> None:
    assert [each for each in arguments_of(name) if each not in RULES] == []
    assert hasattr(FUNCTIONS[name][0], "__wrapped__"), "nobody asks for the rules"


@pytest.mark.parametrize(
    ("name", "argument"), [(name, each) for name in FUNCTIONS for each in arguments_of(name)]
)
def test_a_wrong_value_is_one_sentence_that_names_the_argument(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function, right = FUNCTIONS[name]
    refused = 0
    for wrong in WRONG:
        rule = RULES[argument]
        if (name, argument) not in (("train_ppo", "task"), ("resume_ppo", "task")) and rule.fits(
            wrong
        ):
            continue
        with pytest.raises(ConfigError, match=rf"^{argument} must be .*, got ") as error:
            function(**{**right, argument: wrong})
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 250
        refused += 1
    assert refused >= (0 if argument == "example" else 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("grow", {"steps": True}, "steps must be a whole number"),
        ("grow", {"steps": "10"}, "steps must be a whole number.*got '10'"),
        ("grow", {"steps": 1.5}, "steps must be a whole number"),
        ("grow", {"key": 2**63}, "key must be a whole number from 0"),
        ("grow", {"model": MLP}, "model must be a torch.nn.Module, got type"),
        ("grow", {"model": lambda x: x}, "model must be a torch.nn.Module, got function"),
        ("grow", {"train_loader": None}, "train_loader must be an iterable of batches"),
        ("grow", {"controller": None}, "controller must be the name"),
        ("grow", {"slots": None}, "slots must be names of modules"),
        ("grow", {"budget": 1.5}, "budget must be an esper.Budget, got 1.5"),
        ("grow", {"optimizer": "adam"}, "optimizer must be a torch optimizer"),
        ("grow", {"settings": {"patience": 3}}, "settings must be an esper.GrowthSettings"),
        ("attach", {"evaluate": 93.0}, "evaluate must be a callable"),
        ("attach", {"example": None}, "attach needs one input of the model"),
        ("step", {"validation_score": None}, "validation_score must be one number"),
        ("step", {"validation_score": torch.zeros(2)}, "validation_score must be one number"),
        ("step", {"validation_loss": "low"}, "validation_loss must be one number"),
        ("learn_offline", {"runs": "runs/first"}, "runs must be a list of folders"),
        ("learn_offline", {"runs": [3]}, "runs must be a list of folders"),
        ("train_ppo", {"config": {"rounds": 3}}, "config must be a TrainingConfig"),
        ("train_ppo", {"devices": "cpu"}, "devices must be a list"),
        ("train_ppo", {"workers": 0}, "workers must be"),
        ("record", {"episodes": 1}, "episodes must be a whole number from 2"),
        ("record", {"overwrite": "yes"}, "overwrite must be True or False"),
    ],
)
def test_common_mistakes(name: str, changes: dict[str, Any], message: str) -> None:
    function, right = FUNCTIONS[name]
    with pytest.raises(ConfigError, match=message):
        function(**{**right, **changes})


def test_schedulers_must_be_schedulers() -> None:
    body = esper.attach(**FUNCTIONS["attach"][1])
    optimizer = torch.optim.SGD(body.model.host.parameters())
    with pytest.raises(ConfigError, match="schedulers must be learning-rate schedulers"):
        body.manage(optimizer, 0.1)


@pytest.mark.parametrize("value", ["2", True, [1.5], 1j])
@pytest.mark.parametrize("name", ["params", "macs"])
def test_a_budget_is_a_number(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"budget {name} must be a number"):
        esper.Budget(**{name: value})


@pytest.mark.parametrize("value", [0.99, -1.0, 0, float("nan"), -float("inf")])
def test_a_budget_holds_the_host(value: float) -> None:
    with pytest.raises(ConfigError, match="below the host itself"):
        esper.Budget(params=value)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    assert RULES["steps"].fits(np.int64(3))
    assert RULES["validation_score"].fits(np.float32(3))
    assert RULES["validation_score"].fits(torch.tensor(3.0))
    assert RULES["validation_score"].fits(float("nan")), "a broken epoch is told by it"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(RULES)), value=anything)
def test_no_rule_fails_on_what_it_is_shown(name: str, value: Any) -> None:
    """A rule that raises would be a traceback; what it refuses is one short sentence."""

    @checked(argument=RULES[name])
    def function(argument: Any) -> Any:
        return argument

    if RULES[name].fits(value):
        assert function(value) is value
        return
    with pytest.raises(ConfigError) as error:
        function(value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


def test_none_stands_only_where_it_is_the_default() -> None:
    @checked(a=Rule("a thing", lambda v: v == 1), b=Rule("a thing", lambda v: v == 1))
    def function(a: Any, b: Any = None) -> None:
        pass

    function(1)
    function(1, b=None)
    with pytest.raises(ConfigError, match="a must be a thing, got NoneType"):
        function(None)
