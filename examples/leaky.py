"""A training loop with two faults that cost memory, for `brimful run examples/leaky.py`."""

import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
model = nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 1000))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
tokens = torch.randint(0, 1000, (128, 65))  # sequences of 64 tokens, each with the one to predict next
history = []

for batch in tokens[:96].split(16):
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append((loss.item(), logits))

model.eval()
validation = model(tokens[96:, :-1])
losses = [nn.functional.cross_entropy(validation.flatten(0, 1), tokens[96:, 1:].flatten()), history[-1][0]]
print("validation {:.3f}, training {:.3f}".format(*losses))
