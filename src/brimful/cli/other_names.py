"""Flags of other tools → the options that brimful has for them; tasks without a command → their examples."""

from __future__ import annotations

from typing import Any

_BATCH = ("--micro-batch-size", "--global-batch-size")
_HALF = {name: (f"--precision {name}",) for name in ("bf16", "fp16", "fp32", "tf32")}
_OPTIONS: dict[str, tuple[str, ...]] = {
    **{f"--{name}": option for name, option in _HALF.items()},
    "--amp": ("--precision bf16",),
    "--autocast": ("--precision bf16",),
    "--dtype": ("--precision",),
    "--mixed-precision": ("--precision",),
    "--batch": _BATCH,
    "--batch-size": _BATCH,
    "--train-batch-size": _BATCH,
    "--per-device-train-batch-size": _BATCH,
    "--micro-batch": ("--micro-batch-size",),
    "--global-batch": ("--global-batch-size",),
    "--accumulate": ("--gradient-accumulation-steps", "--micro-batch-size"),
    "--accumulation-steps": ("--gradient-accumulation-steps", "--micro-batch-size"),
    "--gradient-accumulation-steps": ("--micro-batch-size", "--global-batch-size"),
    "--gradient-checkpointing": ("--recompute all",),
    "--activation-checkpointing": ("--recompute all",),
    "--checkpointing": ("--recompute all",),
    "--optim": ("--optimizer",),
    "--gpu": ("--device",),
    "--gpus": ("--device", "--world-size"),
    "--num-gpus": ("--world-size",),
    "--nproc-per-node": ("--world-size",),
    "--nnodes": ("--num-nodes",),
    "--fsdp": ("--parallelism fsdp2",),
    "--fsdp2": ("--parallelism fsdp2",),
    "--ddp": ("--parallelism ddp",),
    "--deepspeed": ("--parallelism zero2",),
    "--zero": ("--parallelism zero2",),
    "--cpu-offload": ("--offload-optimizer", "--offload-parameters"),
    "--offload": ("--offload-activations", "--offload-optimizer"),
    "--memory": ("--budget",),
    "--max-memory": ("--budget",),
    "--vram": ("--budget",),
    "--max-length": ("--seq-len",),
    "--max-seq-length": ("--seq-len",),
    "--sequence-length": ("--seq-len",),
    "--lr": ("--learning-rate",),
    "--num-train-epochs": ("--epochs",),
    "--max-steps": ("--steps",),
    "--clip": ("--max-gradient-norm",),
    "--max-grad-norm": ("--max-gradient-norm",),
    "--num-workers": ("--workers",),
    "--output-dir": ("--run-dir",),
    "--save-steps": ("--save-every",),
    "--eval-steps": ("--validate-every",),
    "--channels-last": ("--memory-format channels_last",),
    "--load-in-4bit": ("--quantize nf4",),
    "--load-in-8bit": ("--quantize int8",),
}
EXAMPLES = {
    "token-classification": "examples/named_entities.py trains it with a plan in Transformers' Trainer.",
    "sentence-pairs": "examples/sentence_pairs.py trains them with a plan in SentenceTransformerTrainer.",
}
"""Tasks that other trainers have, and the example of each."""
_OF_THE_JOB = dict.fromkeys(
    ("--lora", "--qlora", "--quantize", "--load-in-4bit", "--load-in-8bit"),
    "Adapters and quantised weights are the job's: name a file.py:NAME whose model has them. For texts "
    "`brimful train language-model FOLDER --lora r=16 --plan-only` plans with them.",
)
_ELSEWHERE = {
    **dict.fromkeys(
        ("--workers", "--num-workers", "--pin-memory", "--prefetch-factor"),
        "This command has no DataLoader. `brimful train FILE.py:job` and `brimful train images` have one.",
    ),
    "--lr": "A learning rate takes no memory and no time: leave it out.",
    "--learning-rate": "A learning rate takes no memory and no time: leave it out.",
}


_FIRST_USE = {
    "run": "brimful run train.py",
    "doctor": "brimful doctor train.py, or brimful doctor machine",
    "report": "brimful report runs/digits",
    "estimate": "brimful estimate gpt2 --micro-batch-size 4",
    "gpus": "brimful gpus gpt2 --global-batch-size 32",
}
"""What to type where an argument of a command is missing."""


def explain(error: Any) -> None:
    """Say in click's error what is missing, or which option is meant, if it is a flag of another tool."""
    first_use = _FIRST_USE.get(error.ctx.command.name) if error.ctx else None
    if first_use and getattr(error, "param", None) is not None and not error.message:
        error.message = f"For example: {first_use}"
    flag = str(getattr(error, "option_name", "")).replace("_", "-").lower()
    parameters = error.ctx.command.params if flag and error.ctx else ()
    known = {option for parameter in parameters for option in parameter.opts}
    named = [each for each in _OPTIONS.get(flag, ()) if each.split()[0] in known]
    said = f"It is {' or '.join(named)} here." if named else _OF_THE_JOB.get(flag) or _ELSEWHERE.get(flag)
    if not said and flag in _OPTIONS:
        said = f"Other commands have it: {' or '.join(_OPTIONS[flag])}."
    if said:
        error.message, error.possibilities = f"No such option: {flag}. {said}", None
