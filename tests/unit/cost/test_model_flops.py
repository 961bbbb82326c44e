"""What MFU counts: matmuls of forward and backward, once each."""

import torch
import torch.nn.functional as F
from torch import nn

from brimful.cost import model_flops
from brimful.models import find_architecture
from helpers.captured_jobs import A100, CLASSES, CPU, HIDDEN, INPUTS, capture, job

PARTS = INPUTS * HIDDEN, HIDDEN * CLASSES


def test_a_step_is_three_matmuls_a_layer_but_for_the_gradient_of_the_first_input():
    assert model_flops(capture(job(), samples=8)) == 8 * (4 * PARTS[0] + 6 * PARTS[1])


def test_what_is_recomputed_does_not_count_and_accumulation_changes_nothing():
    whole = model_flops(capture(job(), samples=8))
    assert model_flops(capture(job(), samples=8, recompute=("0", "2"))) == whole
    assert model_flops(capture(job(), samples=2, gradient_accumulation_steps=4)) == whole


def test_attention_counts_as_often_forward_as_other_products_and_twice_backward():
    length, heads, size = 32, 2, 8

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Parameter(torch.randn(heads, length, size))

        def forward(self, x):
            return F.scaled_dot_product_attention(x * self.queries, x * self.queries, x)

    found = job(
        model=Attention,
        loss=lambda model, batch: model(batch).float().mean(),
        batch=lambda samples: torch.randn(samples, heads, length, size, requires_grad=True),
    )
    product = 2 * 4 * heads * length * length * size
    for device in (CPU, A100):
        trace = capture(found, device, samples=4)
        assert any("attention" in op.name and "backward" in op.name for op in trace.ops)
        assert model_flops(trace) == 2 * product + 4 * product


def test_a_gpt_is_counted_as_by_the_formula_of_the_palm_paper():
    """6 N + 12 L H Q T a token; N are the parameters that multiply, the tied head among them."""
    layers, width, length, vocabulary, samples = 2, 768, 64, 50257, 2
    gpt = find_architecture("gpt2", sequence_length=length, num_hidden_layers=layers)
    multiplying = 12 * layers * width * width + vocabulary * width
    of_token = 6 * multiplying + 12 * layers * width * length
    for device in (CPU, A100):
        assert model_flops(capture(gpt, device, samples=samples)) == of_token * samples * length
