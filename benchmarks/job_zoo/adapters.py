"""Fine-tuning a part of a model: low rank, prompts, quantised weights, names of parameters in groups."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import brimful as bf
from job_zoo.case import job_case
from job_zoo.language import LLAMA, hf_loss, hf_texts
from job_zoo.parts import TinyGPT, next_token, texts


class LoRA(nn.Module):
    def __init__(self, linear: nn.Linear, rank: int = 4, alpha: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.scale, self.dropout = linear, alpha / rank, nn.Dropout(dropout)
        self.a = nn.Parameter(torch.empty(rank, linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * (self.dropout(x) @ self.a.T @ self.b.T)


@job_case(32)
def lora_by_hand() -> bf.Job:
    def model() -> nn.Module:
        gpt = TinyGPT().requires_grad_(False)
        for block in gpt.blocks:
            block.qkv, block.out = LoRA(block.qkv), LoRA(block.out)
        return gpt

    return bf.Job(
        model=model,
        loss=next_token,
        batch=texts,
        optimizer=lambda ps: torch.optim.AdamW([p for p in ps if p.requires_grad], lr=1e-3),
    )


def tuned_llama(**options: object) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    return get_peft_model(LlamaForCausalLM(LlamaConfig(**LLAMA)), config)


@job_case(32, needs=("peft",))
def peft_lora() -> bf.Job:
    return bf.Job(model=lambda: tuned_llama(lora_dropout=0.05), loss=hf_loss, batch=hf_texts)


@job_case(32, needs=("peft",))
def peft_dora() -> bf.Job:
    return bf.Job(model=lambda: tuned_llama(use_dora=True), loss=hf_loss, batch=hf_texts)


@job_case(32, needs=("peft",))
def peft_lora_with_gradient_checkpointing() -> bf.Job:
    def model() -> nn.Module:
        tuned = tuned_llama()
        tuned.enable_input_require_grads()
        tuned.gradient_checkpointing_enable()
        return tuned

    return bf.Job(model=model, loss=hf_loss, batch=hf_texts)


@job_case(32, needs=("peft",))
def peft_prompt_tuning() -> bf.Job:
    from peft import PromptTuningConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
    return bf.Job(
        model=lambda: get_peft_model(LlamaForCausalLM(LlamaConfig(**LLAMA)), config),
        loss=hf_loss,
        batch=hf_texts,
    )


@job_case(32, needs=("peft", "bitsandbytes"))
def peft_qlora_4bit() -> bf.Job:
    """The model is there already, as `from_pretrained` gives it."""
    from bitsandbytes.nn import Linear4bit
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(LlamaConfig(**LLAMA))
    for layer in llama.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(layer.self_attn, name)
            packed = Linear4bit(
                linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32
            )
            packed.load_state_dict(linear.state_dict())
            setattr(layer.self_attn, name, packed.to("cpu"))
    tuned = get_peft_model(llama, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return bf.Job(model=tuned, loss=hf_loss, batch=hf_texts)


@job_case(32, needs=("bitsandbytes",))
def bitsandbytes_adamw8bit() -> bf.Job:
    def optimizer(parameters: object) -> torch.optim.Optimizer:
        import bitsandbytes as bnb

        return bnb.optim.AdamW8bit(parameters, lr=1e-4)

    return bf.Job(
        model=lambda: TinyGPT(vocabulary=512, width=128, depth=1),
        loss=next_token,
        batch=texts,
        optimizer=optimizer,
    )


@job_case(32, refused="none of the model's parameters")
def decay_groups_by_name_over_the_model() -> bf.Job:
    """The optimizer's function gets no names, so it closes over the model."""
    model = TinyGPT(width=128, depth=1)

    def optimizer(_parameters: object) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        decayed = [p for name, p in named if p.ndim > 1 and "norm" not in name]
        others = [p for name, p in named if p.ndim <= 1 or "norm" in name]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-4
        )

    return bf.Job(model=model, loss=next_token, batch=texts, optimizer=optimizer)


@job_case(32)
def decay_groups_by_dimension() -> bf.Job:
    def optimizer(parameters: object) -> torch.optim.Optimizer:
        given = list(parameters)
        return torch.optim.AdamW(
            [
                {"params": [p for p in given if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in given if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=3e-4,
            fused=True,
        )

    return bf.Job(model=TinyGPT, loss=next_token, batch=texts, optimizer=optimizer)
