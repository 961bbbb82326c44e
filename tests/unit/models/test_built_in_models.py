"""Built-in models on the meta device and on fake tensors, where size costs nothing."""

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.job import Job
from brimful.models import architecture_names, find_architecture

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach for a hub

FROM_TRANSFORMERS = ("bert", "xlm", "gpt2", "llama", "vit")
without_transformers = importlib.util.find_spec("transformers") is None

# Published: those of the checkpoints that the modules name, with the head for the given labels. BERT-base:
# 109,482,240 + 2 × 769 for the classifier; XLM-R has a dense layer ahead of its classifier and no pooler;
# VGG and ResNet as torchvision counts them; U-Net: the sum of its layers, see test_unet_by_hand.
PARAMETERS = {
    "bert-base": 109_483_778,
    "bert-large": 335_143_938,
    "xlm-roberta-base": 278_045_186,
    "xlm-roberta-large": 559_892_482,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3-8b": 8_030_261_248,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "unet": 31_037_698,
}
CAPTURED = ("bert-base", "xlm-roberta-base", "gpt2", "llama-3.2-1b", "vit-base", "vgg16", "resnet50", "unet")


def needs(names):
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                without_transformers and name.startswith(FROM_TRANSFORMERS), reason="needs transformers"
            ),
        )
        for name in names
    ]


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device as it registers, as capture does."""
    register = nn.Module.register_parameter

    def register_on_meta(module, name, parameter):
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def fake_model(job: Job, mode: FakeTensorMode) -> nn.Module:
    """The job's model with fake parameters on the cpu; shared ones stay shared."""
    with parameters_on_meta():
        model = job.model()
    fakes: dict[nn.Parameter, nn.Parameter] = {}
    with mode:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter not in fakes:
                    fakes[parameter] = nn.Parameter(torch.empty(parameter.shape))
                module._parameters[name] = fakes[parameter]
    return model.train()


class Operations(TorchDispatchMode):
    """The names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def test_every_built_in_has_a_published_count():
    assert set(architecture_names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", needs(PARAMETERS))
def test_parameter_count_is_the_published_one(name):
    with torch.device("meta"):
        model = find_architecture(name).model()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", needs(["gpt2", "llama-3.2-1b", "vit-base", "unet"]))
def test_a_model_builds_while_each_parameter_moves_to_meta_as_it_registers(name):
    with parameters_on_meta():
        model = find_architecture(name).model()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_unet_by_hand():
    """Convolutions of 9·in·out, two values a channel for BatchNorm, up-convolutions of 4·in·out + out."""

    def double(inputs, outputs):
        return 9 * inputs * outputs + 9 * outputs * outputs + 4 * outputs

    down = double(3, 64) + sum(double(width // 2, width) for width in (128, 256, 512, 1024))
    up = sum(4 * width * width // 2 + width // 2 + double(width, width // 2) for width in (1024, 512, 256, 128))
    assert down + up + 64 * 2 + 2 == PARAMETERS["unet"]


@pytest.mark.parametrize("name", needs(CAPTURED))
def test_a_step_runs_on_fake_tensors(name):
    job = find_architecture(name)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = fake_model(job, mode)
    with mode:
        loss = job.loss(model, job.batch(2))
        loss.backward()
    assert isinstance(loss, FakeTensor)
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.skipif(without_transformers, reason="needs transformers")
def test_a_causal_model_takes_the_causal_kernel_without_a_mask_on_fake_tensors():
    """A mask of (B, 1, T, T) would take memory that the real step does not, and another kernel."""
    job = find_architecture("llama-3.2-1b", num_hidden_layers=1, sequence_length=64)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = fake_model(job, mode)
    with mode, Operations() as operations:
        job.loss(model, job.batch(2))
    assert "_scaled_dot_product_flash_attention_for_cpu" in operations.names
    assert not {"where", "masked_fill", "logical_and", "bitwise_and"} & operations.names


@pytest.mark.skipif(without_transformers, reason="needs transformers")
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama-3.2-1b", marks=pytest.mark.slow)])
def test_the_loss_is_that_of_the_model_with_transformers_own_attention(name):
    torch.manual_seed(0)
    job = find_architecture(name, num_hidden_layers=1, sequence_length=8)
    model, batch = job.model().eval(), job.batch(2)
    loss = job.loss(model, batch)
    model.set_attn_implementation("sdpa")
    assert torch.equal(loss, job.loss(model, batch))


@pytest.mark.skipif(without_transformers, reason="needs transformers")
def test_a_language_models_count_is_that_of_the_tokens_in_its_mean():
    torch.manual_seed(0)
    job = find_architecture("gpt2", num_hidden_layers=1, sequence_length=8)
    model, batch = job.model().eval(), job.batch(2)
    assert job.count(batch) == 2 * 7
    batch["labels"][0, 3:6] = -100
    assert job.count(batch) == 2 * 7 - 3
    parts = [{key: entry[row : row + 1] for key, entry in batch.items()} for row in range(2)]
    weighted = sum(job.loss(model, part) * job.count(part) for part in parts) / job.count(batch)
    torch.testing.assert_close(job.loss(model, batch), weighted)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=needs([name])[0].marks)
        for name, options in [
            ("bert-base", {"sequence_length": 8, "num_hidden_layers": 1, "num_labels": 3}),
            ("gpt2", {"sequence_length": 8, "num_hidden_layers": 1}),
            ("vit-base", {"image_size": 32, "num_hidden_layers": 1, "num_classes": 5}),
            ("resnet50", {"image_size": 33, "num_classes": 5}),
            ("unet", {"image_size": 32, "num_classes": 3}),
        ]
    ],
)
def test_a_real_step_of_one_sample_gives_a_finite_loss_and_gradients(name, options, capfd):
    torch.manual_seed(0)
    job = find_architecture(name, **options)
    model = job.model().train()
    loss = job.loss(model, job.batch(1))
    loss.backward()
    assert capfd.readouterr().err == ""  # transformers warns there
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", needs(architecture_names()))
def test_a_batch_has_the_samples_asked_for(name):
    entries = find_architecture(name).batch(3).values()
    assert {len(entry) for entry in entries} == {3}


def test_scipy_and_torchao_are_imported_when_their_functions_are_called() -> None:
    code = (
        "import sys\n"
        "from brimful.models.huggingface import _IMPORTED_WHEN_CALLED, import_transformers\n"
        "transformers = import_transformers('a model')\n"
        "transformers.BertForSequenceClassification\n"
        "assert not {'scipy', 'torchao', *_IMPORTED_WHEN_CALLED} & sys.modules.keys()\n"
        "from transformers.loss.loss_for_object_detection import linear_sum_assignment\n"
        "rows, columns = linear_sum_assignment([[1, 2], [1, 4]])\n"
        "assert [*rows] == [0, 1] and [*columns] == [1, 0]\n"
        "from scipy import optimize\n"
        "assert optimize.minimize"
    )
    for name in ("scipy", "torchao", "transformers"):
        pytest.importorskip(name)
    subprocess.run([sys.executable, "-c", code], check=True)
