"""Faults planted in training scripts: which `brimful run` finds, and what it finds in the scripts without them.

    python benchmarks/doctor/planted.py           # all
    python benchmarks/doctor/planted.py NAME ...  # some, not kept

`scripts/` has four training scripts. A fault is one replacement in one of them; it is found if its check names
the line that was changed, or one of the lines that the row permits.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from machine import keep  # noqa: E402  # beside this folder
from own_process import EndedError, call_apart  # noqa: E402

COMMAND = "python benchmarks/doctor/planted.py"
MOST_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: what is replaced in a script, and the checks that may name it."""

    script: str
    name: str
    old: str
    new: str
    checks: tuple[str, ...]
    line_of: str = ""
    """Text of the line to be named; "" for a check that names none or any."""
    is_large: bool = False
    """Whether the vocabulary is large too, so that the fault costs more than a twentieth of the peak."""


def _fault(
    script: str, name: str, old: str, new: str, *checks: str, line_of: str = "", is_large: bool = False
) -> Fault:
    return Fault(script, name, old, new, checks, line_of, is_large)


FAULTS = (
    _fault(
        "classifier",
        "total += loss",
        "total += loss.item()",
        "total += loss",
        "history-kept",
        line_of="total += loss",
    ),
    _fault(
        "classifier",
        "outputs in a list",
        "total += loss.item()",
        "total += loss.item(); outputs.append(out)",
        "history-kept",
        line_of="outputs.append(out)",
    ),
    _fault(
        "classifier",
        "detached outputs in a list",
        "total += loss.item()",
        "total += loss.item(); outputs.append(out.detach())",
        "container-grows",
        line_of="outputs.append",
    ),
    _fault(
        "classifier",
        "losses in a closure",
        "total += loss.item()",
        "total += loss.item(); remember(loss)",
        "history-kept",
    ),
    _fault(
        "classifier",
        "losses in an attribute of the model",
        "total += loss.item()",
        "total += loss.item(); model.history = [*getattr(model, 'history', ()), loss]",
        "history-kept",
    ),
    _fault(
        "classifier",
        "an exception keeps its frame",
        "total += loss.item()",
        "total += loss.item(); kept.append(failed(loss_function, model, x))",
        "history-kept",
        "container-grows",
    ),
    _fault(
        "classifier",
        "validation with gradients",
        "with torch.no_grad():",
        "if True:",
        "evaluation-with-gradients",
        line_of="out = model(x)  # validation",
    ),
    _fault(
        "classifier",
        "gradients zeroed, not freed",
        "optimizer.zero_grad()",
        "optimizer.zero_grad(set_to_none=False)",
        "gradients-kept",
    ),
    _fault("classifier", "gradients never cleared", "optimizer.zero_grad()", "pass", "gradients-added"),
    _fault(
        "classifier",
        "gradients cleared before the step",
        "optimizer.step()",
        "optimizer.zero_grad(); optimizer.step()",
        "gradients-lost",
        "without-gradient",
    ),
    _fault(
        "classifier",
        "graph retained",
        "loss.backward()",
        "loss.backward(retain_graph=True)",
        "graph-retained",
        line_of="loss.backward",
    ),
    _fault(
        "classifier",
        "trained in evaluation mode",
        "model.train()",
        "model.eval()",
        "trained-in-evaluation-mode",
    ),
    _fault(
        "classifier",
        "softmax twice",
        "loss = loss_function(out, y)",
        "loss = loss_function(out.softmax(-1), y)",
        "softmax-twice",
        line_of="softmax",
    ),
    _fault(
        "classifier",
        "half of the model not optimized",
        "AdamW(model.parameters()",
        "AdamW(model.head.parameters()",
        "not-optimized",
    ),
    _fault(
        "classifier",
        "a layer that is never used",
        "self.spare = None",
        "self.spare = nn.Linear(256, 256)",
        "without-gradient",
    ),
    _fault(
        "classifier",
        "anomaly detection",
        "torch.manual_seed(0)",
        "torch.manual_seed(0); torch.autograd.set_detect_anomaly(True)",
        "anomaly-detection",
    ),
    _fault(
        "classifier",
        "cache flushed in the loop",
        "optimizer.step()",
        "optimizer.step(); torch.cuda.empty_cache()",
        "cache-flushed",
        line_of="empty_cache",
    ),
    _fault(
        "classifier",
        "slow loading",
        "return self.x[index], self.y[index]",
        "time.sleep(0.01); return self.x[index], self.y[index]",
        "waits-for-data",
    ),
    _fault(
        "classifier",
        "a second forward for the accuracy",
        "total += loss.item()",
        "total += loss.item(); right += (model(x).argmax(-1) == y).sum().item()",
        "graph-unused",
        line_of="right +=",
    ),
    _fault(
        "language_model",
        "an intermediate kept in the module",
        "return self.head(x)",
        "self.last = self.head(x); return self.last",
        "intermediate-kept",
        is_large=True,
    ),
    _fault(
        "classifier",
        "DataParallel",
        "model = Classifier()",
        "model = nn.DataParallel(Classifier())",
        "data-parallel",
    ),
    _fault(
        "language_model",
        "attention that saves its weights",
        "nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "(q @ k.mT / 8 + MASK).softmax(-1) @ v",
        "attention-not-fused",
    ),
    _fault(
        "language_model",
        "logits of a large vocabulary",
        "VOCABULARY = 64",
        "VOCABULARY = 16384",
        "logits-in-the-loss",
    ),
    _fault(
        "language_model",
        "accumulation without division",
        "(loss / PARTS).backward()",
        "loss.backward()",
        "not-normalized",
    ),
    _fault(
        "language_model",
        "reentrant checkpointing without gradients",
        "x = self.blocks(self.embedding(tokens))",
        "x = self.embedding(tokens).detach()\n"
        "        for block in self.blocks:\n"
        "            x = checkpoint(block, x, use_reentrant=True)",
        "checkpoint-without-gradient",
    ),
    _fault(
        "language_model",
        "a normalisation in float32 under bf16",
        "return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))",
        "return x + self.down(nn.functional.gelu(self.up(self.norm2(x)).float()).bfloat16())",
        "float32-copy",
    ),
    _fault(
        "language_model",
        "a teacher on the device",
        "teacher = None",
        "teacher = LanguageModel().requires_grad_(False).eval()",
        "untrained-model",
    ),
    _fault(
        "language_model",
        "a teacher that saves tensors",
        "teacher = None",
        "teacher = LanguageModel().eval()",
        "evaluation-with-gradients",
        "untrained-model",
    ),
    _fault(
        "language_model",
        "intermediates kept by a name",
        "(loss / PARTS).backward()",
        "(loss / PARTS).backward(); kept_logits = logits",
        "intermediate-kept",
        is_large=True,
    ),
    _fault(
        "language_model",
        "logits alive in backward",
        "VOCABULARY = 64",
        "VOCABULARY = 16384",
        "alive-past-last-use",
        line_of="return self.head(x)",
    ),
    _fault(
        "language_model",
        "all blocks in one checkpointed region",
        "x = self.blocks(self.embedding(tokens))",
        "x = checkpoint(self.blocks, self.embedding(tokens), use_reentrant=False)",
        "checkpointing-saves-nothing",
    ),
    _fault(
        "classifier",
        "a frozen body that saves tensors for its input",
        "x = x.to(device)",
        "x = x.to(device).requires_grad_(); model.body.requires_grad_(False)",
        "frozen-part-saves",
        line_of="loss.backward()",
    ),
    _fault(
        "language_model",
        "reduced in every micro-batch",
        "with model.no_sync() if index < PARTS - 1 else nullcontext():",
        "if True:",
        "reduced-in-every-micro-batch",
    ),
    _fault(
        "classifier",
        "foreach optimizer at the peak",
        "lr=1e-3",
        "lr=1e-3, foreach=True",
        "optimizer-makes-the-peak",
    ),
    _fault(
        "images",
        "cudnn.benchmark with changing shapes",
        "loss = nn.functional.cross_entropy(model(x.flatten(0, 1)), y.flatten()) / 2",
        "torch.backends.cudnn.benchmark = True; x = x[..., : 32 - step // 4]; "
        "loss = nn.functional.cross_entropy(model(x.flatten(0, 1)), y.flatten()) / 2",
        "benchmark-with-changing-shapes",
    ),
    _fault(
        "images",
        "BatchNorm of micro-batches",
        "nn.GroupNorm(8, width)",
        "nn.BatchNorm2d(width)",
        "batch-norm-of-micro-batches",
    ),
    _fault(
        "images_whole",
        "BatchNorm recomputed",
        "x = stage(x)",
        "x = checkpoint(stage, x, use_reentrant=False)",
        "batch-norm-recomputed",
    ),
    _fault(
        "images_whole",
        "a checkpoint kept after resuming",
        "del state",
        "pass",
        "intermediate-kept",
        "untrained-model",
        "state-kept",
    ),
    _fault(
        "images_whole",
        "logits of validation gathered on the device",
        "right += (out.argmax(-1) == y).sum().item()",
        "gathered.append(out)",
        "container-grows",
        "evaluation-gathered",
    ),
)


def examined(script: str, fault: int | None) -> dict[str, Any]:
    """What is found in a script, with a fault or without."""
    from brimful.doctor import run_script, watched_document

    text = (HERE / "scripts" / f"{script}.py").read_text(encoding="utf-8")
    planted = None if fault is None else FAULTS[fault]
    if planted is not None:
        assert text.count(planted.old) == 1, (planted.name, text.count(planted.old))
        text = text.replace(planted.old, planted.new)
        if planted.is_large:
            text = text.replace("VOCABULARY = 64", "VOCABULARY = 16384")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{script}.py"
        path.write_text(text, encoding="utf-8")
        ran = run_script(str(path), [], steps=3)
    document = watched_document(ran.evidence)
    named = [number for number, line in enumerate(text.splitlines(), 1) if planted and planted.line_of in line]
    findings = [
        {key: each[key] for key in ("check", "what", "size_bytes")} | {"line": Path(each["line"]).name}
        for each in document["findings"]
    ]
    right = [
        each
        for each in findings
        if planted
        and each["check"] in planted.checks
        and (not planted.line_of or int(each["line"].rpartition(":")[2] or 0) in named)
    ]
    return {
        "script": script,
        "fault": None if planted is None else planted.name,
        "checks": [] if planted is None else list(planted.checks),
        "found": bool(right),
        "exit_status": ran.exit_status,
        "error": document["error"],
        "findings": findings,
    }


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    faults = [row for row in rows if row["fault"]]
    clean = [row for row in rows if not row["fault"]]
    return {
        "faults": len(faults),
        "found": sum(row["found"] for row in faults),
        "not_found": [row["fault"] for row in faults if not row["found"]],
        "checks": len({check for row in faults if row["found"] for check in row["checks"]}),
        "scripts_without_faults": len(clean),
        "findings_in_them": sum(len(row["findings"]) for row in clean),
    }


def main() -> None:
    """Examine all or some, print a line for each, keep all."""
    names = sys.argv[1:]
    cases: list[tuple[str, int | None]] = [(each, None) for each in sorted({fault.script for fault in FAULTS})]
    cases += [(fault.script, index) for index, fault in enumerate(FAULTS)]
    rows = []
    for script, index in cases:
        if names and not any(name in (FAULTS[index].name if index is not None else script) for name in names):
            continue
        try:
            row = call_apart(examined, script, index, seconds=MOST_SECONDS, preload=("brimful.doctor",))
        except EndedError as error:
            row = {"script": script, "fault": None if index is None else FAULTS[index].name, "found": False}
            row |= {"checks": [], "findings": [], "error": str(error), "exit_status": -1}
        rows.append(row)
        found = "clean" if row["fault"] is None else "found" if row["found"] else "NOT FOUND"
        others = [f"{each['check']} {each['line']} {each['size_bytes']}" for each in row["findings"]]
        print(f"{found:<10}{script:<16}{row['fault'] or ''}: {'; '.join(others)} {row['error']}", flush=True)
    summary = summary_of(rows)
    print(summary)
    if not names:
        keep("planted.json", COMMAND, {"summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
