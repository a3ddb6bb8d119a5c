#!/usr/bin/env python3
"""Trains an mlp on the samples of an HDF5 file, read by PyTorch's DataLoader with h5py, on two processes
(DistributedDataParallel, gloo), and prints the samples per second of the steps after the tenth.

    python benches/pytorch_data.py FILE [--workers N] [--seconds S]

The file has `/inputs`, `[samples, features]`, and `/targets`. Compare with

    mpiexec -n 2 sync_sgd --model mlp --hidden 256 --batch-size 256 --data FILE --inputs /inputs --targets /targets
"""

import argparse
import os
import time

import h5py
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

RANKS = 2
BATCH = 256


class Rows(Dataset):
    """The rows of a file, which every worker opens for itself."""

    def __init__(self, path):
        self.path, self.file = path, None
        with h5py.File(path) as file:
            self.len, self.features = file["inputs"].shape

    def __len__(self):
        return self.len

    def __getitem__(self, row):
        if self.file is None:
            self.file = h5py.File(self.path)
        return torch.from_numpy(self.file["inputs"][row]), int(self.file["targets"][row])


def train(rank, options):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(1)
    rows = Rows(options.file)
    layers = [torch.nn.Linear(rows.features, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler = DistributedSampler(rows, RANKS, rank, shuffle=True, seed=1)
    loader = DataLoader(rows, BATCH // RANKS, sampler=sampler, num_workers=options.workers)
    began, steps = None, 0
    for step, (inputs, targets) in enumerate(loader):
        if step == 10:
            began = time.time()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        steps = step - 10
        # all processes end together
        is_over = torch.tensor([float(began is not None and time.time() - began > options.seconds)])
        dist.all_reduce(is_over)
        if is_over.item() > 0:
            break
    if rank == 0:
        print(f"{options.workers} workers: {steps * BATCH / (time.time() - began):.0f} samples/s", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # workers may still be reading ahead


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("file")
    arguments.add_argument("--workers", type=int, default=1)
    arguments.add_argument("--seconds", type=float, default=20)
    multiprocessing.spawn(train, (arguments.parse_args(),), RANKS)
