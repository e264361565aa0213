"""Episodes of controllers on members of a family."""

from pathlib import Path

import pytest

from esper.leyline import EsperError
from esper.proof import arms
from esper.proof.arms import validation_score
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.controllers.simple import StaticController
from esper.tolaria.families.hosts import hosts_of
from family_episodes import play_family
from training_support import tiny_family

FAMILY = tiny_family(starts=("trained",), extras=(0.9,))
SCRIPT = "1 GERMINATE r0c1 branch linear\nauto FOSSILIZE\n"


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return FAMILY.members("test")[0], FAMILY.task.load(Path()), tmp_path_factory.mktemp("data")


def test_nothing_grows_where_nothing_is_planted_and_the_budget_is_kept(spec):
    member, data, root = spec
    hosts = hosts_of(member, data, root)
    found = play_family(member, StaticController(), data, root)
    assert [result.key for result in found] == list(member.keys)
    for result in found:
        assert (result.seeds, result.first) == ((), None)
        assert result.macs <= member.extra * hosts.cost


def test_the_module_of_the_first_seed_is_reported_and_keys_may_repeat(spec):
    member, data, root = spec
    key = member.keys[1]
    one, two = play_family(member, ScriptedController(SCRIPT, "branch"), data, root, keys=[key] * 2)
    assert one == two
    assert one.first == "blocks.1"
    assert one.host is not None


def test_the_host_is_scored_before_its_episode(spec):
    member, data, root = spec
    hosts = hosts_of(member, data, root)
    (result,) = play_family(member, StaticController(), data, root, keys=member.keys[:1])
    host = member.task.build()
    host.load_state_dict(hosts.weights[result.key])
    right = host.eval()(data.test_x).argmax(1) == data.test_y
    assert result.host == pytest.approx(100 * right.double().mean().item())


def test_the_validation_score_is_of_validation_hosts_only(monkeypatch, spec):
    """No choice of a policy may see a test host."""
    played = []

    def play(member, *rest):
        played.append(member)
        return None, []

    monkeypatch.setattr(arms, "play_member", play)
    with pytest.raises(EsperError, match="no validation host"):
        validation_score(FAMILY, StaticController(), spec[1], spec[2])
    assert played == list(FAMILY.members("validation"))
    assert {member.split for member in played} == {"validation"}
