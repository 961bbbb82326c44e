"""The blocks of Liger-Kernel's benchmarks in plain PyTorch: sizes, dtypes and what a measured call holds.

Each follows benchmark/scripts/benchmark_*.py of linkedin/Liger-Kernel at the date of its rows, with the tensors
that the script holds beside it, such as the weights of the kernels it compares with. Where a row is older than
the script, the first committed one is taken. The order of ops is the script's, since it decides the peak.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-6
BIG = -1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block with its inputs."""

    forward: Callable[[], Any]
    """Returns one tensor or several."""
    cleared: tuple[Tensor, ...] = ()
    """Tensors without gradients when a timed call begins."""
    clears_for_memory: bool = False
    """Whether they have none either when memory is measured."""
    keeps_in_full: bool = False
    """Whether a timed call of both directions adds to their gradients."""
    gradient: Callable[[Any], Any] | None = None
    """Gradients of the outputs, where a script makes them before the calls."""
    draws_gradient: bool = False
    """Whether the call of both directions draws its gradient."""
    retains: bool = False
    """Whether the call of both directions retains its graph."""
    inputs: tuple[Tensor, ...] = ()
    """What `torch.autograd.grad` differentiates by, where a script calls it; no gradient is then kept."""
    sums: bool = False
    """Whether backward is of the output's sum. Rows called backward are then of both directions."""
    held: Any = None
    """What the script holds besides."""


def sizes_of(row: dict[str, str]) -> dict[str, Any]:
    """The sizes of a row by name: those of its configuration and the one that varies."""
    found = {name: value for name, value in json.loads(row["config"]).items() if value is not None}
    return found | {row["x_name"]: int(float(row["x"]))}


def call_of(block: Block, mode: str, *, of_memory: bool) -> Callable[[], object]:
    """The measured call of a block.

    Args:
        block: On the device.
        mode: "forward", "backward" or "full".
        of_memory: Whether memory is measured, where scripts retain graphs that they release to measure time.
    """
    forward = block.forward
    if mode == "forward":
        return forward

    def backward(outputs: Any, gradient: Any, *, retains: bool) -> None:
        if block.inputs:
            torch.autograd.grad(outputs, block.inputs, gradient, retain_graph=retains)
        else:
            torch.autograd.backward(outputs, gradient, retain_graph=retains)

    if mode == "backward" and not block.sums:
        outputs = forward()
        gradient = _gradient(block, outputs)
        return lambda: backward(outputs, gradient, retains=True)
    gradient = None if block.gradient is None else block.gradient(forward())
    retains = block.retains or (of_memory and bool(block.inputs))

    def full() -> None:
        outputs = forward()
        drawn = torch.randn_like(outputs) if block.draws_gradient else gradient
        backward(outputs.sum() if block.sums else outputs, drawn, retains=retains)

    return full


def cleared_by(block: Block, mode: str, *, of_memory: bool) -> tuple[Tensor, ...]:
    """Tensors whose gradients are cleared before each call."""
    keeps = (of_memory and not block.clears_for_memory) or (block.keeps_in_full and mode == "full")
    return () if keeps else block.cleared


def _gradient(block: Block, outputs: Any) -> Any:
    if block.gradient is not None:
        return block.gradient(outputs)
    return torch.randn_like(outputs) if block.draws_gradient else None


def cross_entropy(sizes: dict[str, Any], device: torch.device) -> Block:
    """Of float32 logits; their gradient is added to from call to call."""
    tokens, classes = sizes["B"] * sizes["T"], sizes["V"]
    logits = torch.randn(tokens, classes, requires_grad=True, device=device)
    target = torch.randint(classes, (tokens,), device=device)
    return Block(forward=lambda: F.cross_entropy(logits, target))


def embedding(sizes: dict[str, Any], device: torch.device) -> Block:
    """Two tables are held, of which one is looked up."""
    tables = [nn.Embedding(sizes["V"], sizes["D"], device=device) for _ in range(2)]
    tokens = torch.randint(0, sizes["V"], (sizes["B"], sizes["T"]), device=device)
    return Block(forward=lambda: tables[0](tokens), draws_gradient=True, held=tables)


def layer_norm(sizes: dict[str, Any], device: torch.device) -> Block:
    """Two norms are held."""
    norms = [nn.LayerNorm(sizes["N"], eps=sizes["eps"], device=device) for _ in range(2)]
    x = torch.randn(sizes["M"], sizes["N"], device=device)
    gradient = torch.randn_like(x)
    x.requires_grad_()
    return Block(
        forward=lambda: norms[0](x), cleared=(x,), gradient=lambda _: gradient, retains=True, held=norms
    )


def geglu(sizes: dict[str, Any], device: torch.device) -> Block:
    """Llama's gated MLP with a GELU: gradients of its weights are added to from call to call."""
    dtype, hidden, inner = torch.bfloat16, sizes["hidden_size"], sizes["intermediate_size"]
    x = torch.randn(sizes["bsz"], sizes["T"], hidden, device=device, dtype=dtype, requires_grad=True)
    gate, up = (nn.Linear(hidden, inner, bias=False, device=device, dtype=dtype) for _ in range(2))
    down = nn.Linear(inner, hidden, bias=False, device=device, dtype=dtype)
    return Block(
        forward=lambda: down(F.gelu(gate(x), approximate="tanh") * up(x)),
        cleared=(x,),
        draws_gradient=True,
        retains=True,
        held=(gate, up, down),
    )


def rope(sizes: dict[str, Any], device: torch.device) -> Block:
    """Rotary embedding of queries and keys, heads transposed before."""
    heads = (sizes["num_q_heads"], sizes["num_kv_heads"])
    hidden = sizes["hidden_size"] if "hidden_size" in sizes else sizes["H"]
    length = sizes["seq_len"] if "seq_len" in sizes else sizes["T"]
    size = hidden // heads[0]
    q, k = (
        torch.randn(1, length, each, size, device=device, requires_grad=True, dtype=torch.bfloat16).transpose(
            1, 2
        )
        for each in heads
    )
    gradients = (torch.randn_like(q), torch.randn_like(k))
    positions = torch.arange(length, device=device).unsqueeze(0)
    rates = 1.0 / 10000 ** (torch.arange(0, size, 2, device=device) / size)
    angles = (rates[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    del angles

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return torch.cat((-second, first), dim=-1)

    def forward() -> tuple[Tensor, Tensor]:
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        return (q * c) + (turned(q) * s), (k * c) + (turned(k) * s)

    return Block(
        forward=forward, inputs=(q, k), gradient=lambda _: gradients, held=(positions, rates, cos, sin)
    )


def kl_div(sizes: dict[str, Any], device: torch.device) -> Block:
    """The input is a log-softmax, whose backward is measured too."""
    tokens, classes = sizes["B"] * sizes["T"], sizes["V"]
    x = torch.randn(tokens, classes, requires_grad=True, device=device).log_softmax(dim=-1)
    target = torch.randn(tokens, classes, device=device).softmax(dim=-1)
    return Block(forward=lambda: F.kl_div(x, target, reduction="batchmean"), retains=True)


def jsd(sizes: dict[str, Any], device: torch.device) -> Block:
    """Of 2024, and, with a vocabulary as a size, of 2026; both with the backward of a log-softmax."""
    is_late = "vocab_size" in sizes
    classes = sizes["vocab_size"] if is_late else sizes["V"]
    tokens = sizes["BT"] if is_late else sizes["B"] * sizes["T"]
    x = torch.randn(tokens, classes, requires_grad=True, device=device).log_softmax(dim=-1)
    target = torch.randn(tokens, classes, device=device).log_softmax(dim=-1)

    def of_2024() -> Tensor:
        log_mean = torch.log(0.5 * (torch.exp(x) + torch.exp(target)))
        parts = [F.kl_div(log_mean, each, reduction="batchmean", log_target=True) for each in (x, target)]
        return 0.5 * (parts[0] + parts[1])

    def of_2026() -> Tensor:
        mean = torch.lerp(torch.exp(x), torch.exp(target), 0.5)
        loss = 0.5 * F.kl_div(torch.log(mean), target, reduction="none", log_target=True).sum(dim=-1)
        loss = loss + 0.5 * F.kl_div(torch.log(mean), x, reduction="none", log_target=True).sum(dim=-1)
        total: Tensor = (loss / tokens).sum()
        return total

    return Block(forward=of_2026 if is_late else of_2024, draws_gradient=is_late, retains=True)


def fused_linear_cross_entropy(sizes: dict[str, Any], device: torch.device) -> Block:
    """A language model's head and its loss; the weights of two heads are held."""
    tokens, classes, dtype = sizes["BT"], sizes["V"], torch.bfloat16
    heads = [nn.Linear(sizes["H"], classes, bias=False, dtype=dtype, device=device) for _ in range(2)]
    x = torch.randn(tokens, sizes["H"], requires_grad=True, dtype=dtype, device=device)
    target = torch.randint(classes, (tokens,), device=device)
    return Block(forward=lambda: F.cross_entropy(heads[0](x), target), held=heads)


def preference(sizes: dict[str, Any], device: torch.device, gamma: float = 0.0) -> Block:
    """The loss of CPO, or with a margin of SimPO: the first half of the samples is preferred to the second."""
    dtype, beta = torch.bfloat16, 0.1
    heads = [nn.Linear(sizes["H"], sizes["V"], bias=False, dtype=dtype, device=device) for _ in range(2)]
    x = torch.randn(sizes["B"], sizes["T"], sizes["H"], requires_grad=True, dtype=dtype, device=device)
    target = torch.randint(sizes["V"], (sizes["B"], sizes["T"]), device=device)
    half = sizes["B"] // 2

    def log_probabilities(logits: Tensor) -> Tensor:
        mask = target != -100
        labels = torch.where(target == -100, 0, target)
        chosen = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
        return (chosen * mask).sum(-1) / mask.sum(-1)

    def forward() -> Tensor:
        products = x @ heads[0].weight.t()
        logits = products.float()
        preferred = F.cross_entropy(logits[:half].view(-1, logits.shape[-1]), target[:half].view(-1))
        each = log_probabilities(logits)
        margin = each[:half] - each[half:]
        if gamma:
            margin = margin - gamma / beta
        losses = F.logsigmoid(beta * margin) * 1.0 + F.logsigmoid(-beta * margin) * 0.0
        return preferred * 1.0 - losses.mean()

    return Block(forward=forward, held=heads)


def distillation(
    sizes: dict[str, Any], device: torch.device, soft_loss: Callable[[Tensor, Tensor], Tensor]
) -> Block:
    """A student and a teacher of twice its width; the weights of two pairs are held."""
    tokens, width, classes, dtype = sizes["BT"], sizes["H"], sizes["V"], torch.bfloat16
    pairs = [
        [nn.Linear(each, classes, bias=False, dtype=dtype, device=device) for each in (width // 2, width)]
        for _ in range(2)
    ]
    drawn = torch.rand(tokens, width // 2, device=device, dtype=dtype)
    copies = [drawn.detach().clone().requires_grad_() for _ in range(2)]
    for_teacher = torch.rand(tokens, width, device=device, dtype=dtype)
    target = torch.randint(0, classes, (tokens,), device=device)
    (student, teacher), x = pairs[0], copies[1]

    def logits_of_both() -> tuple[Tensor, Tensor, Tensor]:
        from_student = x.view(-1, width // 2) @ student.weight.t()
        with torch.no_grad():
            from_teacher = for_teacher.view(-1, width) @ teacher.weight.t()
        logits, of_teacher = from_student.view(tokens, -1).float(), from_teacher.view(tokens, -1).float()
        torch.all(target == -100).item()
        return logits, of_teacher, F.cross_entropy(logits, target)

    def forward() -> Tensor:
        logits, of_teacher, hard = logits_of_both()
        logits /= 1.0
        of_teacher /= 1.0
        return 0.5 * hard + 0.5 * soft_loss(logits, of_teacher)

    return Block(forward=forward, held=(pairs, drawn, copies))


def _jensen_shannon(student: Tensor, teacher: Tensor) -> Tensor:
    log_student, log_teacher = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
    mean = 0.5 * log_student.exp() + 0.5 * log_teacher.exp()
    log_mean = mean.log()
    of_student = F.kl_div(log_mean, log_student, reduction="batchmean", log_target=True)
    of_teacher = F.kl_div(log_mean, log_teacher, reduction="batchmean", log_target=True)
    return 0.5 * of_teacher + 0.5 * of_student


def _cosine(student: Tensor, teacher: Tensor) -> Tensor:
    units = F.normalize(student, p=2, dim=-1), F.normalize(teacher, p=2, dim=-1)
    loss = 1.0 * (1 - F.cosine_similarity(*units, dim=-1))
    return loss.mean()


def distill_jsd_loss(sizes: dict[str, Any], device: torch.device) -> Block:
    """Distillation with the Jensen-Shannon divergence."""
    return distillation(sizes, device, _jensen_shannon)


def distill_cosine_loss(sizes: dict[str, Any], device: torch.device) -> Block:
    """Distillation with the cosine of logits."""
    return distillation(sizes, device, _cosine)


def fused_linear_grpo_loss(sizes: dict[str, Any], device: torch.device) -> Block:
    """GRPO's loss with a reference model; the weights of four heads are held."""
    batch, length, dtype = sizes["B"], sizes["T"], torch.bfloat16
    heads = [nn.Linear(sizes["H"], sizes["V"], bias=False, dtype=dtype, device=device) for _ in range(4)]
    x = torch.randn(batch, length, sizes["H"], requires_grad=True, dtype=dtype, device=device)
    chosen = torch.randint(0, sizes["V"], (batch, length), device=device)
    mask = torch.ones(batch, length, device=device)
    advantages = torch.randn(batch, dtype=dtype, device=device)
    reference = torch.randn(batch, length, sizes["H"], dtype=dtype, device=device)
    by_sequence = sizes["importance_sampling_level"] == "sequence"

    def mean_of(values: Tensor) -> Tensor:
        return (values * mask).sum() / torch.clamp(mask.sum(), min=1.0)

    def forward() -> Tensor:
        logits = x @ heads[0].weight.t()
        log_probabilities = F.log_softmax(logits.float(), dim=-1)
        each = log_probabilities.gather(dim=-1, index=chosen.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            of_reference = reference @ heads[1].weight.t()
            log_reference = F.log_softmax(of_reference.float(), dim=-1)
            each_reference = log_reference.gather(dim=-1, index=chosen.unsqueeze(-1)).squeeze(-1)
        log_ratio = each - each.detach()
        if by_sequence:
            log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        ratio = torch.exp(log_ratio)
        clipped = torch.clamp(ratio, 0.8, 1.2)
        gains = (ratio * advantages.unsqueeze(1), clipped * advantages.unsqueeze(1))
        losses = -torch.min(*gains)
        each_reference = each_reference.float()
        divergence = torch.exp(each_reference - each) - (each_reference - each) - 1.0
        losses = losses + 0.1 * divergence
        loss = mean_of(losses)
        by_token = ratio.squeeze(-1) if by_sequence else ratio
        signs = advantages if by_sequence else advantages.unsqueeze(1)
        is_clipped = ((by_token < 0.8) & (signs < 0)) | ((by_token > 1.2) & (signs > 0))
        if by_sequence:
            is_clipped = is_clipped.unsqueeze(1).expand_as(mask)
        metrics = [mean_of(divergence), mean_of(is_clipped)]
        del metrics
        return loss

    return Block(forward=forward, held=(heads, reference))


def multi_token_attention(sizes: dict[str, Any], device: torch.device) -> Block:
    """Softmax of masked scores and a convolution over them."""
    dtype = torch.bfloat16
    x, gradient, weight, bias, held = _scores(sizes, device, dtype)

    def forward() -> Tensor:
        mask = _lower_triangle(sizes["L"], device)
        low, zero = (torch.tensor(value, device=device, dtype=dtype) for value in (BIG, 0.0))
        scores = x.masked_fill(~mask, low)
        mixed = F.conv2d(F.softmax(scores, dim=-1), weight, bias, padding=sizes["K"] // 2)
        return mixed.masked_fill(~mask, zero)

    return Block(forward=forward, cleared=(x,), gradient=lambda _: gradient, retains=True, held=held)


def sparse_multi_token_attention(sizes: dict[str, Any], device: torch.device) -> Block:
    """The same with sparsemax in place of softmax, in float32."""
    x, gradient, weight, bias, held = _scores(sizes, device, torch.float32)
    length = sizes["L"]

    def forward() -> Tensor:
        mask = _lower_triangle(length, device)
        low, zero = (torch.tensor(value, device=device) for value in (BIG, 0.0))
        z = x.to(torch.float32).masked_fill(~mask, low)
        z_sorted, _ = torch.sort(z, dim=-1, descending=True)
        sums = torch.cumsum(z_sorted, dim=-1)
        ranks = torch.arange(1, length + 1, device=device, dtype=z.dtype).view(1, 1, 1, length)
        is_positive = z_sorted > -1e8
        is_inside = (1 + ranks * z_sorted > sums) & is_positive
        count = torch.sum(is_inside, dim=-1, keepdim=True)
        at_least_one = torch.max(count, torch.ones_like(count))
        sum_inside = torch.gather(sums, dim=-1, index=at_least_one.long() - 1)
        threshold = (sum_inside - 1) / at_least_one.to(z.dtype)
        threshold = torch.where(count == 0, torch.full_like(threshold, float("inf")), threshold)
        mixed = F.conv2d(
            torch.clamp(z - threshold, min=0),
            weight.to(torch.float32),
            bias.to(torch.float32),
            padding=sizes["K"] // 2,
        )
        return mixed.masked_fill(~mask, zero).to(x.dtype)

    return Block(forward=forward, cleared=(x,), gradient=lambda _: gradient, retains=True, held=held)


def _lower_triangle(length: int, device: torch.device) -> Tensor:
    return torch.tril(torch.ones(length, length, dtype=torch.bool, device=device)).view(1, 1, length, length)


def _scores(
    sizes: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
    """Scores, their gradient, weight and bias of a convolution, and a second pair of those."""
    pairs = [
        (
            nn.Parameter(
                torch.zeros(sizes["C_out"], sizes["C_in"], *2 * [sizes["K"]], dtype=dtype, device=device)
            ),
            nn.Parameter(torch.zeros(sizes["C_out"], dtype=dtype, device=device)),
        )
        for _ in range(2)
    ]
    x = torch.randn(sizes["B"], sizes["C_in"], sizes["L"], sizes["L"], dtype=dtype, device=device)
    gradient = torch.randn_like(x)
    return x.requires_grad_(), gradient, *pairs[0], pairs


def fused_add_rms_norm(sizes: dict[str, Any], device: torch.device) -> Block:
    """A residual sum and its RMS norm, op by op; the weights of three norms are held."""
    weights = [nn.Parameter(torch.ones(sizes["H"], device=device)) for _ in range(3)]
    x, residual = (torch.randn(sizes["M"], sizes["H"], device=device) for _ in range(2))
    gradients = (torch.randn_like(x), torch.randn_like(residual))
    x.requires_grad_()
    residual.requires_grad_()

    def forward() -> tuple[Tensor, Tensor]:
        total = x.to(torch.float32) + residual.to(torch.float32)
        variance = total.pow(2).mean(-1, keepdim=True)
        normed = total * torch.rsqrt(variance + EPSILON)
        return weights[0] * normed.to(x.dtype), total.to(x.dtype)

    return Block(forward=forward, cleared=(x, residual), gradient=lambda _: gradients, held=weights)


def fused_moe(sizes: dict[str, Any], device: torch.device) -> Block:
    """A loop over experts. Their weights are products, whose backward is measured too."""
    tokens, experts, hidden, inner = (sizes[name] for name in ("T", "E", "H", "intermediate_dim"))
    drawn: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    x = torch.randn(tokens, hidden, **drawn)
    gate_up = torch.randn(experts, 2 * inner, hidden, **drawn) * 0.02
    down = torch.randn(experts, hidden, inner, **drawn) * 0.02
    logits = torch.randn(tokens, experts, device=device)
    index = torch.topk(logits, sizes["K"], dim=-1).indices.to(torch.int32)
    weights = torch.softmax(torch.gather(logits, 1, index.long()), dim=-1).to(x.dtype).requires_grad_()
    del logits

    def forward() -> Tensor:
        final = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(index.long(), num_classes=experts).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for each in hit:
            expert = each[0]
            rank, token = torch.where(mask[expert])
            current = x[token]
            gate, up = F.linear(current, gate_up[expert]).chunk(2, dim=-1)
            current = F.silu(gate) * up
            current = F.linear(current, down[expert])
            current = current * weights[token, rank, None]
            final.index_add_(0, token, current.to(final.dtype))
        return final

    return Block(
        forward=forward, cleared=(x, gate_up, down, weights), draws_gradient=True, retains=True, held=index
    )


def megatron_rms_norm(sizes: dict[str, Any], device: torch.device) -> Block:
    """torch's RMS norm and a sum; rows called backward repeat the forward."""
    norm = nn.RMSNorm(sizes["H"], eps=EPSILON, device=device, dtype=torch.bfloat16)
    shape = (sizes["S"], sizes["B"], sizes["H"])
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    return Block(forward=lambda: norm(x), cleared=(x,), keeps_in_full=True, sums=True, held=norm)


def megatron_swiglu(sizes: dict[str, Any], device: torch.device) -> Block:
    """The gate of a SwiGLU and a sum; rows called backward repeat the forward."""
    shape = (sizes["S"], sizes["B"], 2 * sizes["ffn_local"])
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> Tensor:
        gate, up = torch.chunk(x, 2, -1)
        return F.silu(gate) * up

    return Block(forward=forward, cleared=(x,), clears_for_memory=True, sums=True)


BLOCKS: dict[str, Callable[[dict[str, Any], torch.device], Block]] = {
    "cross_entropy": cross_entropy,
    "distill_cosine_loss": distill_cosine_loss,
    "distill_jsd_loss": distill_jsd_loss,
    "embedding": embedding,
    "fused_add_rms_norm": fused_add_rms_norm,
    "fused_linear_cpo_loss": preference,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "fused_linear_grpo_loss_sequence": fused_linear_grpo_loss,
    "fused_linear_grpo_loss_token": fused_linear_grpo_loss,
    "fused_linear_simpo_loss": lambda sizes, device: preference(sizes, device, gamma=0.5),
    "fused_moe": fused_moe,
    "geglu": geglu,
    "jsd": jsd,
    "kl_div": kl_div,
    "layer_norm": layer_norm,
    "megatron_rms_norm": megatron_rms_norm,
    "megatron_swiglu": megatron_swiglu,
    "multi_token_attention": multi_token_attention,
    "rope": rope,
    "sparse_multi_token_attention": sparse_multi_token_attention,
    "tiled_geglu": geglu,
}
"""By the name of their rows."""
