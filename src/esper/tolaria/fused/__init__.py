"""Many small hosts of one architecture, trained together in single kernels.

Every array has environments first: features are `[n, B, ...]`, parameters `[n, *shape]`. A
convolution over at most 64 pixels is a dense matrix, made from its taps by a constant 0/1 basis,
and runs as one `bmm` for all hosts. GroupNorm is `layer_norm` over the group and an affine map; a
pool compares views in pairs. Hosts of larger images must have 1x1 kernels.

*Row*    parameters and both moments of one host, seed or valve, `[3, P]`, and its step count. A row
         never changes: an epoch stacks rows, trains, and returns new ones. So germination, removal,
         snapshots, rollbacks and epochs of a few hosts are plain Python on rows.
*Bank*   the rows of one kind (hosts; a blueprint in a slot; the valves of a slot).
*Arena*  the banks of an epoch as one vector `[3, N]`, with one AdamW and a step count per row.
*Group*  the seeds of one slot that run together: one gather of the features they read, one bank
         after the other, one scatter of what they add. Isolated seeds are left out of the scatter
         by index, not multiplied by 0, so that their NaN cannot reach the host.

Coalitions share rows of features until the first slot in which they differ; branches are added to
the output at the end, in the order of slots. `LoopedPopulation` trains what cannot be fused.
"""
