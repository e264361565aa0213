"""Claim E elsewhere: a policy that has learnt on plain CNNs grows a model that it has never seen.

    python benchmarks/claims/own_model.py --policy runs/policy-all [--keys 10]

The model is an ordinary `nn.Module` with BatchNorm and a residual connection, of another number of
slots than the hosts that were learnt from. It is trained to its end on `digits`; then every arm has
the same few epochs: nothing grows, the rules, the policy. The catalogue is what is installed, or
with `--blueprints` some of it.
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import esper
from common import (
    RESULTS,
    Row,
    compare,
    means,
    print_comparisons,
    print_json,
    print_table,
    run_missing,
)
from esper.growth.blueprints.catalogue import BlueprintCatalogue, count_params, default_catalogue
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.tasks import find_task

TRAINED, MORE = 40, 12  # epochs
SLOTS = ["stem", "body", "narrow", "last"]
STATIC, RULES = "static", ("heuristic",)


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = block(1, 4), block(4, 4)
        self.narrow, self.last = block(4, 2), block(2, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(self.stem(x), 2)
        h = self.narrow(h + self.body(h))
        return self.head(F.adaptive_avg_pool2d(self.last(h), 1).flatten(1))


def loader(x: Tensor, y: Tensor, key: int | None) -> DataLoader[tuple[Tensor, ...]]:
    if key is None:
        return DataLoader(TensorDataset(x, y), batch_size=256)
    order = torch.Generator().manual_seed(key)
    return DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, generator=order)


def trials_of(policy: str, blueprints: BlueprintCatalogue) -> Callable[[str, int], Row]:
    data = find_task("digits").load(data_root())
    hosts: dict[int, nn.Module] = {}

    def run(arm: str, key: int) -> Row:
        train, val = loader(data.train_x, data.train_y, key), loader(data.val_x, data.val_y, None)

        def fit(model: nn.Module, controller: str, steps: int, start: str) -> nn.Module:
            grown = esper.grow(
                model,
                train,
                val,
                slots=esper.Slots(SLOTS, blueprints=blueprints),
                start=start,
                controller=controller,
                steps=steps,
                optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
                key=key,
                settings=esper.GrowthSettings(progress=False),
            )
            return grown.export()

        if key not in hosts:
            torch.manual_seed(key)
            hosts[key] = fit(Own(), STATIC, TRAINED, "fresh")
        model = fit(
            copy.deepcopy(hosts[key]), policy if arm == "policy" else arm, MORE, "trained"
        ).eval()
        with torch.no_grad():
            right = (model(data.test_x).argmax(-1) == data.test_y).float().mean()
        return {"test": 100 * float(right), "params": count_params(model)}

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", required=True, help="folder of a policy, or pretrained")
    parser.add_argument("--keys", type=int, default=10)
    parser.add_argument("--first-key", type=int, default=500)
    parser.add_argument("--blueprints", default=None, help="names, separated by commas")
    parser.add_argument("--out", default=str(RESULTS / "policy-own-model.jsonl"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    installed = default_catalogue()
    names = given.blueprints.split(",") if given.blueprints else list(installed.names)
    catalogue = BlueprintCatalogue(tuple(installed[installed.index(name)] for name in names))
    arms = [STATIC, *RULES, "policy"]
    settings = {"policy": given.policy, "blueprints": names, "trained": TRAINED, "more": MORE}
    trials = run_missing(
        Path(given.out),
        settings,
        arms,
        range(given.first_key, given.first_key + given.keys),
        trials_of(given.policy, catalogue),
    )
    found = means(trials, arms, ("test", "params"))
    print_table({"arm": arm, **row} for arm, row in found.items())
    table = compare(trials, [("policy", other) for other in (STATIC, *RULES)], "test")
    print_comparisons(table)
    print_json({"arms": found, "differences": table})


if __name__ == "__main__":
    main()
