"""Many small hosts of one architecture, trained side by side in single kernels.

**Layout.** Every array has environments first: features are `[n, B, ...]`, parameters
`[n, *shape]`. A convolution over at most 64 pixels is a dense matrix, made from its taps by a
constant 0/1 basis, and runs as one `bmm` for all hosts; GroupNorm is `layer_norm` over the group
and an affine map; a pool compares views in pairs. Hosts of larger images must have kernels of 1x1,
which are products of small matrices.

*Row*    parameters and both moments of one host, seed or valve, `[3, P]`, and its step count. A row
         never changes: an epoch stacks rows, trains, and hands out new ones. So germinating,
         removing, snapshots, rollbacks and epochs of a few hosts only are plain Python on rows.
*Bank*   the rows of one shape (hosts; a blueprint in a slot; the valves of a slot).
*Arena*  the banks of an epoch as one vector `[3, N]`, with one AdamW and a step count per row.
*Group*  the seeds of one slot that run together: one gather of the features they read, one bank
         after the other, one scatter of what they add. An isolated seed's rows are left out of
         both by index, not multiplied by 0, so that its NaN cannot reach the host.

Coalitions share what they have in common: they fork at the first slot in which they differ, and
branches are added to the output at the end, in the order of slots.

| file | holds |
|---|---|
| `rows.py` | rows, banks, the arena and its optimiser |
| `stacked.py` | modules as functions of stacked parameters; `vmap` for modules it has no form for |
| `network.py` | a network of hosts and groups: isolation, blending, forks |
| `readings.py` | what gradients of the seeds are told, and clipping |
| `fits.py` | `why_not_fused` |
| `population.py` | `FusedPopulation` and its snapshots |

What cannot be fused (`why_not_fused` says it) is trained by `LoopedPopulation`; `choice.py` has
the rule.
"""
