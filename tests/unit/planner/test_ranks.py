"""Plans for several ranks: what each takes, and which way to train is chosen."""

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.errors import InfeasibleError, UnknownNameError, UsageError
from brimful.prediction import estimate_trace
from brimful.profiling import device_record
from brimful.settings import Parallelism, Settings
from brimful.trace import per_rank_trace

WIDTH, BLOCKS = 256, 6


def make_job() -> bf.Job:
    def model() -> nn.Module:
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS))
        return nn.Sequential(nn.Sequential(*blocks), nn.Linear(WIDTH, 1))

    return bf.Job(
        name="row",
        model=model,
        loss=lambda model, x: model(x).mean(),
        batch=lambda n: torch.zeros(n, WIDTH),
        optimizer="adamw",
    )


def planned(ranks: int, **options: object) -> bf.Plan:
    device = options.pop("device", "A100 80GB SXM")
    return bf.plan(make_job(), device, **({"global_batch_size": 64, "world_size": ranks} | options))


def parameter_bytes() -> int:
    return sum(parameter.nbytes for parameter in make_job().model().parameters())


def test_the_global_batch_is_micro_batch_times_accumulation_times_ranks() -> None:
    for ranks in (1, 2, 8):
        settings = planned(ranks).settings
        assert settings.global_batch_size == 64
        assert settings.world_size == ranks


def test_ddp_holds_gradients_once_and_twice_under_accumulation() -> None:
    """Once in buckets; with several micro-batches also by themselves until they are averaged."""
    options = {"parallelism": "ddp", "optimizer": "sgd", "recompute": "none", "device": "cpu"}
    alone, one, several = (
        planned(ranks, micro_batch_size=micro_batch, **options).predicted_peak_allocated_bytes
        for ranks, micro_batch in ((1, 32), (2, 32), (2, 16))
    )
    assert abs(one - alone) < 0.15 * parameter_bytes()
    assert several - one > 0.7 * parameter_bytes()


def test_fsdp2_divides_parameters_gradients_and_state() -> None:
    options = {"parallelism": "fsdp2", "recompute": "none", "device": "cpu", "micro_batch_size": 4}
    two, eight = (planned(ranks, **options).predicted_peak_allocated_bytes for ranks in (2, 8))
    # Parameters, gradients and two states of AdamW: a half less an eighth of each.
    assert two - eight == pytest.approx(4 * parameter_bytes() * (1 / 2 - 1 / 8), rel=0.25)


def test_zero_divides_state_then_gradients_then_parameters() -> None:
    """What a rank of eight is spared of two's: a half less an eighth of each."""
    options = {
        "recompute": "none",
        "device": "cpu",
        "micro_batch_size": 4,
        "optimizer_implementation": "for-loop",
    }
    spared = [
        planned(2, parallelism=name, **options).predicted_peak_allocated_bytes
        - planned(8, parallelism=name, **options).predicted_peak_allocated_bytes
        for name in ("zero1", "zero2", "zero3")
    ]
    part = parameter_bytes() * (1 / 2 - 1 / 8)
    # two states of AdamW and the part that is stepped; gradients; with what is gathered, parameters
    assert spared[0] == pytest.approx(3 * part, rel=0.05)
    assert spared[1] == pytest.approx(4 * part, rel=0.1)
    assert spared[2] >= 3.9 * part


def test_the_interval_of_zero_on_cpus_has_room_for_what_gloo_holds() -> None:
    device = device_record(torch.device("cpu"))
    how = Settings(micro_batch_size=4, world_size=2, parallelism=Parallelism.ZERO3)
    estimate = estimate_trace(per_rank_trace(capture_step(make_job(), how, device, steps=2)), device)
    least_room = estimate.predicted_device_interval_bytes[1] - estimate.predicted_peak_device_bytes
    assert least_room >= 2 * parameter_bytes()


def test_zero_is_chosen_by_name_alone_and_not_with_every_optimizer() -> None:
    assert not planned(2).settings.parallelism.is_zero
    with pytest.raises(UsageError, match="adafactor cannot be trained under DeepSpeed's ZeRO"):
        planned(2, parallelism="zero2", allow_optimizers="adafactor")


@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
def test_one_rank_has_the_whole_model_whatever_is_asked_and_says_so(name: str) -> None:
    with pytest.warns(UserWarning, match=f"parallelism='{name}' divides nothing"):
        alone = planned(1, parallelism=name)
    assert alone.settings.parallelism is Parallelism.DDP
    with pytest.raises(UsageError, match=r"on several ranks\. With one rank, offload_optimizer"):
        planned(1, offload_parameters=True)


def test_where_the_whole_model_does_not_fit_it_is_divided() -> None:
    whole = planned(8, parallelism="ddp", device="cpu").predicted_peak_device_bytes
    chosen = planned(8, device="cpu", budget=int(0.7 * whole))
    assert chosen.settings.parallelism is Parallelism.FSDP2
    assert chosen.predicted_peak_device_bytes <= 0.7 * whole
    with pytest.raises(InfeasibleError):
        planned(8, parallelism="ddp", device="cpu", budget=int(0.7 * whole))


def test_a_slower_network_takes_longer() -> None:
    options = {"parallelism": "ddp", "recompute": "none", "micro_batch_size": 4}
    inside = planned(16, **options).predicted_step_seconds
    between = planned(16, num_nodes=2, **options).predicted_step_seconds
    slower = planned(16, num_nodes=2, network="1GB", **options).predicted_step_seconds
    assert inside < between < slower


def test_a_bridge_of_nvlink_joins_two() -> None:
    bridged, joined = find_device("RTX 3090"), find_device("A100 80GB SXM")
    assert bridged.peer_bytes_per_second(2, 1) > bridged.peer_bytes_per_second(4, 1)
    assert joined.peer_bytes_per_second(2, 1) == joined.peer_bytes_per_second(8, 1)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UsageError, match="64 cannot be divided evenly among 7 ranks"):
        planned(7)
    with pytest.raises(UsageError, match="8 ranks cannot be divided evenly among 3 nodes"):
        planned(8, num_nodes=3)
    with pytest.raises(UsageError, match="a rank's part of the global batch, 8"):
        planned(8, micro_batch_size=16)
    with pytest.raises(UnknownNameError, match="ddp"):
        planned(2, parallelism="dpd")


def test_ranks_of_a_machine_without_gpus_share_its_memory() -> None:
    whole = planned(1, device="cpu").budget_bytes
    assert planned(4, device="cpu").budget_bytes == whole // 4
    assert planned(4, device="cpu", num_nodes=2).budget_bytes == whole // 2
