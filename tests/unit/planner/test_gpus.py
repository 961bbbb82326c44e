"""GPUs compared as one would choose: in the usual precision beside strict fp32, with intervals and prices."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import brimful as bf
from brimful.devices import find_device
from brimful.errors import FileFormatError, UnknownNameError, UsageError
from brimful.planner import GpuSurvey, prices_of
from brimful.planner.gpus import usual_precision
from brimful.settings import Precision
from brimful.utils.quantities import MIB

NAMES = ["L4", "A100 80GB SXM", "T4", "GTX 1080 Ti"]


def products() -> bf.Job:
    """Large matrix products, whose rates decide the time."""
    return bf.Job(
        model=lambda: nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 256, 2048),
    )


@pytest.fixture(scope="module")
def survey() -> GpuSurvey:
    return bf.gpus(products(), global_batch_size=16, devices=NAMES, prices={"L4": 0.8, "Tesla T4": 0.36})


class Wide(nn.Module):
    """Residual blocks whose hidden layers are much wider than what they pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 8192), nn.GELU(), nn.Linear(8192, 256)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("names", [["RTX 3060 12GB", "GTX 1080 Ti"], ["GTX 1080 Ti", "RTX 3060 12GB"]])
def test_the_half_type_that_would_fit_is_one_that_the_gpu_has(names: list[str]) -> None:
    """Both run the same ops in fp32, of a job that has no batch of 2 samples to compare them by."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert len(batch) % 2 == 1
        return model(batch).square().mean()

    job = bf.Job(model=Wide, loss=loss, batch=lambda n: torch.zeros(()).expand(n, 100_000, 256))
    changes = {fit.device: fit.change for fit in bf.gpus(job, global_batch_size=9, devices=names)}
    assert changes == {"RTX 3060 12GB": "bf16", "GTX 1080 Ti": "fp16"}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("A100 80GB SXM", Precision.BF16),
        ("RTX 3060 Laptop", Precision.BF16),
        ("T4", Precision.FP16),
        ("V100 16GB PCIe", Precision.FP16),
        ("GTX 1080 Ti", Precision.FP32),
        ("GTX 1660 Ti", Precision.FP32),
        ("K80", Precision.FP32),
    ],
)
def test_the_usual_precision_is_the_fast_one_that_the_hardware_has(name: str, precision: Precision) -> None:
    assert usual_precision(find_device(name)) is precision


def test_an_a100_is_behind_an_l4_in_strict_fp32_alone_and_the_table_says_why(survey: GpuSurvey) -> None:
    l4, a100 = survey[0], survey[1]
    assert l4.predicted_samples_per_second is not None
    assert l4.predicted_samples_per_second > (a100.predicted_samples_per_second or 0)
    assert l4.usual is not None
    assert a100.usual is not None
    assert (a100.usual.predicted_samples_per_second or 0) > 2 * (l4.usual.predicted_samples_per_second or 0)
    text = str(survey)
    assert text.index("A100 80GB SXM") < text.index("  L4 ")
    assert "fp32 is strict: TF32 is off" in text
    assert "bf16 autocast" in text


def test_the_table_calls_the_batch_as_a_whole_the_baseline(survey: GpuSurvey) -> None:
    heading, *rows = str(survey).splitlines()[1:]
    assert heading.split()[:3] == ["GPU", "memory", "baseline"]
    assert rows[0].endswith("  fp32, bf16: baseline")
    assert "plain" not in str(survey)


def test_each_column_of_the_table_has_its_own_name_and_how_has_the_precisions_in_their_order() -> None:
    survey = bf.gpus(products(), global_batch_size=16, devices=["L4"])
    (fit,) = survey
    heading, row, legend = str(survey).splitlines()[1:4]
    names = re.split(r" {2,}", heading.strip())
    assert names == [
        "GPU", "memory", "baseline", "fp32 peak", "fp32 samples/s (90 %)", "usual", "usual peak",
        "usual samples/s (90 %)", "how",
    ]  # fmt: skip
    assert row.endswith("  fp32, bf16: baseline")
    assert legend.startswith("  baseline: peak of the whole batch at once")

    assert fit.settings is not None
    assert fit.usual is not None
    halved = replace(fit.settings, micro_batch_size=8, gradient_accumulation_steps=2)
    for changed, how in (
        (replace(fit, settings=halved), "fp32: micro-batch 8 × 2, everything kept; bf16: baseline"),
        (replace(fit, settings=None, predicted_peak_device_bytes=None), "bf16: baseline"),
        (replace(fit, usual=None), "fp32: baseline"),
    ):
        shown = str(GpuSurvey([changed], job="x", global_batch_size=16))
        assert shown.splitlines()[2].endswith(f"  {how}")


def test_the_usual_precision_agrees_with_a_survey_in_it(survey: GpuSurvey) -> None:
    (alone,) = bf.gpus(products(), global_batch_size=16, devices=["A100 80GB SXM"], precision="bf16")
    usual = survey[1].usual
    assert usual is not None
    assert alone.usual is None
    assert usual.precision is Precision.BF16
    for field in ("settings", "predicted_peak_device_bytes", "predicted_step_seconds"):
        assert getattr(usual, field) == getattr(alone, field)
    assert usual.predicted_step_seconds_interval == alone.predicted_step_seconds_interval


def test_intervals_of_speed_hold_the_speed_and_agree_with_an_estimate(survey: GpuSurvey) -> None:
    for fit in survey:
        low, high = fit.predicted_samples_per_second_interval or (0, 0)
        assert 0 < low < (fit.predicted_samples_per_second or 0) < high
    estimate = bf.estimate(products(), "L4", micro_batch_size=16)
    assert survey[0].predicted_step_seconds_interval == pytest.approx(estimate.predicted_step_seconds_interval)


def test_costs_are_price_times_time(survey: GpuSurvey) -> None:
    l4 = survey[0]
    assert l4.usual is not None
    for fit in (l4, l4.usual):
        assert fit.predicted_cost_per_step == pytest.approx(0.8 * (fit.predicted_step_seconds or 0) / 3600)
        assert fit.predicted_cost_per_million_samples == pytest.approx(
            (fit.predicted_cost_per_step or 0) * 1e6 / 16
        )
    assert survey[1].predicted_cost_per_step is None
    assert survey[2].price_per_hour == 0.36


def sorted_by(survey: GpuSurvey, sort: str) -> list[str]:
    return [fit.device for fit in GpuSurvey(survey, job="x", global_batch_size=16, sort=sort)]


def test_orders_by_speed_memory_and_cost_put_what_fits_first(survey: GpuSurvey) -> None:
    assert sorted_by(survey, "speed") == ["A100 80GB SXM", "L4", "T4", "GTX 1080 Ti"]
    assert sorted_by(survey, "memory") == ["A100 80GB SXM", "L4", "T4", "GTX 1080 Ti"]
    costs = {fit.device: fit.best.predicted_cost_per_million_samples for fit in survey}
    cheapest = sorted(["L4", "T4"], key=lambda name: costs[name] or 0)
    assert sorted_by(survey, "cost")[:2] == cheapest
    assert [fit.device for fit in survey] == NAMES
    without = GpuSurvey([fit.with_price(None) for fit in survey], job="x", global_batch_size=16)
    with pytest.raises(UsageError, match="--prices FILE"):
        sorted_by(without, "cost")
    with pytest.raises(UnknownNameError, match="'price'"):
        sorted_by(survey, "price")


def test_what_does_not_fit_comes_last_whatever_the_order() -> None:
    tiny = replace(find_device("A100 80GB SXM"), capacity_bytes=600 * MIB, name="tiny A100")
    survey = bf.gpus(
        products(),
        global_batch_size=16,
        devices=[tiny, "T4"],
        sort="cost",
        prices={"tiny A100": 0.01, "T4": 9.0},
    )
    assert [fit.device for fit in survey] == ["T4", "tiny A100"]
    assert survey[1].best.settings is None
    assert "does not fit" in str(survey)


def test_a_described_gpu_is_compared_and_priced_by_its_name() -> None:
    mine = "name=Mine,memory=8GiB,bandwidth=300GB,tflops=9"
    (fit,) = bf.gpus(products(), global_batch_size=16, devices=[mine], prices={"Mine": 0.1})
    assert (fit.device, fit.price_per_hour, fit.confidence) == ("Mine", 0.1, "low")
    assert "low confidence: Mine" in str(bf.gpus(products(), global_batch_size=16, devices=[mine]))


def test_a_card_that_torch_has_no_kernels_for_is_listed_with_these_words() -> None:
    survey = bf.gpus(products(), global_batch_size=16, devices=["K80", "L4"])
    assert "no build of torch 2.13 has kernels below 5.0" in str(survey)
    assert [fit.note is None for fit in survey] == [False, True]


def test_a_survey_is_pickled_with_its_order(survey: GpuSurvey) -> None:
    ordered = GpuSurvey(survey, job="x", global_batch_size=16, sort="memory")
    again = pickle.loads(pickle.dumps(ordered))
    assert (tuple(again), again.sort, str(again)) == (tuple(ordered), "memory", str(ordered))


@pytest.mark.parametrize(
    "text",
    [
        "gpu,price_per_hour\nL4,0.8\nNVIDIA A100-SXM4-80GB,1.89\n",
        "\ufeffprovider,gpu,price_per_hour\nx,L4,0.8\ny,A100 80GB SXM,1.89\n",
        json.dumps({"L4": 0.8, "A100 80GB SXM": 1.89}),
    ],
    ids=["csv", "csv with other columns", "json"],
)
def test_prices_are_read_from_csv_and_json_by_any_name_of_a_gpu(tmp_path: Path, text: str) -> None:
    (tmp_path / "prices").write_text(text, encoding="utf-8")
    assert prices_of(tmp_path / "prices", []) == {"L4": 0.8, "A100 80GB SXM": 1.89}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu,price_per_hour\nRTX 3091,0.8\n", ["RTX 3091", "Nearest", "RTX 3090"]),
        ("gpu,price_per_hour\nA100,0.8\n", ["several cards", "Say which"]),
        ("gpu,price_per_hour\nL4,$0.8\n", ["'L4'", "$0.8", "without a currency"]),
        ("gpu,price_per_hour\nL4,-1\n", ["'-1'"]),
        ("gpu,price_per_hour\nL4,nan\n", ["'nan'"]),
        ("gpu,price_per_hour\nL4\n", ["None"]),
        ("gpu,price_per_hour\nL4,1\nNVIDIA L4,2\n", ["L4 has two prices"]),
        ("name,price\nL4,1\n", ["no column gpu and no price_per_hour"]),
        ("", ["no column gpu"]),
        ("[1]", ["JSON object"]),
        ('{"L4": 1, "T4": 1, "L4": 2}', ["L4 has two prices, 1 and 2"]),
        ('{"cpu": 1}', ["'cpu' is not a GPU"]),
        ("gpu,price_per_hour\ncpu,1\n", ["'cpu' is not a GPU"]),
        ('{"L4": true}', ["True"]),
        ('{"L4": {"per hour": 1}}', ["'L4'", "per hour"]),
        ('{"L4": ', ["prices"]),
    ],
)
def test_prices_that_cannot_be_are_refused_with_the_name_and_the_nearest(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    (tmp_path / "prices").write_text(text)
    with pytest.raises(UsageError) as caught:
        prices_of(tmp_path / "prices", [])
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("key", [3090, None, ("L4",)])
def test_a_key_of_prices_that_is_not_text_is_refused_with_its_type(key: object) -> None:
    with pytest.raises(
        UsageError, match=f"the prices: the key .* is of type {type(key).__name__}, not the name"
    ):
        prices_of({key: 0.3}, ["L4"])


def test_a_file_of_prices_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot be read"):
        prices_of(tmp_path / "none.csv", [])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="UTF-8"):
        prices_of(tmp_path / "binary", [])


def test_a_survey_of_batches_of_many_lengths_says_of_which_it_speaks() -> None:
    def batch(samples: int) -> torch.Tensor:
        return torch.randint(9, (samples, int(torch.randint(5, 50, ()))))

    job = bf.Job(model=lambda: nn.Embedding(9, 4), loss=lambda m, x: m(x).square().mean(), batch=batch)
    survey = bf.gpus(job, global_batch_size=8, devices=["T4"])
    assert "Batches differ: dimension 1" in survey.notes[0]
    assert survey.notes[0] in str(survey)
    assert pickle.loads(pickle.dumps(survey)).notes == survey.notes


def test_a_batch_whose_loss_is_not_made_of_those_of_its_parts_is_not_split() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        embedded = F.normalize(model(batch), dim=1)
        return F.cross_entropy(embedded @ embedded.T, torch.arange(len(batch)))

    job = bf.Job(model=lambda: nn.Linear(64, 64), loss=loss, batch=lambda n: torch.randn(n, 64))
    survey = bf.gpus(job, global_batch_size=20_000, devices=["RTX 3090"])
    (fit,) = survey
    assert fit.settings is not None
    assert fit.settings.gradient_accumulation_steps == 1
    assert fit.predicted_plain_peak_device_bytes > 20_000**2 * 4
    assert "Micro-batches are not considered" in str(survey)
