"""What a newcomer's 40 jobs met at commit 6d9f093, and which of `job_zoo/` are like them.

Each line: the workload, what happened then (errors of predictions against the profiler), names of jobs there.
"""

from __future__ import annotations

BEFORE_COMMIT = "6d9f093"

WALK: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("parameter groups by name", "predicted −27 %, no warning", ("decay groups by name over the model",)),
    ("LoRA", "−0.02 %", ("peft lora", "lora by hand")),
    ("LoRA, the model checkpoints itself", "−0.04 %; not said", ("peft lora with gradient checkpointing",)),
    ("QLoRA, 4-bit weights", "AssertionError without a message", ("peft qlora 4bit",)),
    ("U-Net of diffusers", "−0.07 %", ("diffusers unet and scheduler",)),
    ("diffusion transformer", "−0.21 %; plan over its budget", ("diffusion transformer",)),
    ("latent diffusion", "frozen encoders not counted", ("latent diffusion around frozen encoders",)),
    ("graphs of PyTorch Geometric", "BatchError", ("torch geometric batch", "graphs as one graph")),
    ("VAE, mean loss", "plan 19 % over its budget", ("vae mean",)),
    (
        "VAE and diffusion, summed losses",
        "trained on a quarter of the loss, silently",
        ("vae sum as in pytorch examples", "diffusion with summed loss"),
    ),
    ("GAN, two optimizers in a loop", "−1.9 %; measured −55 %", ("gan with two optimizers",)),
    ("in-batch negatives", "split silently by `bf.apply`", ("clip naive", "clip by embed", "siamese pairs")),
    ("SimCLR, augmentation in the loss", "split silently", ("simclr with augmentation in the loss",)),
    (
        "DETR, matching in NumPy, lists of targets",
        "CaptureError, BatchError",
        ("detr with hungarian matching", "detr with padded targets in numpy"),
    ),
    (
        "torch.compile",
        "segmentation fault",
        ("compiled model", "compiled blocks", "compiled function in a model", "compiled loss"),
    ),
    ("weight norm", "−0.19 %", ("weight norm of convolutions",)),
    ("spectral norm", "−0.13 %; the plan's split refused by `fit`", ("spectral norm critic",)),
    ("seq2seq, teacher forcing by `random`", "0.00 %", ("translator with teacher forcing",)),
    ("selective scan", "0.00 %", ("selective scan",)),
    ("experts by `torch.where`", "+238 %", ("mixture of experts by where",)),
    (
        "Mixtral, grouped and eager experts",
        "−0.01 %, +178 %",
        ("hf mixtral grouped", "hf mixtral eager experts"),
    ),
    ("Fourier neural operator", "−0.43 %; seven false notes", ("fourier neural operator",)),
    ("physics-informed, float64", "−0.05 %", ("physics informed in float64",)),
    ("sparse embedding, SparseAdam", "raw errors everywhere", ("sparse adam", "sparse embedding with sgd")),
    ("LBFGS", "TypeError; in a loop −63 %", ("lbfgs", "lbfgs in own loop")),
    ("own op with a fake form", "−7.4 %, said", ("own op with fake form",)),
    ("flex_attention for a GPU", "CaptureError", ("flex attention",)),
    ("jagged tensors", "AssertionError", ("jagged sequences",)),
    ("packed GRU", "−0.01 %; plan 4 % over its budget", ("tagger of packed sequences",)),
    ("time first", "BatchError", ("gru with time first",)),
    ("distillation, the teacher outside", "the teacher not counted", ("distillation with teacher as global",)),
    (
        "torch.save, next() and torch.cuda in a loop",
        "errors",
        (
            "own loop that saves",
            "own loop by next",
            "own loop with cuda calls",
        ),
    ),
    (
        "Lightning, Accelerate, Trainer",
        "as plain",
        ("lightning training step", "accelerate loop", "hf trainer as loop"),
    ),
)
