"""tolaria: the one who trains.

Tasks and data, families of hosts, populations of hosts, trials (the one way to make and play them),
the vectorised growth environment, attribution of what was grown, and the governor.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.tolaria.attribution import Attribution, CoalitionGame, attribute, attribute_seeds
    from esper.tolaria.batches import DataSize, DataSource, LoaderSource, TensorSource
    from esper.tolaria.choice import (
        PopulationChoice,
        PopulationKind,
        check_population,
        choose_population,
    )
    from esper.tolaria.cycle import GrowthCycle
    from esper.tolaria.data.catalogue import data_root
    from esper.tolaria.data.shared import share
    from esper.tolaria.data.splits import DataSplits
    from esper.tolaria.environment import GrowthEnv
    from esper.tolaria.families import Family, Member, MemberHosts, find_family, hosts_of
    from esper.tolaria.fused import FusedPopulation, why_not_fused
    from esper.tolaria.garden import TRAINING_COST, Budget, Garden, Validation
    from esper.tolaria.governor import Governor
    from esper.tolaria.gradients import GradientMeter
    from esper.tolaria.objectives import (
        LOSSES,
        SCORES,
        Objective,
        WholeSetScore,
        check_fit,
        find_objective,
    )
    from esper.tolaria.population import (
        Evaluation,
        Hosts,
        LoopedPopulation,
        Population,
        TrainReadings,
    )
    from esper.tolaria.recipe import (
        HostRecipe,
        Precision,
        check_precision,
        export_network,
        new_network,
    )
    from esper.tolaria.resuming import cycle_state, load_cycle_state
    from esper.tolaria.schedule import RateSchedule
    from esper.tolaria.tasks import Task, all_tasks, find_task
    from esper.tolaria.transition import Transition
    from esper.tolaria.trial import (
        RESCUE,
        SETTLING_EVALUATIONS,
        Topology,
        Trained,
        TrialRules,
        act,
        host_rules,
        make_env,
        play,
        settle,
        train,
    )

# Loaded on first use: the data catalogue has to answer without waiting for torch.
_HOMES = {
    "Attribution": "attribution",
    "Budget": "garden",
    "CoalitionGame": "attribution",
    "DataSize": "batches",
    "DataSource": "batches",
    "DataSplits": "data.splits",
    "Evaluation": "population",
    "Family": "families",
    "FusedPopulation": "fused",
    "Garden": "garden",
    "Governor": "governor",
    "GradientMeter": "gradients",
    "GrowthCycle": "cycle",
    "GrowthEnv": "environment",
    "HostRecipe": "recipe",
    "Hosts": "population",
    "LOSSES": "objectives",
    "LoaderSource": "batches",
    "LoopedPopulation": "population",
    "Member": "families",
    "MemberHosts": "families",
    "Objective": "objectives",
    "Population": "population",
    "PopulationChoice": "choice",
    "PopulationKind": "choice",
    "Precision": "recipe",
    "RESCUE": "trial",
    "RateSchedule": "schedule",
    "SCORES": "objectives",
    "SETTLING_EVALUATIONS": "trial",
    "TRAINING_COST": "garden",
    "Task": "tasks",
    "TensorSource": "batches",
    "Topology": "trial",
    "TrainReadings": "population",
    "Trained": "trial",
    "Transition": "transition",
    "TrialRules": "trial",
    "Validation": "garden",
    "WholeSetScore": "objectives",
    "act": "trial",
    "all_tasks": "tasks",
    "attribute": "attribution",
    "attribute_seeds": "attribution",
    "check_fit": "objectives",
    "check_population": "choice",
    "check_precision": "recipe",
    "choose_population": "choice",
    "cycle_state": "resuming",
    "data_root": "data.catalogue",
    "export_network": "recipe",
    "find_family": "families",
    "find_objective": "objectives",
    "find_task": "tasks",
    "host_rules": "trial",
    "hosts_of": "families",
    "load_cycle_state": "resuming",
    "make_env": "trial",
    "new_network": "recipe",
    "play": "trial",
    "settle": "trial",
    "share": "data.shared",
    "train": "trial",
    "why_not_fused": "fused",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"esper.tolaria has no {name!r}")
    return getattr(import_module(f"esper.tolaria.{_HOMES[name]}"), name)
