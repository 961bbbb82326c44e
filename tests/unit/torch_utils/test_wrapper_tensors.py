"""Tensors made of others are seen through: what they are made of, by name; the same class of other parts."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from brimful.torch_utils.wrapper_tensors import inner_tensors, is_wrapper_tensor, remade, with_inner_tensors


def nested() -> TwoTensor:
    inner = TwoTensor(torch.zeros(2, 3), torch.ones(2, 3))
    return TwoTensor(inner, TwoTensor(torch.full((2, 3), 2.0), torch.full((2, 3), 3.0)))


def test_inner_tensors_are_named_after_their_wrapper() -> None:
    plain = torch.zeros(3)
    named = with_inner_tensors({"first": plain, "weight": nested(), "step": 3})
    assert list(named) == ["first", "weight.a.a", "weight.a.b", "weight.b.a", "weight.b.b", "step"]
    assert named["first"] is plain
    assert [tensor[0, 0].item() for tensor in inner_tensors(nested())] == [0, 1, 2, 3]
    assert inner_tensors(plain) == [plain]


def test_a_wrapper_is_made_again_of_other_tensors() -> None:
    parameter = nn.Parameter(nested(), requires_grad=False)
    assert is_wrapper_tensor(parameter)
    other = remade(parameter, lambda inner: inner + 1)
    assert type(other) is type(parameter.data)
    assert isinstance(other, nn.Parameter)
    assert not other.requires_grad
    assert [tensor[0, 0].item() for tensor in inner_tensors(other)] == [1, 2, 3, 4]
    assert remade(nn.Parameter(nested()), torch.clone).requires_grad
    assert not isinstance(remade(nested(), torch.clone), nn.Parameter)
