"""Under DDP and FSDP2 a plan leaves training as it is: two ranks over gloo, each with batches of its own.

Only scheduling changes, so losses, gradients, parameters and buffers are compared bit for bit.
"""

import pytest
import torch
from torch import Tensor

from helpers.data_parallel import Found, ddp_cases, find_ddp, find_fsdp, fsdp_cases
from helpers.ranks import on_ranks

pytestmark = pytest.mark.slow  # two processes import torch and train some twenty small models

UNSHARDED_ADDS_OTHERWISE = {
    "synchronised each time": "sums over ranks come before those over micro-batches",
    "bf16": "autocast casts other ops than FSDP2's policy",
}


@pytest.fixture(scope="module")
def under_ddp() -> list[dict[str, Found]]:
    return on_ranks(find_ddp)


@pytest.fixture(scope="module")
def under_fsdp() -> list[dict[str, Found]]:
    return on_ranks(find_fsdp)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


@pytest.mark.parametrize("case", ddp_cases())
def test_ddp_trains_identically(case: str, under_ddp: list[dict[str, Found]]) -> None:
    for found in (rank[case] for rank in under_ddp):
        assert not differing(found.plain, found.planned)
        assert found.saved_bytes[1] < found.saved_bytes[0], "nothing was recomputed"


@pytest.mark.parametrize("case", fsdp_cases())
def test_fsdp2_trains_identically(case: str, under_fsdp: list[dict[str, Found]]) -> None:
    for found in (rank[case] for rank in under_fsdp):
        assert not differing(found.plain, found.planned)
        assert found.saved_bytes[1] < found.saved_bytes[0], "nothing was recomputed"


@pytest.mark.parametrize("case", [case for case in fsdp_cases() if case not in UNSHARDED_ADDS_OTHERWISE])
def test_fsdp2_trains_as_without_sharding(case: str, under_fsdp: list[dict[str, Found]]) -> None:
    for found in (rank[case] for rank in under_fsdp):
        assert not differing(found.unsharded, found.planned)


@pytest.mark.parametrize("case", fsdp_cases())
def test_recomputing_gathers_no_weight_again(case: str, under_fsdp: list[dict[str, Found]]) -> None:
    """It runs on the weights that are gathered for the backward pass anyway."""
    for found in (rank[case] for rank in under_fsdp):
        assert 0 < found.all_gathers[1] == found.all_gathers[0]


def test_gathering_within_a_unit_does_not_hinder_saving(under_fsdp: list[dict[str, Found]]) -> None:
    """The forward gathers weights where the recomputation finds them gathered; their ops do not count."""
    flat, nested = (under_fsdp[0][case].products for case in ("kept gathered", "shards in a shard"))
    assert flat == nested


def test_ranks_have_other_losses_and_the_same_gradients(
    under_ddp: list[dict[str, Found]], under_fsdp: list[dict[str, Found]]
) -> None:
    """The comparisons above would hold, too, if the ranks did not talk."""
    for ranks in (under_ddp, under_fsdp):
        first, second = (rank["tied weight"].planned for rank in ranks)
        assert not torch.equal(first["loss 0 of step 0"], second["loss 0 of step 0"])
        assert all(torch.equal(first[name], second[name]) for name in first if name.startswith("gradient"))
