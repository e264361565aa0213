"""CPU time of a network that grew in depth, over a plain loop of the same blocks.

    python benchmarks/depth.py [--repeats 7]

Both sides take turns in one process, on one thread; figures are ratios of medians of CPU time.

epoch     an epoch of the network with all blocks grown and kept, over one of its export
ungrown   an epoch before anything grew, over one of a network built with so few blocks
forward   one pass of the export, over one of a network that was built with all blocks
event     a growth event, in epochs of the network after it
"""

import argparse
import json
from dataclasses import replace
from functools import partial

import torch

from cost import exported, gpt, grow_one, growing, in_turn, plain
from esper.growth.depth import BLOCKS
from esper.growth.hosts import TransformerHost
from esper.leyline.depth import Depth
from esper.tolaria.engine.recipe import HostRecipe

TARGETS = {"epoch": 1.03, "ungrown": 1.03, "forward": 1.03}
FORWARDS = 20


def recipe(blocks: int = 8, start: int = 1) -> HostRecipe:
    build = partial(
        TransformerHost, vocab=512, n_embd=128, n_head=4, n_layer=blocks, block_size=64, dropout=0.0
    )
    return replace(gpt(), build=build, slots=Depth("blocks", start=start), catalogue=BLOCKS)


def figures(repeats: int) -> dict[str, float]:
    own = recipe()
    env = growing(own, 3, "blocks")
    grown, alone = in_turn(repeats, partial(grow_one, env), exported(own, env))
    few = growing(own)
    shallow = replace(own, build=partial(own.build, n_layer=1))
    ungrown, one = in_turn(repeats, partial(grow_one, few), plain(own, shallow.build()))
    example, export = own.data.example(), env.population.export(0).eval()  # type: ignore[attr-defined]
    built = own.build().eval()

    def passes(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for _ in range(FORWARDS):
                model(example)

    ours, theirs = in_turn(repeats, partial(passes, export), partial(passes, built))
    network = few.population.network(0)

    def event() -> None:
        network.germinate(2, 0, 0, key=0)
        network.remove(2)

    (seconds,) = in_turn(repeats, event)
    return {
        "epoch": grown / alone,
        "ungrown": ungrown / one,
        "forward": ours / theirs,
        "event": seconds / grown,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: round(value, 3) for name, value in figures(given.repeats).items()}
    print(json.dumps({"figures": found, "targets": TARGETS}))


if __name__ == "__main__":
    main()
