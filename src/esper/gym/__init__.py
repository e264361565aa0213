"""Growth as Gymnasium environments, for other people's agents.

Importing this module makes two environments known to `gymnasium.make` and `make_vec`:

esper/Growth-v0          a host trains for an epoch between two decisions (task="digits", ...)
esper/AnalyticGrowth-v0  a small growth problem without networks, whose optimum is known

Settings, spaces, masks and rewards: docs/gymnasium.md.
"""

from esper.leyline import PackageMissingError

try:
    import gymnasium
except ModuleNotFoundError:
    raise PackageMissingError("esper.gym needs gymnasium", "gym") from None

GROWTH, ANALYTIC = "esper/Growth-v0", "esper/AnalyticGrowth-v0"

# By name: an environment loads torch when it is made, not when it becomes known.
for _id, _maker in ((GROWTH, "growth"), (ANALYTIC, "analytic")):
    gymnasium.register(
        _id,
        entry_point=f"esper.gym.environments:{_maker}",
        vector_entry_point=f"esper.gym.environments:{_maker}_vector",
    )

__all__ = ["ANALYTIC", "GROWTH"]
