"""tinystories: a transformer language model on short stories, as bytes."""

from functools import partial

from esper.growth.hosts.transformer import TransformerHost
from esper.tolaria.data import tinystories
from esper.tolaria.tasks.base import Task, block_slots

TASK = Task(
    name="tinystories",
    description="next byte of short stories, a transformer of six layers",
    data_set="tinystories",
    load=tinystories.load,
    build=partial(TransformerHost, vocab=256, block_size=tinystories.BLOCK_SIZE),
    slots=block_slots(3, stride=2),
    steps=50,
    batch=32,
    learning_rate=1e-3,
    max_grad_norm=1.0,
)
