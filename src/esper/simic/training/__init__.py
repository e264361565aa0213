"""Learning to grow by PPO: `config` holds every setting, `loop` plays and learns, `shard` and
`workers` hold the environments, `checkpoint` saves and restores `state`."""
