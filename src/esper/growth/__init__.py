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
from esper.growth.blueprints.bypass import Mean
from esper.growth.blueprints.modules import ChannelAttention, Renormalize
from esper.growth.export import export, largest_difference
from esper.growth.grown_module import GrownModule, check_not_growing, keyed
from esper.growth.hooks import GROWING
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
    group_settings,
    slot_group,
    sync_slot_group,
    with_inner,
    without_empty_groups,
)
from esper.growth.seed_slot import SeedSlot, valve_params
from esper.growth.sites import (
    CallInput,
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
from esper.growth.snapshot import (
    HostSnapshot,
    check_fits,
    restore_snapshot,
    snapshot_from_tree,
    snapshot_tree,
    take_snapshot,
)
from esper.growth.storage import read_tree, write_tree

__all__ = [
    "GATED",
    "GROWING",
    "NOOP",
    "BlueprintCatalogue",
    "BlueprintSpec",
    "CNNHost",
    "CallInput",
    "ChannelAttention",
    "GrownModule",
    "HostSnapshot",
    "Layouts",
    "LifecycleRules",
    "MLPHost",
    "Mean",
    "OutputSpec",
    "Renormalize",
    "SeedSlot",
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
    "check_fits",
    "check_not_growing",
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
    "group_settings",
    "keyed",
    "largest_difference",
    "list_slots",
    "map_tensors",
    "move",
    "one_slot",
    "read_tree",
    "restore_snapshot",
    "scheduled_alpha",
    "seed_costs",
    "slot_group",
    "snapshot_from_tree",
    "snapshot_tree",
    "sync_slot_group",
    "take_snapshot",
    "tensors_in",
    "tick",
    "valve_params",
    "with_inner",
    "without_empty_groups",
    "write_tree",
]
