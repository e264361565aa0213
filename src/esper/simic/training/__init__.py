"""PPO training of policies: `config` holds all settings, `loop` plays and learns, `shard` and
`workers` hold the environments, `checkpoint` saves and restores `state`."""
