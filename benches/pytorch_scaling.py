"""PyTorch's time for a training step on several processes of one node (DistributedDataParallel, gloo).

`pytorch_scaling.py CASE RANKS STEPS` prints the milliseconds of a step, the median of all.
scaling.rs calls this, and names the cases."""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.nn.parallel import DistributedDataParallel

from pytorch_models import DeepMlp, LeNet


def train(rank, case, ranks, steps, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(1)
    if case == "lenet 1024":
        rows, model = 1024 // ranks + (rank < 1024 % ranks), LeNet()
        x, labels = torch.randn(rows, 1, 28, 28), torch.randint(0, 10, (rows,))
    else:
        rows, model = 2048 // ranks + (rank < 2048 % ranks), DeepMlp(4096, 8)
        x, labels = torch.randn(rows, 4096), None
    model = DistributedDataParallel(model) if ranks > 1 else model
    if labels is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        model(x, labels).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    if rank == 0:
        print(f"{1e3 * statistics.median(times):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    case, ranks, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    multiprocessing.spawn(train, (case, ranks, steps, 29600 + ranks), ranks)
