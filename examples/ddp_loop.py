"""A training loop in several processes, in which a model grows.

Start: torchrun --nproc-per-node 2 examples/ddp_loop.py
Needs: pip install 'esper-grow[digits]'
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import esper

EPOCHS = 20


def main() -> None:
    torch.manual_seed(0)
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
    several = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)

    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
    y = torch.tensor(load_digits().target)
    train_set = TensorDataset(x[:600], y[:600])
    sampler = DistributedSampler(train_set, size, rank)
    train = DataLoader(train_set, 60 // size, sampler=sampler)
    val_x, val_y = x[600:900][rank::size], y[600:900][rank::size]

    model = nn.Sequential(nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))
    ddp = DistributedDataParallel(model) if several else model
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=5e-3)

    @torch.no_grad()
    def accuracy() -> float:
        return 100.0 * float((model(val_x).argmax(1) == val_y).float().mean())

    with esper.attach(
        ddp,
        slots=["1"],
        example=x[:2],
        evaluate=accuracy,
        steps=EPOCHS,
        controller="scripted:early",
    ) as body:
        body.manage(optimizer)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for inputs, target in train:
                optimizer.zero_grad()
                nn.functional.cross_entropy(ddp(inputs), target).backward()
                optimizer.step()
            body.step(accuracy(), samples=len(val_y))

    if rank == 0:
        print(f"{body.outcome.val_score:.1f} % with {body.outcome.params} parameters")
        for seed in body.outcome.seeds:
            print(f"  {seed.blueprint} in {seed.module}")
        plain = body.export()  # a module that needs neither Esper nor DDP
        print(type(plain).__name__, sum(p.numel() for p in plain.parameters()))
    if several:
        dist.barrier()  # no process ends while another one still works
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
