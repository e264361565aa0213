"""growth: a network that can grow.

Blueprints and hosts, alpha schedules and blending, the slot table with its lifecycle and gates,
`GrownModule` (slots on any nn.Module), and the way back to a plain module.
"""

from esper.growth.blueprints import (
    NOOP,
    BlueprintCatalogue,
    BlueprintSpec,
    OutputSpec,
    count_params,
    default_catalogue,
    example_params,
    seed_costs,
)
from esper.growth.blueprints.modules import ChannelAttention, Renormalize
from esper.growth.export import export, largest_difference
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.hosts import CNNHost, MLPHost, TransformerHost
from esper.growth.lifecycle import (
    GATED,
    LifecycleRules,
    StageChange,
    age,
    cull,
    fossilize,
    gate_checks,
    gate_passes,
    gate_result,
    germinate,
    move,
    one_slot,
    scheduled_alpha,
    tick,
)
from esper.growth.optimizer import (
    add_slot_groups,
    slot_group,
    sync_slot_group,
    without_empty_groups,
)
from esper.growth.seed_slot import valve_params
from esper.growth.sites import (
    Layouts,
    SlotChoice,
    SlotInfo,
    SlotListing,
    batch_size,
    call_model,
    evaluating,
    list_slots,
    map_tensors,
    tensors_in,
)
from esper.growth.slot_table import SlotTable
from esper.growth.snapshot import HostSnapshot, restore_snapshot, take_snapshot

__all__ = [
    "GATED",
    "NOOP",
    "BlueprintCatalogue",
    "BlueprintSpec",
    "CNNHost",
    "ChannelAttention",
    "GrownModule",
    "HostSnapshot",
    "Layouts",
    "LifecycleRules",
    "MLPHost",
    "OutputSpec",
    "Renormalize",
    "SlotChoice",
    "SlotInfo",
    "SlotListing",
    "SlotTable",
    "StageChange",
    "TransformerHost",
    "add_slot_groups",
    "age",
    "batch_size",
    "call_model",
    "count_params",
    "cull",
    "default_catalogue",
    "evaluating",
    "example_params",
    "export",
    "fossilize",
    "gate_checks",
    "gate_passes",
    "gate_result",
    "germinate",
    "keyed",
    "largest_difference",
    "list_slots",
    "map_tensors",
    "move",
    "one_slot",
    "restore_snapshot",
    "scheduled_alpha",
    "seed_costs",
    "slot_group",
    "sync_slot_group",
    "take_snapshot",
    "tensors_in",
    "tick",
    "valve_params",
    "without_empty_groups",
]
