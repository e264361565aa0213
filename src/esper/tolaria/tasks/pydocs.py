"""pydocs: a language model on bytes of the Python documentation that every CPython carries."""

from functools import partial

from esper.growth.hosts.transformer import TransformerHost
from esper.tolaria.data import pydocs
from esper.tolaria.tasks.base import Task, block_slots

BLOCK_SIZE = 64

TASK = Task(
    name="pydocs",
    description="next byte of Python's documentation, a small causal transformer",
    data_set="pydocs",
    load=partial(pydocs.load, block_size=BLOCK_SIZE),
    build=partial(
        TransformerHost,
        vocab=256,
        n_embd=16,
        n_head=4,
        n_layer=3,
        block_size=BLOCK_SIZE,
        dropout=0.0,
    ),
    slots=block_slots(3),
    steps=30,
    batch=64,
    batches_per_epoch=24,
    learning_rate=1e-2,
    max_grad_norm=1.0,
)
