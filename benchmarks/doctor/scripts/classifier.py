"""A classifier of random vectors, with validation after each epoch."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
device = "cpu"


class Vectors(Dataset):
    def __init__(self, count):
        self.x, self.y = torch.randn(count, 256), torch.randint(0, 10, (count,))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *[
                nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Dropout(0.1))
                for _ in range(12)
            ]
        )
        self.head = nn.Linear(256, 10)
        self.spare = None

    def forward(self, x):
        hidden = self.body(x)
        return self.head(hidden)


def recorder():
    losses = []

    def remember(loss):
        losses.append(loss)

    return remember


def failed(function, model, x):
    """An error that is kept for later."""
    out = model(x)
    try:
        return function(out, x)
    except (RuntimeError, ValueError) as error:
        return error


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_function = nn.CrossEntropyLoss()
training, validation = (
    DataLoader(Vectors(512), batch_size=64, shuffle=True),
    DataLoader(Vectors(128), batch_size=64),
)
outputs, kept, remember = [], [], recorder()
began = time.perf_counter()
for epoch in range(2):
    model.train()
    total, right = 0.0, 0
    for x, y in training:
        x = x.to(device)
        optimizer.zero_grad()
        out = model(x)
        loss = loss_function(out, y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    model.eval()
    with torch.no_grad():
        for x, y in validation:
            out = model(x)  # validation
            right += (out.argmax(-1) == y).sum().item()
    print(f"epoch {epoch}: loss {float(total) / 8:.3f}, right {right}, {time.perf_counter() - began:.0f} s")
