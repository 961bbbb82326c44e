"""A convolutional network with BatchNorm on random images, resumed from a checkpoint, with validation."""

import io
from itertools import pairwise

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint  # noqa: F401  # a planted fault uses it

torch.manual_seed(0)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 32, 64, 128, 128]
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def saved():
    file = io.BytesIO()
    torch.save(Network().state_dict(), file)
    file.seek(0)
    return file


model = Network()
state = torch.load(saved(), weights_only=True)
model.load_state_dict(state)
del state
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
gathered = []
for epoch in range(3):
    model.train()
    for _ in range(3):
        x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0
    with torch.inference_mode():
        for _ in range(4):
            x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
            out = model(x)
            right += (out.argmax(-1) == y).sum().item()
    print(f"epoch {epoch}: {right} right")
