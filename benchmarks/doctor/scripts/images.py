"""A convolutional network on random images: SGD, two micro-batches a step."""

import torch
from torch import nn

torch.manual_seed(0)


def block(before, width):
    return nn.Sequential(nn.Conv2d(before, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU())


model = nn.Sequential(
    block(3, 16),
    nn.MaxPool2d(2),
    block(16, 32),
    nn.MaxPool2d(2),
    block(32, 64),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images, labels = torch.randn(56, 8, 3, 32, 32), torch.randint(0, 10, (56, 8))
model.train()
for step in range(0, 56, 8):
    for x, y in zip(images[step : step + 8].split(4), labels[step : step + 8].split(4), strict=True):
        loss = nn.functional.cross_entropy(model(x.flatten(0, 1)), y.flatten()) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
