"""Each check of source text finds the fault that is planted for it, with its line, and is silent without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from brimful.doctor.sarif import sarif_document
from brimful.doctor.source import Source
from brimful.doctor.source_checks import SOURCE_CHECKS, check_name, check_sources, source_findings
from brimful.errors import FileFormatError, UsageError

ROOT = Path(__file__).resolve().parents[3]

HEAD = """
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from PIL import Image
"""
CLEAN = """
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)).to("cuda")
optimizer = optim.AdamW(model.parameters(), fused=True)
criterion = nn.CrossEntropyLoss()
total, losses = 0.0, []

def evaluate():
    model.eval()
    with torch.no_grad():
        for x, y in batches:
            hits = (model(x).argmax(-1) == y).sum()
    return hits

for epoch in range(3):
    model.train()
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if i % 100 == 0:
            losses.append(loss.item())
            print(loss.item())
    evaluate()
"""
VALIDATED = CLEAN.replace("for x, y in batches", "for x, y in validation_loader")
ACCUMULATED = """
for i, (x, y) in enumerate(batches):
    out = model(x)
    loss = criterion(out, y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
MADE = CLEAN.partition("def evaluate")[0]
FILES = """
class Photos(Dataset):
    def __getitem__(self, index):
        return Image.open(self.paths[index])
"""
BY_NAME = "from torch.nn.functional import cross_entropy as ce, softmax, softmax as sm" + CLEAN.replace(
    "criterion(out, y)", "ce(out, y)"
)
BY_NAME_ACCUMULATED = (
    MADE
    + "from torch.nn.functional import cross_entropy as ce\n"
    + ACCUMULATED.replace("criterion(out, y)", "ce(out, y)")
)
EVALUATING = "        for x, y in batches:\n            hits = (model(x).argmax(-1) == y).sum()\n"
IN_A_COMPREHENSION = CLEAN.replace(EVALUATING, "        hits = [model(x).argmax(-1) for x in batches]\n")
IN_A_GENERATOR = (
    CLEAN.replace("model.eval()", "pass")
    .replace("model.train()", "pass")
    .replace("nn.Dropout(0.1)", "")
    .replace(EVALUATING, "        hits = sum((model(x).argmax(-1) == y).sum() for x, y in test_loader)\n")
)
TWO = CLEAN.replace(
    "criterion =",
    "critic = nn.Linear(4, 4).cuda()\nother = optim.SGD(critic.parameters(), lr=0.1)\ncriterion =",
).replace("optimizer.step()", "optimizer.step()\n        other.step()\n        other.zero_grad()")
TWO_PARTS = TWO.replace("critic.parameters()", "model.head.parameters()").replace(
    "model.parameters()", "model.body.parameters()"
)
ONE_BY_ONE, AS_A_DICT = (
    "x, y = x.to(device), y.to(device)",
    "batch = {k: v.to(device, non_blocking=True) for k, v in enumerate((x, y))}",
)
LOADED = "loader = DataLoader(rows, 32, pin_memory=True)" + CLEAN.replace("batches):", "loader):").replace(
    "        optimizer.zero_grad()", f"        {ONE_BY_ONE}\n        optimizer.zero_grad()"
)
POSITIONS = (
    """
class Embedded(nn.Module):
    def forward(self, x):
        return self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
"""
    + CLEAN
)
TRAINER = """
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments
options = TrainingArguments("out", eval_strategy="epoch", eval_accumulation_steps=1)
Trainer(model, options, train_dataset=texts, compute_metrics=accuracy).train()
"""
RUNNING = CLEAN.replace("0.0, []", "None, []").replace(
    "total += loss.detach()", "total = 0.9 * total + 0.1 * loss.detach()"
)
INLINE = CLEAN.replace("criterion(out, y)", "nn.CrossEntropyLoss()(out, y)")
INLINE_ACCUMULATED = MADE + ACCUMULATED.replace("criterion(out, y)", "nn.CrossEntropyLoss()(out, y)")
EVALUATED_ONCE = CLEAN.replace("    model.train()\n", "").replace("\n    evaluate()", "\nevaluate()")
IN_FUNCTIONS = (
    MADE
    + """
def train():
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()

def test():
    model.eval()
    with torch.no_grad():
        return [model(x) for x in batches]

for epoch in range(3):
    train()
    test()
"""
)
IN_METHODS = """
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
        self.optimizer = optim.SGD(self.model.parameters())

    def train(self, batches):
        self.model.train()
        for x, y in batches:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()

    def test(self, batches):
        self.model.eval()
        with torch.no_grad():
            return [self.model(x) for x in batches]

    def fit(self, batches):
        for epoch in range(3):
            self.train(batches)
            self.test(batches)
"""
OF_PARTS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.backbone(x))

model = Net()
optimizer = optim.AdamW(model.parameters())
for x, y in batches:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""
FAULTS: list[tuple[str, str, str, str]] = [
    # check, script without the fault, what is replaced, by what
    ("history-kept", CLEAN, "total += loss.detach()", "total += loss"),
    ("history-kept", CLEAN, "total += loss.detach()", "total = total + loss * len(x)"),
    ("history-kept", CLEAN, "total += loss.detach()", "total = 0.1 * loss + 0.9 * total"),
    (
        "history-kept",
        RUNNING,
        "0.9 * total + 0.1 * loss.detach()",
        "loss if total is None else 0.9 * total + 0.1 * loss",
    ),
    (
        "history-kept",
        RUNNING,
        "total = 0.9 * total + 0.1 * loss.detach()",
        "if total is None:\n            total = loss\n"
        "        else:\n            total = (9 * total + loss) / 10",
    ),
    ("history-kept", CLEAN, "total += loss.detach()", "losses.append(loss)"),
    ("history-kept", CLEAN, "total += loss.detach()", "losses.append({'scores': out})"),
    ("evaluation-with-gradients", CLEAN, "with torch.no_grad():", "if True:"),
    ("evaluation-with-gradients", VALIDATED, "model.eval()\n    with torch.no_grad():", "if True:"),
    ("trained-in-evaluation-mode", CLEAN, "    model.train()\n", "    model.eval()\n"),
    ("trained-in-evaluation-mode", CLEAN, "    model.train()\n", ""),
    ("trained-in-evaluation-mode", IN_FUNCTIONS, "    model.train()\n", ""),
    ("trained-in-evaluation-mode", IN_METHODS, "        self.model.train()\n", ""),
    ("trained-in-evaluation-mode", EVALUATED_ONCE, "losses = 0.0, []", "losses = 0.0, []\nmodel.eval()"),
    ("evaluated-in-training-mode", EVALUATED_ONCE, "model.eval()", "pass"),
    ("gradients-kept", CLEAN, "zero_grad()", "zero_grad(set_to_none=False)"),
    ("gradients-added", CLEAN, "optimizer.zero_grad()", "pass"),
    ("gradients-added", TWO, "other.zero_grad()", "pass"),
    ("gradients-added", TWO_PARTS, "other.zero_grad()", "pass"),
    (
        "gradients-lost",
        MADE + ACCUMULATED,
        "    out = model(x)",
        "    optimizer.zero_grad()\n    out = model(x)",
    ),
    ("not-normalized", MADE + ACCUMULATED, "(out, y) / 4", "(out, y)"),
    ("not-normalized", INLINE_ACCUMULATED, "(out, y) / 4", "(out, y)"),
    (
        "reduced-in-every-micro-batch",
        MADE + "model = DDP(model)\ncontext = model.no_sync\n" + ACCUMULATED,
        "context = model.no_sync",
        "",
    ),
    ("graph-retained", CLEAN, "loss.backward()", "loss.backward(retain_graph=True)"),
    (
        "not-optimized",
        CLEAN,
        "model.parameters()",
        "model.head.parameters()",
    ),
    ("not-optimized", OF_PARTS, "optim.AdamW(model.", "optim.AdamW(model.head."),
    ("softmax-twice", CLEAN, "criterion(out, y)", "criterion(out.softmax(-1), y)"),
    ("softmax-twice", INLINE, "(out, y)", "(out.softmax(-1), y)"),
    ("softmax-twice", CLEAN.replace("Loss()", "Loss().cuda()"), "criterion(out", "criterion(out.softmax(-1)"),
    ("softmax-twice", CLEAN, "out = model(x)", "out = torch.softmax(model(x), -1)"),
    ("softmax-twice", BY_NAME, "ce(out, y)", "ce(sm(out, -1), y)"),
    ("softmax-twice", BY_NAME, "out = model(x)", "out = softmax(model(x), -1)"),
    ("not-normalized", BY_NAME_ACCUMULATED, "ce(out, y) / 4", "ce(out, y)"),
    ("evaluation-with-gradients", IN_A_COMPREHENSION, "with torch.no_grad():", "if True:"),
    ("evaluation-with-gradients", IN_A_GENERATOR, "with torch.no_grad():", "if True:"),
    ("softmax-twice", CLEAN, "nn.Dropout(0.1)", "nn.Dropout(0.1), nn.Softmax(-1)"),
    ("waits-for-values", CLEAN, "total += loss.detach()", "total += loss.item()"),
    ("waits-for-values", CLEAN, "total += loss.detach()", "print(f'loss {loss:.3f}')"),
    (
        "waits-for-data",
        FILES + "loader = DataLoader(Photos(), 32, num_workers=4)" + CLEAN,
        ", num_workers=4",
        "",
    ),
    ("pageable-memory", LOADED, ", pin_memory=True", ""),
    ("pageable-memory", LOADED.replace(ONE_BY_ONE, AS_A_DICT), ", pin_memory=True", ""),
    ("made-on-the-host", POSITIONS, "arange(x.shape[1], device=x.device)", "arange(x.shape[1]).to(x.device)"),
    ("made-on-the-host", POSITIONS, "torch.arange(x.shape[1], device=x.device)", "torch.ones(4).triu().cuda()"),
    ("made-on-the-host", CLEAN, "out = model(x)", "out = model(x, torch.zeros(len(x)).to('cuda'))"),
    (
        "cache-flushed",
        CLEAN,
        "total += loss.detach()",
        "torch.cuda.empty_cache()",
    ),
    (
        "anomaly-detection",
        "torch.autograd.set_detect_anomaly(False)" + CLEAN,
        "anomaly(False)",
        "anomaly(True)",
    ),
    (
        "benchmark-with-changing-shapes",
        "torch.backends.cudnn.benchmark = False\nnn.utils.rnn.pad_sequence(nn.Conv1d(2, 2, 3)(x))" + CLEAN,
        "benchmark = False",
        "benchmark = True",
    ),
    (
        "attention-not-fused",
        "net = AutoModel.from_pretrained(name, attn_implementation='sdpa')" + CLEAN,
        "'sdpa'",
        "'eager'",
    ),
    ("evaluation-gathered", TRAINER, ", eval_accumulation_steps=1", ""),
    ("data-parallel", CLEAN, "criterion =", "model = nn.DataParallel(model)\ncriterion ="),
    (
        "loaded-onto-the-device",
        MADE + "saved = torch.load(path, map_location='cpu')\nmodel.load_state_dict(saved['model'])" + CLEAN,
        ", map_location='cpu'",
        "",
    ),
]
HARMLESS = [
    # (in the clean script, instead) where a rougher check would find something
    ("total += loss.detach()", "total = loss + total\n        total.backward()\n        total = 0"),
    ("total += loss.detach()", "with torch.no_grad():\n            total += loss"),
    ("total += loss.detach()", "total = 0.9 * total.detach() + 0.1 * loss"),
    ("total += loss.detach()", "total = loss if loss < total else total"),
    ("total += loss.detach()", "total = 0.9 * total + loss\n        total = total.detach()"),
    ("criterion(out, y)", "nn.NLLLoss()(F.log_softmax(out, -1), y)"),
    ("total += loss.detach()", "losses.append(out)\n        torch.stack(losses).sum()\n        losses.clear()"),
    ("loss.backward()", "loss.backward(retain_graph=True)\n        (loss * 2).backward()"),
    (
        "loss.backward()",
        "(loss / parts).backward()\n        total += 1 / parts",
    ),
    ("with torch.no_grad():", "with torch.inference_mode():"),
    ("def evaluate():", "@torch.no_grad()\ndef evaluate():"),
    ("out = model(x)", "out = model(x, torch.randn(len(x)).to('cuda'))"),
    ("out = model(x)", "out = model(x, torch.zeros(len(x)).to('cpu'))"),
    ("out = model(x)", "out = model(x, torch.zeros(len(x)).to(x.dtype))"),
    ("out = model(x)", "out = model(x, torch.zeros(2).to('cuda') if i == 0 else None)"),
    ("for epoch in range(3):", "weights = torch.ones(4).to('cuda')\nfor epoch in range(3):"),
    ("def evaluate():", "def clear():\n    optimizer.zero_grad(set_to_none=False)\n\ndef evaluate():"),
    ("total += loss.detach()", "torch.cuda.empty_cache() if i % 100 == 0 else None"),
    ("zero_grad()", "zero_grad(set_to_none=True)"),
    ("enumerate(batches)", "enumerate(test_time_loader)"),
    ("criterion(out, y)", "F.nll_loss(out.log_softmax(-1), y)"),
    ("optimizer.zero_grad()", "for p in model.parameters():\n            p.grad=None"),
    ("optimizer.zero_grad()", "for p in model.parameters():\n            p.grad *= 0"),
    ("optimizer.zero_grad()", "for p in model.parameters():\n            p.grad.detach_().zero_()"),
    (
        "model.parameters(), fused=True)",
        "model.head.parameters())\noptimizer.add_param_group({'params': rest})",
    ),
    ("model.parameters(), fused=True)", "model.head.parameters())\nother = Muon(model.body.parameters())"),
    ("with torch.no_grad():", "context = torch.no_grad()\n    with context:"),
    ("    with torch.no_grad():", "    torch.set_grad_enabled(mode=False)\n    if True:"),
    ("    with torch.no_grad():", "    torch.set_grad_enabled(model.training)\n    if True:"),
    (
        "def evaluate():\n    model.eval()\n    with torch.no_grad():",
        "@contextmanager\ndef evaluating():\n    model.eval()\n    with torch.no_grad():\n        yield\n\n"
        "def evaluate():\n    model.eval()\n    with evaluating():",
    ),
    (
        "        loss.backward()",
        "        for part in range(2):\n            loss = criterion(out[part], y)\n"
        "            loss.backward(retain_graph=True)",
    ),
]
FROZEN = VALIDATED.replace(
    "model.eval()\n    with torch.no_grad():", "frozen.requires_grad_(False)\n    if True:"
)
SAMPLED = CLEAN.replace("model.train()", "").replace("model.eval()", "pass").replace("evaluate", "draw")
IN_TURN = (
    MADE.replace("criterion =", "opt_b = optim.SGD(parts)\ncriterion =")
    + """
for i, (x, y) in enumerate(batches):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    if i % 2 == 0:
        optimizer.step()
    else:
        opt_b.step()
"""
)
SCHEDULED = "from transformers import get_linear_schedule_with_warmup" + CLEAN.replace(
    "criterion =", "optim_warm = get_linear_schedule_with_warmup(optimizer, 10, 100)\ncriterion ="
).replace("if i % 100 == 0:", "if i % 100 == 0:\n            optim_warm.step()")

UNTRAINED = IN_FUNCTIONS.replace("    model.train()\n", "")
ONE_PART = OF_PARTS.replace("optim.AdamW(model.", "optim.AdamW(model.head.")
OTHER_MODES = [
    UNTRAINED.replace("nn.Dropout(0.1)", "nn.ReLU()"),
    UNTRAINED.replace("optim.AdamW(model.", "optim.AdamW(student."),
    UNTRAINED.replace("for epoch in range(3):\n", "for fold in range(3):\n    model = build()\n"),
    UNTRAINED.replace("    test()\n", "    if epoch == 2:\n        test()\n"),
    UNTRAINED.replace("    test()\n", "test()\n"),
    UNTRAINED.replace("    train()\n", "    model.train()\n    train()\n"),
    UNTRAINED.replace("    train()\n", "    set_train_mode(model)\n    train()\n"),
    UNTRAINED.replace("    train()\n", "    model.training = True\n    train()\n"),
    UNTRAINED.replace("def test()", "def test(model)").replace("    test()", "    test(teacher)"),
    IN_METHODS.replace("        self.model.train()\n", "").replace("            self.test(batches)\n", ""),
    EVALUATED_ONCE.replace("for epoch", "model.eval()\nmodel = build(model)\nfor epoch"),
]
OTHER_PARTS = [
    ONE_PART.replace("nn.Sequential(nn.Linear(4, 4), nn.ReLU())", "nn.ReLU()"),
    ONE_PART.replace("model = Net()", "model = build()"),
    ONE_PART.replace("model = Net()", "model = Net()\nfreeze(model.backbone)"),
    ONE_PART.replace(
        "self.head(self.backbone(x))",
        "self.head(self.seen(x))\n\n    @torch.no_grad()\n    "
        "def seen(self, x):\n        return self.backbone(x)",
    ),
    ONE_PART.replace("model(x)", "model.head(x)"),
    ONE_PART.replace("model(x)", "model.head(model(x).detach())"),
    ONE_PART.replace("    loss =", "    with torch.no_grad():\n        seen = model(x)\n    loss =").replace(
        "cross_entropy(model(x)", "cross_entropy(model.head(seen)"
    ),
]

LEFT = TWO.replace("other.zero_grad()", "pass")
OF_TWO = [
    LEFT.replace("critic.parameters()", "model.parameters()"),
    LEFT.replace("critic.parameters()", "model.head.parameters()"),
    LEFT.replace("critic.parameters()", "[*critic.parameters()]"),
    LEFT.replace("nn.Linear(4, 4).cuda()", "model.head"),
    LEFT.replace("nn.Linear(4, 4).cuda()", "Critic(model.body)"),
    "import accelerate" + LOADED.replace(", pin_memory=True", ""),
    LEFT.replace("optimizer.zero_grad()", "for each in (optimizer, other):\n            each.zero_grad()"),
    LEFT.replace("optimizer.zero_grad()", "optimizer.zero_grad()\n        critic.zero_grad()"),
    CLEAN + "model.eval()\nexplained = [model(x) for x in parts]\nsum(explained).backward()\n",
    CLEAN.replace("out = model(x)", "out = sum([model(x) for x in (x, x)])"),
]
ON_THE_HOST = LOADED.replace(", pin_memory=True", "").replace(ONE_BY_ONE, "pass")
WITH_OPTIONS = LOADED.replace("pin_memory=True", "**options")
MADE_THERE = POSITIONS.replace("arange(x.shape[1], device=x.device)", "arange(4).to(x.device)")
CACHED = MADE_THERE.replace(
    "        return self.tokens", "        if self.seen is None:\n            return self.tokens"
)
FILLED = MADE_THERE.replace("torch.arange(4)", "torch.tensor(self.places)")


def found(text: str) -> dict[str, int]:
    """The number of the first line of each check's findings."""
    source = Source("train.py", HEAD + text)
    return {each.check: int(each.line.removeprefix("train.py:")) for each in reversed(source_findings(source))}


@pytest.mark.parametrize(("check", "clean", "old", "new"), FAULTS, ids=[f"{f[0]} {f[3]}" for f in FAULTS])
def test_a_planted_fault_is_found_and_nothing_without_it(check: str, clean: str, old: str, new: str) -> None:
    assert clean.count(old) >= 1
    assert found(clean) == {}
    faulty = clean.replace(old, new)
    assert check in found(faulty)
    assert set(found(faulty)) <= {check, "not-normalized", "trained-in-evaluation-mode"}


def test_an_evaluation_in_training_mode_with_gradients_has_both_findings() -> None:
    evaluated = VALIDATED.replace("model.train()", "").replace(
        "model.eval()\n    with torch.no_grad():", "if True:"
    )
    assert set(found(evaluated)) == {"evaluation-with-gradients", "evaluated-in-training-mode"}


def test_a_softmax_has_one_finding_where_its_loss_trains() -> None:
    validated = "            criterion(model(x), y)\n"
    text = CLEAN.replace(EVALUATING, f"        for x, y in batches:\n{validated}")
    assert found(text) == {}
    source = Source("train.py", HEAD + text.replace("nn.Dropout(0.1)", "nn.Dropout(0.1), nn.Softmax(-1)"))
    (finding,) = source_findings(source)
    line = (HEAD + text).splitlines().index("        loss = criterion(out, y)") + 1
    assert (finding.check, finding.line) == ("softmax-twice", f"train.py:{line}")
    in_evaluation = Source(
        "train.py", HEAD + text.replace(validated, validated.replace("(x)", "(x).softmax(-1)"))
    )
    (finding,) = source_findings(in_evaluation)
    assert (finding.check, finding.change) == ("softmax-twice", "omit the softmax before cross entropy")


def test_every_check_has_a_planted_fault() -> None:
    assert {check_name(each) for each in SOURCE_CHECKS} == {fault[0] for fault in FAULTS}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("compute_metrics=accuracy", "compute_metrics=None"),
        ("Trainer(model, options", "Trainer(model, others"),
        ("GPT2LMHeadModel", "BertForSequenceClassification"),
        (', eval_strategy="epoch"', ", **options"),
        (', eval_strategy="epoch"', ", predict_with_generate=True"),
        ("compute_metrics", "preprocess_logits_for_metrics=best, compute_metrics"),
    ],
)
def test_an_evaluation_that_gathers_little_is_no_finding(old: str, new: str) -> None:
    faulty = TRAINER.replace(", eval_accumulation_steps=1", "")
    assert old in faulty
    assert found(faulty.replace(old, new)) == {}


@pytest.mark.parametrize(
    "text",
    [
        FROZEN,
        SAMPLED,
        IN_TURN,
        SCHEDULED,
        ON_THE_HOST,
        WITH_OPTIONS,
        CACHED,
        FILLED,
        *OTHER_MODES,
        *OTHER_PARTS,
    ],
)
def test_a_script_that_means_what_looks_like_a_fault_has_no_finding(text: str) -> None:
    assert found(text) == {}


@pytest.mark.parametrize(("old", "new"), HARMLESS, ids=[new for _, new in HARMLESS])
def test_what_only_looks_like_a_fault_is_no_finding(old: str, new: str) -> None:
    assert old in CLEAN
    assert found(CLEAN.replace(old, new)) == {}


def test_a_function_called_backward_is_no_method_of_a_loss() -> None:
    assert found(CLEAN + "def backward(loss):\n    loss.backward()\nbackward(loss)") == {}
    kept = CLEAN.replace("total += loss.detach()", "total += loss")
    assert set(found(kept + "backward(model, 1)")) == {"history-kept"}


def test_a_finding_has_the_line_of_the_fault() -> None:
    text = CLEAN.replace("total += loss.detach()", "total += loss")
    line = (HEAD + text).splitlines().index("        total += loss") + 1
    assert found(text) == {"history-kept": line}


def test_a_comment_suppresses_a_finding() -> None:
    for comment, kept in {
        "# brimful: ignore": set(),
        "# on purpose # brimful: ignore[history-kept, data-parallel]": set(),
        "# brimful: ignore[cache-flushed]": {"history-kept"},
    }.items():
        assert {*found(CLEAN.replace("total += loss.detach()", f"total += loss  {comment}"))} == kept
        retained = f"loss.backward(\n            retain_graph=True\n        )  {comment}"
        kept = {each.replace("history-kept", "graph-retained") for each in kept}
        commented = retained.replace("history-kept", "graph-retained")
        assert {*found(CLEAN.replace("loss.backward()", commented))} == kept


def test_the_examples_have_no_findings_but_the_one_with_faults() -> None:
    checked = check_sources([str(ROOT / "examples")])
    assert len(checked) == len(list((ROOT / "examples").rglob("*.py")))
    found = {
        Path(path).name: [each.check for each in findings] for path, findings in checked.items() if findings
    }
    assert found == {"leaky.py": ["history-kept"]}


def test_folders_are_searched_and_what_is_not_python_is_a_finding_beside_the_others(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no Python files"):
        check_sources([str(tmp_path)])
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "hidden.py").write_text("(")
    (tmp_path / "train.py").write_text("import torch\n")
    assert check_sources([str(tmp_path)]) == {str(tmp_path / "train.py"): ()}
    (tmp_path / "leaky.py").write_text(HEAD + CLEAN.replace("total += loss.detach()", "total += loss"))
    for text, why, line in (
        ("x = 1\ny = (\n", "it is not Python: '(' was never closed", 2),
        ("import torch\n" + "+".join(["1"] * 20_000), "nested too deeply", 1),
        ("# coding: none\n", "it is not Python: unknown encoding", 1),
    ):
        (tmp_path / "broken.py").write_text(text)
        checked = check_sources([str(tmp_path)])
        (finding,) = checked[str(tmp_path / "broken.py")]
        assert (finding.check, finding.line) == ("not-checked", f"{tmp_path / 'broken.py'}:{line}")
        assert why in finding.what
        (leak,) = checked[str(tmp_path / "leaky.py")]
        assert leak.check == "history-kept"
    (tmp_path / "broken.py").unlink()
    (tmp_path / "broken.py").symlink_to("nowhere")
    (finding,) = check_sources([str(tmp_path)])[str(tmp_path / "broken.py")]
    assert "No such file" in finding.what
    with pytest.raises(FileFormatError, match="No such file"):
        check_sources([str(tmp_path / "broken.py")])


def test_sarif_has_rules_results_and_relative_places() -> None:
    text = CLEAN.replace("total += loss.detach()", "total += loss").replace("print(", "float(loss); print(")
    source = Source("my folder/train.py", HEAD + text)
    log = json.loads(json.dumps(sarif_document(source_findings(source))))
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    (result,) = run["results"]
    assert log["version"] == "2.1.0"
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "history-kept"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "my%20folder/train.py"
    assert place["region"]["startLine"] == (HEAD + text).splitlines().index("        total += loss") + 1
    assert {rule["id"] for rule in rules} == {"not-checked", *map(check_name, SOURCE_CHECKS)}
