"""The networks that pytorch.py and pytorch_scaling.py measure."""

import torch
import torch.nn.functional as F


class DeepMlp(torch.nn.Module):
    """x = gelu(x · W), without biases; the loss is the mean of squares. Parameters are f32, and products
    on a GPU bf16."""

    def __init__(self, width, layers):
        super().__init__()
        weights = (torch.randn(width, width) / width**0.5 for _ in range(layers))
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(weight) for weight in weights)

    def forward(self, x, _):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            for weight in self.weights:
                x = F.gelu(x @ weight)
        return x.float().square().mean()


class LeNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = torch.nn.Conv2d(1, 10, 5), torch.nn.Conv2d(10, 20, 5)
        self.fc1, self.fc2 = torch.nn.Linear(320, 50), torch.nn.Linear(50, 10)

    def forward(self, x, labels):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.cross_entropy(self.fc2(x), labels)
