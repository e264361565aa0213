"""The versions of a saved training state, and how an older one becomes the next.

To change what `state.pack` returns, raise VERSION, add a line here and a function to UPGRADES, and
store a small run of the version before under `tests/simic/training/stored`.

4  `rewards` is the normaliser of the run's only reward mode; in version 3 there was one for each
   mode of a run. New settings: anomalies, ppo.validate_masks.
3  The oldest version that can be read. Exported policies of this version have format 2.
"""

from collections.abc import Callable, Mapping
from typing import Any

from esper.leyline import ConfigError

VERSION = 4
Meta = dict[str, Any]

# The defaults of version 4: what a run of version 3 was played with.
_SETTINGS_OF_4 = {
    "anomalies.entropy_collapse": 0.1,
    "anomalies.entropy_low": 0.3,
    "anomalies.kl_spike": 0.1,
    "anomalies.kl_extreme": 0.5,
    "anomalies.drift": 0.5,
    "anomalies.value_phases": [[0.1, -0.5], [0.25, -0.2], [0.75, 0.0], [1.0, 0.1]],
    "anomalies.patience": 2,
    "ppo.validate_masks": True,
}


def _from_3(meta: Mapping[str, Any]) -> Meta:
    settings = {**meta["settings"], **_SETTINGS_OF_4}
    # A run with two modes cannot be continued: it keeps the setting, which no config has any more.
    if settings.get("ab_reward_mode") is None:
        settings.pop("ab_reward_mode", None)
    return {**meta, "settings": settings, "rewards": meta["rewards"][settings["reward_mode"]]}


UPGRADES: dict[int, Callable[[Mapping[str, Any]], Meta]] = {3: _from_3}
OLDEST = min(UPGRADES)


def upgraded(meta: Mapping[str, Any], version: int) -> Meta:
    """The state's dictionary of an older version, as one of VERSION. Raises ConfigError if it is
    not a state of its version."""
    found = dict(meta)
    for step in range(version, VERSION):
        try:
            found = UPGRADES[step](found)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"this is not a state of version {step}: {error!r}") from error
    return found
