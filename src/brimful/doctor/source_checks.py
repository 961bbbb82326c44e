"""What is wrong with a training script, as far as its source text shows it: one function for each check.

Start reading at `check_sources`. A check finds nothing where the text leaves open whether there is a fault.
Checks have the names of those of `brimful.doctor.findings` that find the same fault in a run.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from brimful.codec import read_regular_file
from brimful.doctor.findings import Finding, known_fault
from brimful.doctor.source import (
    Comprehension,
    Loop,
    Source,
    Training,
    called,
    has_graph_of,
    is_constant,
    keyword,
    last_name,
    losses_of,
    name_of,
)
from brimful.errors import FileFormatError, UsageError
from brimful.utils.decode_errors import one_line
from brimful.utils.files import is_directory
from brimful.utils.quantities import MIB

SourceCheck = Callable[[Source], Iterator[Finding]]
SOURCE_CHECKS: list[SourceCheck] = []
"""All checks."""

NOTES = frozenset({"pageable-memory", "waits-for-values"})
"""Checks whose findings are notes: they are true of most scripts, and seldom matter much."""

NOT_CHECKED = "not-checked"
"""Name of the finding of a script that cannot be checked."""

_IGNORED = re.compile(r"#\s*brimful:\s*ignore\b(?:\[([\w\s,-]*)\])?")


def source_check(function: SourceCheck) -> SourceCheck:
    """Add a check to `SOURCE_CHECKS`; a decorator."""
    SOURCE_CHECKS.append(function)
    return function


def check_name(function: SourceCheck) -> str:
    """The name of a check, as findings have it."""
    return function.__name__.replace("_", "-")


_SCRIPT_BYTES = 16 * MIB
"""Largest script that is read. A choice."""
_OTHERS_FOLDERS = ("__pycache__", "dist-packages", "node_modules", "site-packages")


def check_sources(paths: Iterable[str]) -> dict[str, tuple[Finding, ...]]:
    """What is wrong with scripts, by path, and with all scripts in folders but hidden and installed ones.

    A script that cannot be checked has a finding that says why. FileFormatError for a named one that cannot be
    read, UsageError for a folder without scripts.
    """
    return {
        str(path): _checked(path, is_named=path == Path(given))
        for given in paths
        for path in _scripts(Path(given))
    }


def _checked(path: Path, *, is_named: bool) -> tuple[Finding, ...]:
    number = 1
    try:
        content = read_regular_file(path, what="script", limit_bytes=_SCRIPT_BYTES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escape sequences in the script
            source = Source(str(path), importlib.util.decode_source(content))
            source.tree  # noqa: B018  # parses it
    except FileFormatError as error:
        if is_named:
            raise
        why = str(error).removesuffix(".")
    except SyntaxError as error:
        why, number = f"it is not Python: {error.msg}", error.lineno or 1
    except (ValueError, RecursionError, MemoryError) as error:
        why = f"it is not Python, or nested too deeply: {error}"
    else:
        return source_findings(source)
    found = Finding(
        what=f"the script cannot be checked: {one_line(why)}",
        change="mend it, or name the other scripts",
        line=f"{path}:{number}",
        check=NOT_CHECKED,
    )
    return (found,)


def _scripts(path: Path) -> list[Path]:
    if not is_directory(path):
        return [path]
    found = [
        each
        for each in sorted(path.rglob("*.py"))
        if not any(part.startswith(".") or part in _OTHERS_FOLDERS for part in each.relative_to(path).parts)
    ]
    if not found:
        raise UsageError(f"the folder {path} has no Python files.")
    return found


def source_findings(source: Source) -> tuple[Finding, ...]:
    """What is wrong with a script, by line; of a script without torch nothing.

    A comment "# brimful: ignore" or "# brimful: ignore[CHECK]" in the line, or another line of its statement,
    suppresses a finding.
    """
    if not source.trains:
        return ()
    found = {replace(each, check=check_name(check)) for check in SOURCE_CHECKS for each in check(source)}
    kept = [each for each in found if not _is_ignored(each, _lines_around(source, line_number(each)))]
    return tuple(sorted(kept, key=lambda each: (line_number(each), each.check)))


def line_number(finding: Finding) -> int:
    """The number of a finding's line."""
    return int(finding.line.rpartition(":")[2])


def _lines_around(source: Source, number: int) -> str:
    """A line and the other lines of its statement; of a loop, a block or a function those of its head."""
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in source.nodes
        if isinstance(node, ast.expr | ast.Assign | ast.AugAssign | ast.Expr)
    ]
    around = [(first, last) for first, last in spans if first <= number <= last] or [(number, number)]
    lines = source.text.split("\n")[min(first for first, _ in around) - 1 : max(last for _, last in around)]
    return "\n".join(lines)


def _is_ignored(finding: Finding, text: str) -> bool:
    return any(not each[1] or finding.check in re.split(r"[\s,]+", each[1]) for each in _IGNORED.finditer(text))


# What is kept


@source_check
def history_kept(source: Source) -> Iterator[Finding]:
    """A sum or a list of losses that have graphs, in a training loop."""
    for training in source.trainings:
        names = source.names_with_graphs(training)
        for node in source.in_loop(training.loop):
            added = _added(node)
            if added is None or source.is_without_graph(node):
                continue
            name, value = added
            if has_graph_of(value, names) and _outlives(source, name, training):
                yield known_fault("history-kept", source.line(node), name=name)


def _added(node: ast.AST) -> tuple[str, ast.expr] | None:
    """The name that a statement adds to, and what it adds."""
    match node:
        case ast.AugAssign(op=ast.Add()):
            return _base_name(node.target), node.value
        case ast.Assign(targets=[target], value=value):
            name, new = (
                _base_name(target),
                [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value],
            )
            for each in new:  # "avg = loss if avg is None else 0.9 * avg + 0.1 * loss"
                if isinstance(each, ast.BinOp) and _has_itself(each, target, name):
                    return name, each
        case ast.Call(func=ast.Attribute(attr="append", value=held), args=[value]):
            return _base_name(held), value
    return None


def _has_itself(value: ast.BinOp, target: ast.expr, name: str) -> bool:
    """Whether what is assigned to a target has the target's own graph."""
    is_read = any(ast.unparse(each) == ast.unparse(target) for each in ast.walk(value))
    return is_read and has_graph_of(value, frozenset({name}))


def _base_name(target: ast.expr) -> str:
    while isinstance(target, ast.Subscript):
        target = target.value
    return name_of(target)


def _outlives(source: Source, name: str, training: Training) -> bool:
    """Whether a name is bound to a number or a container outside of a training loop, which only adds to it."""
    ends = {name for each in source.calls_of("backward") for name in losses_of(each)}
    bound = source.bindings(name, training.loop)
    outside = [each.value for each in bound if not source.is_in(each.statement, training.loop)]
    inside = [each for each in bound if source.is_in(each.statement, training.loop)]
    if not name or name in ends or not outside or not all(map(_is_empty, outside)):
        return False
    if any(_added(each.statement) is None and not _is_first(source, each.statement, name) for each in inside):
        return False
    used = [node for node in ast.walk(training.loop) if name_of(node) == name]
    return not any(_is_consumed(source, each, training.loop) for each in used)


def _is_first(source: Source, statement: ast.AST, name: str) -> bool:
    """Whether a statement runs where a name is still None."""
    parent = source.parents[statement]
    if not isinstance(parent, ast.If) or statement not in parent.body:
        return False
    return ast.unparse(parent.test) == f"{name} is None"


def _is_empty(value: ast.expr | None) -> bool:
    """Whether a value is a number, or a new container or tensor."""
    if isinstance(value, ast.Call):
        return called(value) in ("list", "dict", "defaultdict", "zeros", "tensor", "zeros_like")
    return isinstance(value, ast.Constant | ast.List | ast.Dict | ast.ListComp)


def _is_consumed(source: Source, node: ast.AST, loop: Loop) -> bool:
    """Whether a container is emptied, or what it holds is computed with."""
    for each in source.ancestors(node):
        if each is loop:
            return False
        if isinstance(each, ast.Delete):
            return True
        if isinstance(each, ast.Call) and called(each) in _CONSUMES:
            return True
    return False


_CONSUMES = ("cat", "clear", "concat", "mean", "pop", "popleft", "stack", "sum")


# Evaluation


@source_check
def evaluation_with_gradients(source: Source) -> Iterator[Finding]:
    """A loop or comprehension after `eval()`, or over data for evaluation, of graphs that no backward uses."""
    if any(_may_end_graphs(source, each) for each in source.calls_of("set_grad_enabled")):
        return
    found: dict[Loop | Comprehension, ast.Call] = {}
    for call in source.calls:
        loop = source.repeated_in(call)
        name = name_of(call.func)
        if loop is None or name not in source.models or source.is_without_graph(call):
            continue
        evaluates = _is_in_evaluation_mode(source, call, name) or _is_over_evaluation_data(loop)
        if not evaluates or _has_backward(source, loop):
            continue
        if "requires_grad" not in ast.unparse(source.function_of(call)):
            found.setdefault(loop, call)
    for call in found.values():
        yield known_fault("evaluation-with-gradients", source.line(call))


def _may_end_graphs(source: Source, call: ast.Call) -> bool:
    """Whether a call of `set_grad_enabled` outside of a `with` may switch graphs off for later code."""
    asked = call.args[0] if call.args else keyword(call, "mode")
    return not is_constant(asked, True) and not isinstance(source.parents[call], ast.withitem)


def _is_in_evaluation_mode(source: Source, call: ast.Call, model: str) -> bool:
    """Whether the last change of a model's mode above a call in its function is `eval()`."""
    function = source.function_of(call)
    modes = [
        each
        for each in source.calls_of("eval", "train")
        if source.function_of(each) is function
        and each.lineno < call.lineno
        and isinstance(each.func, ast.Attribute)
        and name_of(each.func.value) == model
    ]
    last = max(modes, key=lambda each: each.lineno, default=None)
    if last is None or called(last) != "eval" or last.args:
        return False
    decided = {each for each in source.conditions_of(last, function) if isinstance(each, ast.If)}
    return decided <= {*source.ancestors(call)}


_EVALUATION_DATA = re.compile(
    r"\b(\w+_)?(dev|eval|evaluation|test|val|valid|validation)(_?(batches|data|dataset|dl|iter|loader|set))+\b"
)


def _is_over_evaluation_data(loop: Loop | Comprehension) -> bool:
    """Whether a loop's batches have a name of data for evaluation, such as val_loader or test_dataloader."""
    if isinstance(loop, ast.While):
        return False
    batches = loop.generators[0].iter if isinstance(loop, Comprehension) else loop.iter
    return bool(_EVALUATION_DATA.search(ast.unparse(batches).lower()))


def _has_backward(source: Source, loop: Loop | Comprehension) -> bool:
    """Whether a loop or its function asks for gradients where the loop's results may be used."""
    around = {loop, None, *source.ancestors(loop)}
    function = source.function_of(loop)
    return any(
        source.is_in(each, loop) or (source.is_in(each, function) and source.loop_of(each) in around)
        for each in source.calls_of("backward", "grad", "jacobian", "manual_backward", "hessian", "vjp")
    )


@source_check
def evaluation_gathered(source: Source) -> Iterator[Finding]:
    """A `Trainer` that keeps all logits of an evaluation on the device, for tokens or pixels."""
    if any(word in source.text for word in _KEEP_LESS) or not _OF_TOKENS_OR_PIXELS.search(source.text):
        return
    for call in _arguments_of_measured(source):
        given = {each.arg for each in call.keywords}
        generates = is_constant(keyword(call, "predict_with_generate"), True)
        is_known = source.full_name(call.func) in (
            "transformers.TrainingArguments",
            "transformers.Seq2SeqTrainingArguments",
        )
        if is_known and None not in given and not generates:
            yield Finding(
                what="evaluation keeps the logits of all samples on the device, for compute_metrics",
                change="eval_accumulation_steps=1; or preprocess_logits_for_metrics that keeps .argmax(-1)",
                line=source.line(call),
            )


def _arguments_of_measured(source: Source) -> Iterator[ast.Call]:
    """What makes the arguments of a `Trainer` that has `compute_metrics`."""
    for trainer in source.calls:
        metrics = keyword(trainer, "compute_metrics")
        if not called(trainer).endswith("Trainer") or metrics is None or is_constant(metrics, None):
            continue
        for given in (*trainer.args[1:2], keyword(trainer, "args")):
            made = [given, *(each.value for each in source.bindings(name_of(given), trainer))]
            yield from (each for each in made if isinstance(each, ast.Call))


_KEEP_LESS = (
    "eval_accumulation_steps",
    "preprocess_logits_for_metrics",
    "prediction_loss_only",
    "batch_eval_metrics",
)
_OF_TOKENS_OR_PIXELS = re.compile(
    r"For(CausalLM|MaskedLM|Seq2SeqLM|ConditionalGeneration|\w*Segmentation)\b|LMHeadModel\b"
)


@source_check
def trained_in_evaluation_mode(source: Source) -> Iterator[Finding]:
    """Training of a model below its `eval()`, or in a round after it, and nothing that calls `train()`."""
    changes = [each for each in source.calls if _TRAINS.fullmatch(called(each))]
    if not all(_is_own_function(source, each) for each in changes) or _SETS_MODE.search(source.text):
        return
    for training in source.trainings:
        for model in sorted(source.models & _called_in(source, training)):
            modes = [each for each in source.calls_of("eval") if _is_of(each, model) and not each.args]
            rounds = source.rounds_of(training.loop, model)
            decides = [
                each
                for each in modes
                if source.rounds_of(each, model) & rounds or _is_just_before(source, each, training.loop)
            ]
            if decides and _is_optimized(source, model) and _depends_on_mode(source, model, training):
                yield Finding(
                    what=f"{model} trains in evaluation mode after this eval(): nothing calls train()",
                    change=f"call {model}.train() before each round of training",
                    line=source.line(min(decides, key=lambda each: each.lineno)),
                )


_SETS_MODE = re.compile(r"\.training\s*=[^=]")


_TRAINS = re.compile(r"(set_|to_)?train(ing)?(_mode)?")


def _is_own_function(source: Source, call: ast.Call) -> bool:
    """Whether a call is of a function or method that the script defines, such as `train`, not of a model's."""
    if not isinstance(call.func, ast.Attribute):
        return bool(source.functions(called(call)))
    held = name_of(call.func.value)
    around = [each for each in source.ancestors(call) if isinstance(each, ast.ClassDef)]
    classes = [each for maker in source.made_by(held, call) for each in source.classes(maker)]
    found = around[:1] if held == "self" else classes
    return bool(found) and all(
        any(getattr(method, "name", "") == called(call) for method in each.body) for each in found
    )


def _called_in(source: Source, training: Training) -> set[str]:
    """Names of what a training loop calls for a result that has a graph."""
    return {
        name_of(each.func)
        for each in source.calls
        if source.loop_of(each) is training.loop
        and not source.is_without_graph(each)
        and last_name(source.parents[each]) != "detach"
    }


def _is_of(call: ast.Call, model: str) -> bool:
    return isinstance(call.func, ast.Attribute) and name_of(call.func.value) == model


def _is_optimized(source: Source, model: str) -> bool:
    """Whether an optimizer has all parameters of a model."""
    asked = [each for each in source.calls_of("parameters", "named_parameters") if _is_of(each, model)]
    around = [outer for each in asked for outer in source.ancestors(each) if isinstance(outer, ast.Call)]
    return any(_OPTIMIZERS.search(source.full_name(each.func)) for each in around)


_OPTIMIZERS = re.compile(r"optim|adam|sgd", re.IGNORECASE)


def _depends_on_mode(source: Source, model: str, training: Training) -> bool:
    """Whether a model may have dropout or BatchNorm: the script names some, or others wrote the model."""
    makers = source.made_by(model, training.loop)
    is_others = any(each and not each.startswith("torch.") and not source.classes(each) for each in makers)
    return _has_modes(source) or is_others or not makers


def _has_modes(source: Source) -> bool:
    """Whether a script names layers with dropout or BatchNorm."""
    kinds = {last_name(node) for node in source.nodes if isinstance(node, ast.Name | ast.Attribute)}
    return any(each.startswith(("BatchNorm", "Dropout", "Transformer")) for each in kinds)


def _is_just_before(source: Source, call: ast.Call, loop: Loop) -> bool:
    """Whether `eval()` of a model with dropout or BatchNorm stands above a training loop in its function."""
    function, outer = source.function_of(loop), source.loop_of(call)
    is_above = source.function_of(call) is function and call.lineno < loop.lineno
    is_around = outer is None or source.is_in(loop, outer)
    is_always = not source.conditions_of(call, outer or function)
    assert isinstance(call.func, ast.Attribute)
    bound = source.bindings(name_of(call.func.value), loop)
    is_same = not any(call.lineno < getattr(each.statement, "lineno", 0) < loop.lineno for each in bound)
    is_meant = "requires_grad" in source.text or not _has_modes(source)  # BatchNorm of a part may be frozen
    return is_above and is_around and is_always and is_same and not is_meant


@source_check
def evaluated_in_training_mode(source: Source) -> Iterator[Finding]:
    """A script that evaluates a model, by the name of its data or function, and never calls `eval()`."""
    kinds = {last_name(node) for node in source.nodes if isinstance(node, ast.Name | ast.Attribute)}
    if not any(each.startswith(("BatchNorm", "Dropout")) for each in kinds) or kinds & {"eval", "train"}:
        return
    trained = {name for training in source.trainings for name in _called_in(source, training)}
    for call in source.calls:
        loop, name = source.repeated_in(call), name_of(call.func)
        if loop is None or name not in source.models & trained:
            continue
        function = getattr(source.function_of(call), "name", "")
        evaluates = _is_over_evaluation_data(loop) or (
            _EVALUATION_FUNCTION.search(function) and source.is_without_graph(call)
        )
        if evaluates and not _has_backward(source, loop):
            yield Finding(
                what=f"{name} is evaluated in training mode: with dropout, and BatchNorm's statistics move",
                change=f"call {name}.eval() before, and {name}.train() after it",
                line=source.line(call),
            )


_EVALUATION_FUNCTION = re.compile(r"(\b|_)(eval|evaluate|test|val|valid|validate|validation)(\b|_)")


# Gradients


def _optimizer_calls(source: Source, method: str, loop: Loop | None = None) -> Iterator[tuple[str, ast.Call]]:
    """Calls of a method of optimizers, with the optimizer's name, which a gradient scaler's step is given."""
    for call in source.calls_of(method):
        if not isinstance(call.func, ast.Attribute) or (loop is not None and source.loop_of(call) is not loop):
            continue
        name = name_of(call.func.value)
        if "scaler" in name.lower() and call.args:
            name = name_of(call.args[0])
        elif method == "step" and call.args:  # a closure, which clears gradients, or a distributed optimizer
            continue
        made = source.made_by(name, call)
        last = name.rpartition(".")[2].lower()
        is_scheduler = "sched" in last or any(_SCHEDULER.search(each) for each in made)
        if not is_scheduler and (
            last.startswith("opt") or any(each.startswith("torch.optim.") for each in made)
        ):
            yield name, call


_SCHEDULER = re.compile(r"scheduler|get_\w*schedule")


@source_check
def gradients_kept(source: Source) -> Iterator[Finding]:
    """`zero_grad(set_to_none=False)`."""
    names = {each.attr for each in source.nodes if isinstance(each, ast.Attribute)}
    if names & {"CUDAGraph", "grad"}:
        return  # a graph needs gradients at fixed addresses, and other code may need some that are not None
    trained = {source.function_of(each) for each in source.calls_of("backward")}
    for call in source.calls_of("zero_grad"):
        is_of_training = source.loop_of(call) is not None or source.function_of(call) in trained
        if is_of_training and is_constant(keyword(call, "set_to_none"), False):
            yield Finding(
                what="gradients of the step before take memory during the forward",
                change="zero_grad(set_to_none=True), the default",
                line=source.line(call),
            )


@source_check
def gradients_added(source: Source) -> Iterator[Finding]:
    """An optimizer that steps after each backward, and whose gradients nothing clears."""
    clears = list(source.calls_of("zero_grad"))
    if _may_clear_by_hand(source) or source.text.count("zero_grad") != len(clears):
        return
    cleared = {name_of(each.func.value) if isinstance(each.func, ast.Attribute) else "" for each in clears}
    for training in source.trainings:
        for name, call in _optimizer_calls(source, "step", training.loop):
            is_new = any(True for _ in source.bindings_in(name, training.loop))
            is_left = name not in cleared and _has_own_parameters(source, name, cleared, call)
            if is_left and _is_unconditional(source, call, training.loop) and not is_new:
                yield known_fault("gradients-added", source.line(call), name=name)


def _has_own_parameters(source: Source, name: str, others: set[str], where: ast.AST) -> bool:
    """Whether no other optimizer has parameters of an optimizer's model."""
    own = _model_of(source, name, where)
    return all(_are_apart(source, own, _model_of(source, each, where), where) for each in others)


def _are_apart(source: Source, first: str, second: str, where: ast.AST) -> bool:
    """Whether two models are different parts of one, or each is made by itself, and the text shows it."""
    if not first or not second or f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}."):
        return False
    roots = {each.partition(".")[0] for each in (first, second)}
    made = [each.value for root in roots for each in source.bindings(root, where)]
    uses = {name for each in made if isinstance(each, ast.Call) for name in _names_within(each)}
    is_made = all(source.bindings(root, where) for root in roots)
    return is_made and all(isinstance(each, ast.Call) for each in made) and uses.isdisjoint(roots)


def _model_of(source: Source, optimizer: str, where: ast.AST) -> str:
    """The name of the model whose `parameters()` an optimizer of torch has; "" if the text leaves it open."""
    match [each.value for each in source.bindings(optimizer, where)]:
        case [ast.Call(args=[ast.Call(func=ast.Attribute(attr="parameters", value=model)), *_]) as made]:
            return name_of(model) if source.full_name(made.func).startswith("torch.optim.") else ""
    return ""


def _may_clear_by_hand(source: Source) -> bool:
    """Whether a script assigns to `.grad`, deletes or multiplies it, or calls what may clear gradients."""
    changed = [
        each for node in source.nodes if isinstance(node, ast.Assign | ast.Delete) for each in node.targets
    ]
    changed += [n.target for n in source.nodes if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Mult)]
    by_hand = any(re.search(r"\.grad\b", ast.unparse(each)) for each in changed)
    return by_hand or _CLEARS.search(source.text) is not None


_CLEARS = re.compile(r"closure|foreach_zero|\.grad\(|[\"']grad[\"']|\.grad\b[\w.()]*\.(copy|fill|mul|zero)_\(")


@source_check
def gradients_lost(source: Source) -> Iterator[Finding]:
    """Gradients that are cleared for each micro-batch, while the optimizer steps after several."""
    for training, name, _ in _accumulations(source):
        for cleared, call in _optimizer_calls(source, "zero_grad", training.loop):
            if cleared == name and _is_unconditional(source, call, training.loop):
                yield known_fault("gradients-lost", source.line(call))


@source_check
def not_normalized(source: Source) -> Iterator[Finding]:
    """Gradient accumulation of mean losses that nothing divides."""
    for training, name, _ in _accumulations(source):
        clears = list(_optimizer_calls(source, "zero_grad", training.loop))
        if any(each == name and _is_unconditional(source, call, training.loop) for each, call in clears):
            continue
        for call in training.backwards:
            if _is_unconditional(source, call, training.loop) and _is_plain_mean(source, call, training):
                yield Finding(
                    what="the gradients of several micro-batches are added, and nothing divides them",
                    change="divide the loss by the number of micro-batches before backward, if it is a mean",
                    line=source.line(call),
                )


@source_check
def reduced_in_every_micro_batch(source: Source) -> Iterator[Finding]:
    """DistributedDataParallel under accumulation, without `no_sync`."""
    wraps = (
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.parallel.distributed.DistributedDataParallel",
    )
    if "no_sync" in source.text or "require_backward_grad_sync" in source.text:
        return
    if not any(source.full_name(each.func) in wraps for each in source.calls):
        return
    for training, _, _ in _accumulations(source):
        yield Finding(
            what="ranks reduce gradients in each micro-batch",
            change="run forward and backward of all but the last micro-batch under model.no_sync()",
            line=source.line(training.backwards[0]),
        )


@source_check
def graph_retained(source: Source) -> Iterator[Finding]:
    """`retain_graph=True` in a loop whose function calls backward once."""
    for training in source.trainings:
        (call, *others) = training.backwards
        function = source.function_of(call)
        others += [each for each in source.calls_of("backward", "grad") if source.function_of(each) is function]
        if _is_of_outer_graph(source, training.loop):
            continue
        if set(others) <= {call} and is_constant(keyword(call, "retain_graph"), True):
            yield Finding(
                what="backward keeps the graph and all saved tensors",
                change="omit retain_graph=True; .detach() what one step hands to the next",
                line=source.line(call),
            )


def _is_of_outer_graph(source: Source, loop: Loop) -> bool:
    """Whether a loop reads the result of a model's call before it."""
    read = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
    return any(
        isinstance(each.value, ast.Call)
        and name_of(each.value.func) in source.models
        and not source.is_in(each.statement, loop)
        for name in read
        for each in source.bindings(name, loop)
    )


@source_check
def not_optimized(source: Source) -> Iterator[Finding]:
    """The only optimizer has a part of a model, and the rest of it is not frozen."""
    classes = [each for each in source.nodes if isinstance(each, ast.ClassDef)]
    is_cut = any(word in ast.unparse(each) for each in classes for word in ("no_grad", "detach"))
    is_frozen = any("freeze" in called(each).lower() for each in source.calls)
    if is_cut or is_frozen or "requires_grad" in source.text or "get_peft_model" in source.text:
        return
    made = [each for each in source.calls if source.full_name(each.func).startswith("torch.optim.")]
    made = [each for each in made if "lr_scheduler" not in source.full_name(each.func)]
    if len(made) != 1 or not made[0].args or not source.trainings:
        return
    parameters = made[0].args[0]
    if not isinstance(parameters, ast.Call) or called(parameters) != "parameters":
        return
    part = name_of(parameters.func).rpartition(".")[0]
    whole = part.partition(".")[0]
    asked = {
        name_of(each.func) for each in source.calls_of("parameters", "named_parameters", "add_param_group")
    }
    others = asked - {f"{whole}.parameters", f"{part}.parameters"}
    if any(each.startswith(f"{whole}.") or each.endswith(".add_param_group") for each in others):
        return  # parameters of other parts may be in other groups and optimizers
    is_trained = any(whole in _called_in(source, training) for training in source.trainings)
    if part != whole and is_trained and _has_other_parts(source, whole, part, made[0]):
        yield Finding(
            what=f"parameters of {whole} beside {part} get gradients that no optimizer uses",
            change=f"{whole}.requires_grad_(False) and {part}.requires_grad_(True)",
            line=source.line(made[0]),
        )


def _has_other_parts(source: Source, whole: str, part: str, where: ast.AST) -> bool:
    """Whether the text shows that a model has parameters beside those of a part."""
    makers = source.made_by(whole, where)
    classes = [each for maker in makers for each in source.classes(maker)]
    if not classes:
        return bool(makers) and all(_OF_LIBRARIES.match(each) for each in makers)
    own = f"self.{part.split('.')[1]}"
    assigned = [node for each in classes for node in ast.walk(each) if isinstance(node, ast.Assign)]
    others = [each.value for each in assigned if name_of(each.targets[0]) not in ("", own)]
    made = _names_called(source, others)
    made |= _names_called(source, [each for name in made for each in source.classes(name)])
    return any(_HAS_PARAMETERS.fullmatch(each) for each in made)


def _names_called(source: Source, within: Iterable[ast.AST]) -> set[str]:
    """Full names of what is called in nodes."""
    calls = [node for each in within for node in ast.walk(each) if isinstance(node, ast.Call)]
    return {source.full_name(each.func) for each in calls}


_HAS_PARAMETERS = re.compile(
    r"torch\.nn\.(\w+\.)*(Bilinear|Conv\w+|Embedding\w*|GRU|LSTM|Linear|Multihead\w+|Parameter|Transformer\w+)"
    r"|(timm|torchvision|transformers)\..*"
)
_OF_LIBRARIES = re.compile(r"(timm|torch|torchvision|transformers)\.")


def _accumulations(source: Source) -> Iterator[tuple[Training, str, ast.Call]]:
    """Loops in which an optimizer steps after every few calls of backward, with its name and the call."""
    for training in source.trainings:
        if "accelerat" in source.text or "deepspeed" in source.text:  # they divide and reduce themselves
            continue
        for name, call in _optimizer_calls(source, "step", training.loop):
            conditions = source.conditions_of(call, training.loop)
            decides = next((each for each in conditions if isinstance(each, ast.If)), None)
            if decides is None or not _is_every_few(source, decides, training.loop):
                continue
            others = [each for other, each in _optimizer_calls(source, "step", training.loop) if other != name]
            branch = decides.body if any(source.is_in(call, each) for each in decides.body) else decides.orelse
            if any(not any(source.is_in(each, node) for node in branch) for each in others):
                continue  # optimizers in turn: not each of them steps in each round
            if not any(source.is_in(each, decides) for each in training.backwards):
                yield training, name, call
                break


def _is_every_few(source: Source, decides: ast.If, loop: Loop) -> bool:
    """Whether a condition holds after every few rounds: it has a remainder."""
    tested: list[ast.AST] = [decides.test]
    for node in ast.walk(decides.test):
        if isinstance(node, ast.Name):
            tested += [each.value for each in source.bindings_in(node.id, loop) if each.value is not None]
    return any(isinstance(each, ast.Mod) for test in tested for each in ast.walk(test))


def _is_unconditional(source: Source, node: ast.AST, loop: Loop) -> bool:
    return not source.conditions_of(node, loop)


def _is_plain_mean(source: Source, backward: ast.Call, training: Training) -> bool:
    """Whether backward is of a mean loss as it comes from a loss of torch or a model."""
    divides = re.compile(r"\.grad\b|reduction\s*=|register_hook|accumulate_grad")
    if divides.search(source.text) or any(isinstance(each, ast.BinOp) for each in ast.walk(backward)):
        return False
    (name, *more) = losses_of(backward) - {"scaler", "self.scaler"} or {""}
    bound = source.bindings_in(name, training.loop)
    changes = [
        node
        for node in ast.walk(training.loop)
        if isinstance(node, ast.AugAssign) and name_of(node.target) == name
    ]
    return not more and not changes and len(bound) == 1 and _is_mean(source, bound[0].value)


def _is_mean(source: Source, value: ast.expr | None) -> bool:
    if isinstance(value, ast.Attribute) and value.attr == "loss":
        return True
    if not isinstance(value, ast.Call):
        return False
    if source.full_name(value.func).startswith("torch.nn.functional."):
        return True
    makers = source.makers_of_called(value)
    return bool(makers) and all(re.fullmatch(r"torch\.nn\.(\w+\.)*\w+Loss", each) for each in makers)


@source_check
def softmax_twice(source: Source) -> Iterator[Finding]:
    """A softmax before cross entropy, which has its own; of several losses of a softmax one that trains."""
    seen: set[ast.AST] = set()
    for call in sorted(source.calls, key=lambda each: _is_in_evaluation(source, each)):
        makers = source.makers_of_called(call) or [source.full_name(call.func)]
        if not call.args or not {*makers} <= {"torch.nn.CrossEntropyLoss", "torch.nn.functional.cross_entropy"}:
            continue
        softmaxes = _softmaxes_of(source, call.args[0])
        if softmaxes <= seen:
            continue
        seen |= softmaxes
        fault = known_fault("softmax-twice", source.line(call))
        if _is_in_evaluation(source, call):
            what = "cross entropy takes logits and gets probabilities: this loss is that of other predictions"
            fault = replace(fault, what=what, change="omit the softmax before cross entropy")
        yield fault


def _is_in_evaluation(source: Source, call: ast.Call) -> bool:
    loop = source.repeated_in(call)
    return source.is_without_graph(call) or (loop is not None and _is_over_evaluation_data(loop))


def _softmaxes_of(source: Source, value: ast.expr | None) -> frozenset[ast.AST]:
    """The softmaxes that all values of an expression come from; none if one of them may not."""
    if isinstance(value, ast.Name):
        bound = [each.value for each in source.bindings(value.id, value)]
        return _of_all(
            frozenset() if isinstance(each, ast.Name) else _softmaxes_of(source, each) for each in bound
        )
    if not isinstance(value, ast.Call):
        return frozenset()
    if called(value) == "softmax" or source.full_name(value.func).endswith(".softmax"):
        return frozenset({value})
    makers = [each.value for each in source.bindings(name_of(value.func), value)]
    return _of_all(_last_softmaxes(source, each) for each in makers)


def _of_all(found: Iterable[frozenset[ast.AST]]) -> frozenset[ast.AST]:
    """All of several sets; nothing if one is empty."""
    sets = [*found]
    return frozenset().union(*sets) if all(sets) else frozenset()


def _last_softmaxes(source: Source, model: ast.expr | None) -> frozenset[ast.AST]:
    """The softmaxes that are the last layer of the model which an expression makes."""
    if not isinstance(model, ast.Call):
        return frozenset()
    if called(model) in ("to", "cuda") and isinstance(model.func, ast.Attribute):
        return _last_softmaxes(source, model.func.value)
    if called(model) in ("DataParallel", "DistributedDataParallel") and model.args:
        return _last_softmaxes(source, model.args[0])
    if source.full_name(model.func) == "torch.nn.Softmax":
        return frozenset({model})
    if source.full_name(model.func) == "torch.nn.Sequential" and model.args:
        return _last_softmaxes(source, model.args[-1])
    forwards = [
        each
        for found in source.classes(name_of(model.func))
        for each in found.body
        if isinstance(each, ast.FunctionDef) and each.name == "forward"
    ]
    if len(forwards) != 1:
        return frozenset()
    returns = [node for node in ast.walk(forwards[0]) if isinstance(node, ast.Return)]
    return _of_all(_softmaxes_of(source, each.value) for each in returns)


# Time, and how models are wrapped


@source_check
def waits_for_values(source: Source) -> Iterator[Finding]:
    """A loss that is read in each step of a script for CUDA."""
    if not source.uses_cuda:
        return
    for training in source.trainings:
        names = source.names_with_graphs(training)
        reads = [
            node
            for node in source.in_loop(training.loop)
            if isinstance(node, ast.Call)
            and _reads_value(node, names)
            and _is_unconditional(source, node, training.loop)
        ]
        if reads:
            yield Finding(
                what=f"the host waits for the GPU in each step to read a value ({ast.unparse(reads[0])})",
                change="read it once in many steps, or accumulate it on the GPU with .detach()",
                line=source.line(reads[0]),
            )


def _reads_value(call: ast.Call, names: frozenset[str]) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("item", "tolist", "numpy", "cpu"):
        value = call.func.value
        while isinstance(value, ast.Call) and called(value) in ("detach", "cpu", "float"):
            value = value.func.value if isinstance(value.func, ast.Attribute) else value.func
        if isinstance(value, ast.Attribute) and value.attr == "data":
            value = value.value
        return has_graph_of(value, names)
    if name_of(call.func) == "float" and call.args:
        return has_graph_of(call.args[0], names)
    return name_of(call.func) == "print" and any(
        has_graph_of(node, names)
        for each in call.args
        for node in ([each.value for each in ast.walk(each) if isinstance(each, ast.FormattedValue)] or [each])
    )


@source_check
def waits_for_data(source: Source) -> Iterator[Finding]:
    """A DataLoader without workers of a dataset that reads files, in a script for CUDA."""
    if not source.uses_cuda:
        return
    for call in source.calls:
        if source.full_name(call.func) != "torch.utils.data.DataLoader" or not call.args or len(call.args) > 5:
            continue
        given = {each.arg for each in call.keywords}
        if not given & {"num_workers", None} and _reads_files(source, call.args[0]):
            yield Finding(
                what="the DataLoader has no workers, and its dataset reads files: the GPU waits for each batch",
                change="num_workers=4, or as many as there are cores for a GPU, and pin_memory=True",
                line=source.line(call),
            )


def _reads_files(source: Source, dataset: ast.expr) -> bool:
    """Whether an expression is a dataset that reads a file for each sample."""
    made = (
        [dataset]
        if isinstance(dataset, ast.Call)
        else [each.value for each in source.bindings(name_of(dataset), dataset)]
    )
    for value in made:
        if not isinstance(value, ast.Call):
            return False
        if source.full_name(value.func) in _FILE_DATASETS:
            continue
        reads = [
            call
            for node in source.classes(name_of(value.func))
            for method in node.body
            if isinstance(method, ast.FunctionDef) and method.name == "__getitem__"
            for call in ast.walk(method)
            if isinstance(call, ast.Call) and source.full_name(call.func) in _READS
        ]
        if not reads:
            return False
    return bool(made)


_FILE_DATASETS = ("torchvision.datasets.ImageFolder", "torchvision.datasets.ImageNet")
_READS = {
    *("PIL.Image.open", "cv2.imread", "imageio.imread", "librosa.load", "numpy.load", "open", "torch.load"),
    *("torchaudio.load", "torchvision.io.read_image"),
}


@source_check
def pageable_memory(source: Source) -> Iterator[Finding]:
    """A DataLoader without pinned memory, whose batches a training loop moves to the GPU."""
    if not source.uses_cuda or any(each in source.text for each in ("accelerat", "pin_memory")):
        return
    moved = {name for each in source.trainings for name in _names_moved_from(each.loop)}
    for call in source.calls:
        parent, has_more = source.parents[call], any(each.arg is None for each in call.keywords)
        names = {name_of(each) for each in parent.targets} if isinstance(parent, ast.Assign) else set()
        is_loader = source.full_name(call.func) == "torch.utils.data.DataLoader"
        if is_loader and not has_more and names & moved:
            yield known_fault("pageable-memory", source.line(call))


def _names_moved_from(loop: Loop) -> set[str]:
    """Names over which a loop runs, if it moves what they yield to a device."""
    if isinstance(loop, ast.While):
        return set()
    batch = _names_within(loop.target)
    inside = [node for node in ast.walk(loop) if isinstance(node, ast.comprehension)]
    batch |= {
        name for each in inside if batch & _names_within(each.iter) for name in _names_within(each.target)
    }
    moved = {_base_name(each) for node in ast.walk(loop) if (each := _moved(node)) is not None}
    return _names_within(loop.iter) if moved & batch else set()


def _names_within(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


@source_check
def made_on_the_host(source: Source) -> Iterator[Finding]:
    """A tensor of known values that each forward or step makes on the host and copies to the GPU."""
    elsewhere = ("set_default_device", "set_default_tensor_type")
    if not source.uses_cuda or any(each in source.text for each in elsewhere):
        return
    loops = {each.loop for each in source.trainings}
    for call in source.calls:
        function, loop = source.function_of(call), source.loop_of(call)
        is_in_forward = getattr(function, "name", "") == "forward" and loop is None
        outer = loop if loop in loops else function if is_in_forward else None
        if outer is None or _moved(call) is None or source.conditions_of(call, outer):
            continue
        made = _maker_of(source, call)
        is_on_device = any("device" in ast.unparse(each).lower() for each in _contexts_of(source, call))
        if made is not None and keyword(made, "device") is None and not is_on_device:
            where = call.args[0] if call.args else keyword(call, "device")
            device = '"cuda"' if where is None else ast.unparse(where)
            yield known_fault("made-on-the-host", source.line(call), name=device)


def _moved(node: ast.AST) -> ast.expr | None:
    """What a call moves to a device that is not called the CPU; None for another node."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    where = node.args[0] if node.args else keyword(node, "device")
    name = "" if where is None else ast.unparse(where).lower()
    is_move = node.func.attr == "to" and _GPU.search(name) and "cpu" not in name
    return node.func.value if is_move or node.func.attr == "cuda" else None


_GPU = re.compile(r"cuda|device|gpu")


def _maker_of(source: Source, call: ast.Call) -> ast.Call | None:
    """The call that makes the tensor of known values which a chain of calls begins with."""
    made: ast.expr = call
    while isinstance(made, ast.Call):
        name = source.full_name(made.func)
        if name in _MAKES_KNOWN_VALUES:
            return made
        if name in ("torch.tril", "torch.triu") and made.args:
            made = made.args[0]
        else:
            made = made.func.value if isinstance(made.func, ast.Attribute) else made.func
    return None


_MAKES_KNOWN_VALUES = {f"torch.{each}" for each in ("arange", "eye", "full", "linspace", "ones", "zeros")}
"""Functions whose result is the same on any device; random numbers are not."""


def _contexts_of(source: Source, node: ast.AST) -> list[ast.expr]:
    around = [each for each in source.ancestors(node) if isinstance(each, ast.With)]
    return [item.context_expr for each in around for item in each.items]


@source_check
def cache_flushed(source: Source) -> Iterator[Finding]:
    """`empty_cache` in each step."""
    for training in source.trainings:
        for node in source.in_loop(training.loop):
            if not isinstance(node, ast.Call) or source.full_name(node.func) != "torch.cuda.empty_cache":
                continue
            if _is_unconditional(source, node, training.loop):
                yield known_fault("cache-flushed", source.line(node))


@source_check
def anomaly_detection(source: Source) -> Iterator[Finding]:
    """Anomaly detection, where nothing decides about it."""
    for call in source.calls_of("set_detect_anomaly", "detect_anomaly"):
        asked = call.args[0] if call.args else keyword(call, "mode")
        is_on = is_constant(asked, True) or (called(call) == "detect_anomaly" and not call.args + call.keywords)
        decided = any(isinstance(each, ast.If | ast.IfExp) for each in source.ancestors(call))
        if is_on and (not decided or _is_main(source, call)):
            yield known_fault("anomaly-detection", source.line(call))


def _is_main(source: Source, node: ast.AST) -> bool:
    """Whether a node is under `if __name__ == "__main__"` alone."""
    tests = [each for each in source.ancestors(node) if isinstance(each, ast.If | ast.IfExp)]
    return all("__name__" in ast.unparse(each.test) for each in tests)


@source_check
def benchmark_with_changing_shapes(source: Source) -> Iterator[Finding]:
    """`cudnn.benchmark` beside batches that are padded to their longest sample, and convolutions."""
    convolves = any("Conv" in called(each) for each in source.calls)
    if not convolves or not any(True for _ in source.calls_of("pad_sequence")):
        return
    for node in source.nodes:
        if not isinstance(node, ast.Assign) or not is_constant(node.value, True):
            continue
        if source.full_name(node.targets[0]) == "torch.backends.cudnn.benchmark":
            yield Finding(
                what="cudnn.benchmark tries algorithms again for each length that pad_sequence makes",
                change="pad to a few lengths, or torch.backends.cudnn.benchmark = False",
                line=source.line(node),
            )


@source_check
def attention_not_fused(source: Source) -> Iterator[Finding]:
    """`attn_implementation="eager"` in a script that trains and does not look at attention weights."""
    if "output_attentions" in source.text or not (source.trainings or "Trainer" in source.text):
        return
    for call in source.calls_of("from_pretrained", "from_config"):
        asked = keyword(call, "attn_implementation")
        if isinstance(asked, ast.Constant) and asked.value == "eager":
            yield Finding(
                what="attention saves its weights of all pairs of tokens",
                change='attn_implementation="sdpa", the default where the model has it',
                line=source.line(call),
            )


@source_check
def data_parallel(source: Source) -> Iterator[Finding]:
    """`nn.DataParallel` of a model that a training loop calls."""
    loops = {training.loop for training in source.trainings}
    trained = {name_of(call.func) for call in source.calls if source.loop_of(call) in loops}
    for call in source.calls:
        parent = source.parents[call]
        while isinstance(parent, ast.Call | ast.Attribute):  # DataParallel(model).cuda()
            parent = source.parents[parent]
        bound = {name_of(each).partition(".")[0] for each in getattr(parent, "targets", ())}
        is_wrapper = source.full_name(call.func) in ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")
        if is_wrapper and bound & {name.partition(".")[0] for name in trained}:
            yield known_fault("data-parallel", source.line(call))


@source_check
def loaded_onto_the_device(source: Source) -> Iterator[Finding]:
    """A checkpoint that `torch.load` puts onto the GPU of which it was saved, beside the model."""
    if not source.uses_cuda or not source.trainings:
        return
    loads = [each for each in source.calls_of("load_state_dict") if isinstance(each.func, ast.Attribute)]
    taken = {
        _base_name(each.args[0])
        for each in loads
        if each.args and isinstance(each.func, ast.Attribute) and name_of(each.func.value) in source.models
    }
    deleted = {name_of(each) for node in source.nodes if isinstance(node, ast.Delete) for each in node.targets}
    for call in source.calls:
        if source.full_name(call.func) != "torch.load" or len(call.args) > 1:
            continue
        parent, given = source.parents[call], {each.arg for each in call.keywords}
        names = {name_of(each) for each in parent.targets} if isinstance(parent, ast.Assign) else set()
        if names & taken - deleted - {""} and not given & {"map_location", None} and _lasts(source, call):
            yield Finding(
                what="torch.load puts the saved tensors onto the GPU of which they are, beside the model's own",
                change='torch.load(..., map_location="cpu"): load_state_dict copies from there',
                line=source.line(call),
            )


def _lasts(source: Source, node: ast.AST) -> bool:
    """Whether the variables of a node's function live while the script trains."""
    function = source.function_of(node)
    is_main = isinstance(function, ast.Module) or getattr(function, "name", "").startswith("main")
    return is_main or any(source.is_in(each.loop, function) for each in source.trainings)
