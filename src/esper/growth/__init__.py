"""growth: a network that can grow.

Blueprints and hosts, alpha schedules and blending, the slot table with its lifecycle and gates,
`GrownModule` (slots on any nn.Module), and the export to a plain module.
"""
