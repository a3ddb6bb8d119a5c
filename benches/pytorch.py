"""PyTorch's time for a training step on a GPU.

`pytorch.py CASE` prints the milliseconds of a step in eager mode and as a CUDA graph, on one line.
gpu.rs calls this, and names the cases."""

import sys
import time

import torch

from pytorch_models import DeepMlp, LeNet

CASES = {
    "deep-mlp 16384 x 8192 x 4": (16384, 8192, 4),
    "deep-mlp 4096 x 4096 x 8": (4096, 4096, 8),
    "deep-mlp 128 x 1024 x 4": (128, 1024, 4),
}


def seconds(step):
    """The time of a step, over about two seconds."""
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    num = 10
    while True:
        start = time.perf_counter()
        for _ in range(num):
            step()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        if elapsed > 1.5:
            return elapsed / num
        num = max(2 * num, int(2.0 * num / elapsed))


def main():
    name = sys.argv[1]
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU")
    torch.manual_seed(1)
    if name in CASES:
        rows, width, layers = CASES[name]
        model = DeepMlp(width, layers).cuda()
        x, labels = torch.randn(rows, width, device="cuda"), None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    else:
        model = LeNet().cuda()
        x, labels = torch.randn(128, 1, 28, 28, device="cuda"), torch.randint(0, 10, (128,), device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(x, labels).backward()
        optimizer.step()

    eager = seconds(step)
    # the recipe of PyTorch's documentation: warm up on another stream, then capture
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    print(f"{1e3 * eager:.4f} {1e3 * seconds(graph.replay):.4f}")


main()
