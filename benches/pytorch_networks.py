"""PyTorch's time for a training step of a transformer or a residual network on CPUs.

`mpiexec -n RANKS python3 pytorch_networks.py CASE [tuned]` prints the median milliseconds of a step on
rank 0, with one thread a rank and DistributedDataParallel over gloo. networks.rs names the cases and
calls this. `tuned` adds what was found to help: a fused optimizer, and channels last for images."""

import os
import resource
import statistics
import sys
import time

import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn

# layers, heads, width, context, samples of a step
TRANSFORMERS = {"gpt 4 x 128": (4, 4, 128, 64, 12), "gpt 6 x 384": (6, 6, 384, 256, 8)}
VOCABULARY = 65
IMAGES = 128


class Attention(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, context, width = x.shape
        parts = self.c_attn(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, context, width))


class Block(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attn = Attention(heads, width)
        up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """The decoder of nanoGPT, without biases and dropout."""

    def __init__(self, layers, heads, width, context):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.h = nn.Sequential(*(Block(heads, width) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width, bias=False)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight
        logits = F.linear(self.ln_f(self.h(x)), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(8, outputs),
        )
        is_same = stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """The network of 20 layers for CIFAR-10, with group norms."""

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU())
        sizes = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
        self.blocks = nn.Sequential(*(Residual(*size) for size in sizes))
        self.fc = nn.Linear(64, 10)

    def forward(self, x, labels):
        return F.cross_entropy(self.fc(self.blocks(self.front(x)).mean((2, 3))), labels)


def join(rank, size):
    """Starts gloo, on a port that the ranks' common parent names."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getppid() % 20000))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)


def main():
    name, is_tuned = sys.argv[1], "tuned" in sys.argv[2:]
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if name in TRANSFORMERS:
        layers, heads, width, context, samples = TRANSFORMERS[name]
        model = Gpt(layers, heads, width, context)
        x, y = (torch.randint(0, VOCABULARY, (samples // size, context)) for _ in range(2))
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=is_tuned)
        clip_norm = 1.0
    else:
        model = ResNet()
        x, y = torch.randn(IMAGES // size, 3, 32, 32), torch.randint(0, 10, (IMAGES // size,))
        if is_tuned:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=is_tuned)
        clip_norm = None
    parameters = list(model.parameters())
    if size > 1:
        join(rank, size)
        model = nn.parallel.DistributedDataParallel(model)

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(x, y).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()

    times = []
    for _ in range(3):
        step()
    # as many steps on every rank
    num_steps = 6 if "384" in name else 40
    for _ in range(num_steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    if rank == 0:
        # Linux gives kibibytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        print(f"{1e3 * statistics.median(times):.3f} {peak:.1f}", flush=True)
    if size > 1:
        torch.distributed.destroy_process_group()


main()
