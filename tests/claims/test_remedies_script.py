"""benchmarks/remedies.py: the arms differ by their remedies, and are measured on unseen hosts."""

from argparse import Namespace
from dataclasses import fields

import remedies
from esper.tolaria import find_family

GIVEN = Namespace(family="digits:trained", rounds=3, envs=8, group=4, network="set")


def test_arms_differ_from_none_by_their_settings_only():
    plain = remedies.config_of(GIVEN, "plain", 1).flat()
    changed = {}
    for arm in remedies.ARMS:
        flat = remedies.config_of(GIVEN, arm, 1).flat()
        changed[arm] = {name for name, value in flat.items() if value != plain[name]}
    alone = [changed[arm] for arm in remedies.REMEDIES]
    assert changed["plain"] == set()
    assert all(len(each) == 1 for each in alone)
    assert set().union(*alone) == changed["all"]
    assert len(changed["all"]) == 4


def test_trainings_are_measured_on_hosts_of_the_validation_split():
    family = find_family("digits:trained")
    unseen = remedies.OnValidation(**{f.name: getattr(family, f.name) for f in fields(family)})
    drawn = {unseen.episode("train", key)[0].split for key in range(20)}
    assert drawn == {"validation"}
