"""Steps compiled by Inductor, predicted without compiling or running them, beside measured ones on this CPU."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._dynamo import device_interface
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._subclasses.fake_tensor import FakeTensorMode

import brimful as bf
from brimful.capture import capture_step, inductor, inductor_cuda
from brimful.capture.recording.modules import ModuleCalls
from brimful.cost.roofline import Roofline
from brimful.errors import CaptureError, UsageError
from brimful.memory import predict_memory
from brimful.settings import Action, Compile, Parallelism, Precision, UnitAction
from brimful.trace import Category, Trace
from brimful.transforms import apply_units
from brimful.transforms.compiled import CompiledCall
from helpers.captured_jobs import A100, CPU

# The compiler reads `.grad` of what it is given, and hides torch's warning; as an error it comes through.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

WITHIN = 0.01
"""Fraction by which predicted peaks may be off: what kernels of oneDNN hold inside is the only known cause."""


def tiny(family: str) -> bf.Job:
    """A language model of two layers."""
    common = {"vocab_size": 500, "attn_implementation": "sdpa"}
    makers: dict[str, Callable[[], nn.Module]] = {
        "bert": lambda: hf.BertForMaskedLM(
            hf.BertConfig(
                hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, **common
            )
        ),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=2, n_head=2, **common)),
        "llama": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=64,
                intermediate_size=176,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                **common,
            )
        ),
    }

    def batch(samples: int) -> dict[str, Tensor]:
        ids = torch.arange(samples * 64).reshape(samples, 64) % 500
        return {"input_ids": ids, "labels": ids}

    return bf.Job(model=makers[family], loss=lambda model, batch: model(**batch).loss, batch=batch)


class Various(nn.Module):
    """What asks most of a GPU that is not there: channels-last convolutions, attention, a permutation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.attention, self.dropout = nn.MultiheadAttention(32, 2, batch_first=True), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        images = x.reshape(-1, 8, 8, 32).contiguous(memory_format=torch.channels_last)
        images = self.norm(self.conv(images)).relu()
        rows = images.reshape(x.shape)
        mixed = self.attention(rows, rows, rows, need_weights=False)[0]
        return x + self.dropout(mixed)[:, torch.randperm(64)]


class Breaks(nn.Module):
    """A block whose graph breaks, as it prints."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + self.inner(x).tanh()


class Block(nn.Module):
    """What Inductor fuses, saves and draws: a norm, products, an activation, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def blocks(*classes: type[nn.Module]) -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(*(each() for each in classes)),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.rand(n, 64, 32),
        optimizer="sgd",
    )


def settings_of(*units: str, **others: Any) -> bf.Settings:
    kept = tuple(UnitAction(fqn=unit, action=Action.KEEP) for unit in units)
    return bf.Settings(**{"micro_batch_size": 8, "units": kept, "compile": Compile.UNITS} | others)


def capture(job: bf.Job, settings: bf.Settings) -> Trace:
    return capture_step(job, settings, CPU, steps=1)


def peak(trace: Trace) -> int:
    return predict_memory(trace).peak_allocated_bytes


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kernels are compiled without optimization, which takes less time and as much memory.

    They are compiled by this code, and not found in the cache of an earlier run.
    """
    monkeypatch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_the_peak_of_compiled_units_is_predicted(family: str) -> None:
    found = bf.estimate(tiny(family), "cpu", micro_batch_size=4, compile="units")
    layers = [unit.fqn for unit in found.settings.units if unit.fqn.endswith((".0", ".1"))]
    assert len(layers) == 2
    assert not [note for note in found.uncertain_ops if "eagerly" in note]
    measured = bf.measure(tiny(family), found.settings, "cpu")
    assert found.predicted_peak_allocated_bytes == pytest.approx(
        measured.measured_peak_allocated_bytes, rel=WITHIN
    )
    eager = bf.estimate(tiny(family), "cpu", micro_batch_size=4)
    assert found.predicted_peak_allocated_bytes < eager.predicted_peak_allocated_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_the_peak_of_a_compiled_model_is_predicted() -> None:
    found = bf.estimate(tiny("bert"), "cpu", micro_batch_size=4, compile="model")
    measured = bf.measure(tiny("bert"), found.settings, "cpu")
    assert found.predicted_peak_allocated_bytes == pytest.approx(
        measured.measured_peak_allocated_bytes, rel=WITHIN
    )


@pytest.fixture(scope="module")
def compiled() -> Iterator[Trace]:
    """Two blocks compiled by themselves."""
    return capture(blocks(Block, Block), settings_of("0", "1"))


def default_stance_ignored(stance: str, set_stance: Callable[..., Any] = torch.compiler.set_stance) -> Any:
    return nullcontext() if stance == "default" else set_stance(stance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (inductor, "originals_in_place", nullcontext),
        (ModuleCalls, "inside", lambda *_: nullcontext()),
        (torch.compiler, "set_stance", default_stance_ignored),
        (torch._C, "DisableTorchFunction", nullcontext),
        (inductor.CapturedInductor, "_modes", lambda _: nullcontext()),
        (inductor, "_ON_FAKES", {"empty_strided_cpu": inductor._empty_strided}),
        (inductor, "_ON_FAKES", {"reinterpret_tensor": inductor._reinterpreted}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_patch_is_needed(
    owner: Any, name: str, instead: Any, compiled: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If torch changes so that a patch does nothing, this shows it, and not a user's plan.

    Without `_disable_current_modes` the process ends.
    """
    monkeypatch.setattr(owner, name, instead)
    try:
        found = capture(blocks(Block, Block), settings_of("0", "1"))
    except CaptureError:
        return
    assert (found.ops, found.compiled_lines) != (compiled.ops, compiled.compiled_lines)


@pytest.mark.slow
def test_the_compiler_keeps_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is given copies: in a real step what it kept is freed before the steps that count."""
    settings = settings_of("model.layers.0", "model.layers.1")
    right = peak(capture(tiny("llama"), settings))

    def at_once(call: Any, compiled: Any, args: Any, kwargs: Any) -> Any:
        with call._inductor.calling(call._module):
            return CompiledCall._run(call, compiled, args, kwargs)

    monkeypatch.setattr(inductor._CapturedCall, "_run", at_once)
    assert peak(capture(tiny("llama"), settings)) > right


def test_alike_units_are_compiled_once_and_read_what_fused_kernels_move(compiled: Trace) -> None:
    fused = [op for op in compiled.ops if op.name.startswith("inductor_kernels.")]
    assert {op.module for op in fused} == {"0", "1"}
    assert all(op.read_bytes and op.written_bytes for op in fused)
    assert sum(op.flops for op in compiled.ops if op.module == "1") == sum(
        op.flops
        for op in capture(blocks(Block, Block), settings_of(compile=Compile.NONE)).ops
        if op.module[:1] == "1"
    )


def test_nothing_of_a_capture_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1500)
    before = len(PyCodeCache.modules)
    job = blocks(Block, Block)
    assert capture(job, settings_of("0", "1")) == capture(job, settings_of("0", "1"))
    assert len(PyCodeCache.modules) == before
    assert sys.getrecursionlimit() == 1500
    sys.setrecursionlimit(limit)
    assert not {"fxgraph", "aotautograd"} & {path.name for path in tmp_path.iterdir()}


class Numbered(Block):
    """A block that reads its number, for which it is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.number = next(NUMBERS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.number * self.down(self.up(x))


NUMBERS = count(2)


@pytest.mark.slow
def test_more_graphs_than_torch_compiles_by_default() -> None:
    total = torch._dynamo.config.recompile_limit + 1
    trace = capture(blocks(*[Numbered] * total), settings_of(*map(str, range(total))))
    assert not trace.uncertain_ops


def test_what_breaks_the_graph_runs_eagerly_with_a_note() -> None:
    trace = capture(blocks(Block, Breaks), settings_of("0", "1"))
    assert [note for note in trace.uncertain_ops if note.startswith("'1' runs eagerly")]
    assert {op.module for op in trace.ops if op.name.startswith("inductor_kernels.")} == {"0"}
    alone = capture(blocks(Breaks), settings_of("0"))
    assert alone.ops == capture(blocks(Breaks), settings_of(compile=Compile.NONE)).ops


def test_without_a_cpp_compiler_steps_are_predicted_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    job, settings = blocks(Block), settings_of("0")
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert not capture(job, settings).uncertain_ops
        with pytest.raises(UsageError, match=r"needs a C\+\+ compiler on a CPU.*no-such-compiler"):
            bf.measure(job, settings, "cpu")


def on_gpu(job: bf.Job, settings: bf.Settings) -> Trace:
    return capture_step(job, settings, A100, steps=1)


def saved_bytes(trace: Trace) -> int:
    return sum(each.size_bytes for each in trace.storages if each.category is Category.SAVED_TENSORS)


@pytest.fixture(scope="module")
def compiled_for_gpu() -> Trace:
    """Two blocks compiled by themselves."""
    return on_gpu(blocks(Block, Block), settings_of("0", "1"))


def test_a_gpu_needs_neither_cuda_nor_triton(compiled_for_gpu: Trace, compiled: Trace) -> None:
    """Its kernels are Triton's, and forward saves what it saves on a CPU, where that is measured."""
    kernels = [op for op in compiled_for_gpu.ops if op.name.startswith("inductor_kernels.")]
    assert {op.name.split(".")[1].split("_")[0] for op in kernels} == {"triton"}
    assert saved_bytes(compiled_for_gpu) == saved_bytes(compiled)
    assert "triton" not in sys.modules
    assert not torch.cuda.is_available()
    norm = kernels[0]
    samples, weights, row_sums = 4 * 8 * 64 * 32, 4 * 2 * 32, 4 * 8 * 64
    assert norm.name == "inductor_kernels.triton_per_fused_native_layer_norm_0.default"
    assert norm.written_bytes == samples + 2 * row_sums
    assert norm.read_bytes == samples + weights + row_sums  # which it updates in place


class WithLoss(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(super().forward(x), x.new_zeros(len(x), dtype=torch.long))


def test_a_model_with_its_loss_inside_is_compiled_under_autocast() -> None:
    """Cross entropy, which CUDA's autocast lists and the CPU's does not, runs under the Python dispatcher."""
    job = bf.Job(model=WithLoss(8, 8), loss=lambda model, x: model(x), batch=torch.randn(8, 8), optimizer="sgd")
    trace = on_gpu(job, settings_of(compile=Compile.MODEL, precision=Precision.BF16))
    assert not trace.uncertain_ops
    assert any(op.compiled for op in trace.ops)


def test_compiled_ops_cost_a_launch_and_no_python(compiled_for_gpu: Trace) -> None:
    roofline = Roofline(A100, Precision.FP32)
    for op in compiled_for_gpu.ops:
        if op.compiled:
            allocates = op.name == "aten.empty_strided.default"
            assert roofline.host_seconds(op) == (0.0 if allocates else A100.launch_seconds)
    assert {op.module for op in compiled_for_gpu.ops if op.compiled} == {"0", "1"}


@pytest.fixture(scope="module")
def various_for_gpu() -> Trace:
    """What asks most of a GPU that is not there, compiled in bf16."""
    return on_gpu(blocks(Various), settings_of("0", precision="bf16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "patch",
    [
        "get_device_properties",
        "has_triton",
        "triton_hash_with_backend",
        *inductor_cuda._LINES,
        "_guards",
        "_interface",
        "triton_importable",
        "empty_strided_cuda",
    ],
)
def test_each_patch_for_a_gpu_is_needed(
    patch: str, various_for_gpu: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU: if torch changes, this shows it."""
    right = various_for_gpu
    assert not [note for note in right.uncertain_ops if "eagerly" in note]
    if patch in inductor._ON_FAKES:
        without = {name: value for name, value in inductor._ON_FAKES.items() if name != patch}
        monkeypatch.setattr(inductor, "_ON_FAKES", without)
    elif patch == "triton_importable":
        monkeypatch.setattr(inductor, patch, nullcontext)
    elif patch == "_guards":
        monkeypatch.setattr(inductor_cuda, patch, lambda: None)
    elif patch == "_interface":
        monkeypatch.setattr(inductor_cuda, patch, lambda _: device_interface.CudaInterface)
    else:
        replaced = inductor_cuda.replaced
        monkeypatch.setattr(
            inductor_cuda,
            "replaced",
            lambda owner, name, instead: nullcontext() if name == patch else replaced(owner, name, instead),
        )
    try:
        found = on_gpu(blocks(Various), settings_of("0", precision="bf16"))
    except CaptureError:
        return
    assert (found.ops, found.uncertain_ops) != (right.ops, right.uncertain_ops)


def test_convolutions_keep_channels_last_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; without the patch they would be laid out otherwise than the capture's own are."""

    def is_kept(samples: int) -> bool:  # another number, as torch caches results on fakes
        with inductor_cuda.lowering_for(A100), FakeTensorMode(), torch.no_grad():
            images = torch.empty_strided(
                (samples, 3, 8, 8), (192, 1, 24, 3), device="cuda", dtype=torch.bfloat16
            )
            weight = torch.empty_strided((16, 3, 3, 3), (27, 9, 3, 1), device="cuda", dtype=torch.bfloat16)
            found = torch.ops.aten.convolution(images, weight, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)
        return found.is_contiguous(memory_format=torch.channels_last)

    assert is_kept(2)
    monkeypatch.setattr(inductor_cuda, "_convolution_layout", torch._C._conv_determine_backend_memory_format)
    assert not is_kept(4)


def test_without_a_device_guard_the_cpus_code_is_taken_with_a_wider_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, settings = blocks(Block), settings_of("0")
    whole = bf.estimate(job, A100, settings=settings)
    monkeypatch.setattr(inductor_cuda, "_guards", lambda: None)
    found = bf.estimate(job, A100, settings=settings)
    assert [note for note in found.uncertain_ops if "as Inductor makes it for a CPU" in note]
    assert found.predicted_device_interval_bytes[1] > whole.predicted_device_interval_bytes[1]


def test_what_cannot_be_compiled_is_refused() -> None:
    model = nn.Sequential(Block(), Block())
    with pytest.raises(UsageError, match="of 0 units in the settings none is"):
        apply_units(model, settings_of())
    recomputed = (UnitAction(fqn="0", action=Action.RECOMPUTE),)
    with pytest.raises(UsageError, match="as a whole with 1 units recomputed"):
        settings_of(compile=Compile.MODEL, units=recomputed)
    with pytest.raises(UsageError, match="one of 2 ranks"):
        settings_of("0", world_size=2, parallelism=Parallelism.ZERO2)
    with pytest.raises(UsageError, match=r'as a whole on 2 ranks.*or take compile="units"'):
        settings_of(compile=Compile.MODEL, units=(), world_size=2)
    model[0].compile()
    with pytest.raises(UsageError, match="compiled or wrapped already"):
        apply_units(model, settings_of("0"))


class Steady(Block):
    """A block that draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Identity()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_compiled_units_train_alike_but_for_rounding() -> None:
    """Also after a capture of the same graphs: what it changed in torch would show here."""
    job, settings = blocks(Steady, Steady), settings_of("0", "1", micro_batch_size=4)
    capture(job, settings)
    report = bf.verify(job, settings, "cpu")
    compiling = next(each for each in report.comparisons if each.name == "compiling")
    assert 0 < compiling.largest_difference <= compiling.bound
    model = job.model()
    keys, optimizer = list(model.state_dict()), torch.optim.SGD(model.parameters(), lr=0.1)
    step = bf.apply(settings, job, model, optimizer)
    before = step(job.batch(4)).loss
    assert list(model.state_dict()) == keys
    assert ["forward" in vars(block) for block in model] == [True, True]
    step.remove()
    assert ["forward" in vars(block) for block in model] == [False, False]
    assert before.isfinite()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_a_compiled_run_resumes_to_the_weights_of_a_whole_one(tmp_path: Path) -> None:
    """The last batch of an epoch is smaller: it compiles once more."""
    samples = torch.rand(18, 64, 32)
    job = replace(blocks(Steady, Block), data=lambda: bf.Data(train=samples, validation=samples[:4]))
    settings = settings_of("0", "1", micro_batch_size=4)

    def weights(run_dir: Path, **options: Any) -> dict[str, Tensor]:
        bf.fit(job, settings, device="cpu", run_dir=run_dir, show_progress=False, **options)
        return load_file(run_dir / "weights.safetensors")

    whole = weights(tmp_path / "whole", epochs=2)
    weights(tmp_path / "parts", epochs=1)
    resumed = weights(tmp_path / "parts", epochs=2, resume=True)
    assert {name: torch.equal(resumed[name], value) for name, value in whole.items()} == dict.fromkeys(
        whole, True
    )
    assert list(whole) == sorted(job.model().state_dict())
