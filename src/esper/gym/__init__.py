"""Growth as Gymnasium environments, for agents of other libraries.

Importing this module registers two environments for `gymnasium.make` and `make_vec`:

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

for _id, _problem in ((GROWTH, "growth"), (ANALYTIC, "analytic")):
    # By name: an environment loads torch when it is made, not when it is registered.
    gymnasium.register(
        _id,
        entry_point="esper.gym.environments:environment",
        vector_entry_point="esper.gym.environments:vector_environment",
        kwargs={"problem": _problem},
    )

__all__ = ["ANALYTIC", "GROWTH"]
