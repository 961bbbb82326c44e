"""A training script's syntax tree, with what checks ask of it; nothing is imported or run."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

Loop = ast.For | ast.AsyncFor | ast.While
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Function = ast.FunctionDef | ast.AsyncFunctionDef

_KEEPS_GRAPH = {
    *("abs", "clone", "contiguous", "cpu", "cuda", "double", "exp", "flatten", "float", "half", "log", "max"),
    *("mean", "min", "pow", "reshape", "sqrt", "squeeze", "sum", "to", "type", "unsqueeze", "view"),
}
"""Methods of a tensor whose result has its graph."""
_RESULTS = frozenset({"hidden_states", "last_hidden_state", "logits", "loss"})
"""Attributes of a model's output that have its graph."""
_ENDS_GRAPH = frozenset({"detach", "detach_", "item", "numpy", "tolist"})
_NUMBERS = frozenset({"float", "int", "len", "str"})
_OF_MODELS = frozenset({"eval", "named_parameters", "parameters", "state_dict", "train", "zero_grad"})
"""Methods by which something that is called is known as a model."""
_WITHOUT_GRAPH = ("no_grad", "inference_mode", "set_grad_enabled")


class Binding(NamedTuple):
    """An assignment to a name."""

    statement: ast.AST
    value: ast.expr | None
    """None for the variable of a loop."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training:
    """An innermost loop that calls backward."""

    loop: Loop
    backwards: tuple[ast.Call, ...]
    losses: frozenset[str]
    """Names of which backward is called."""


@dataclass(frozen=True, eq=False)
class Source:
    """The source text of a script."""

    name: str
    """As findings show it."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; SyntaxError, ValueError, RecursionError or MemoryError if the text has none."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes, outer ones first."""
        return list(ast.walk(self.tree))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The parent of each node but the first."""
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    def line(self, node: ast.AST) -> str:
        """The line of a node, as "train.py:12"."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}"

    # Names

    @cached_property
    def imported(self) -> dict[str, str]:
        """What imported names stand for: "F" for "torch.nn.functional"."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for each in node.names:
                    found[each.asname or each.name.partition(".")[0]] = (
                        each.name if each.asname else each.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        return found

    @cached_property
    def trains(self) -> bool:
        """Whether torch, or transformers, which trains with it, is imported."""
        return any(each.partition(".")[0] in ("torch", "transformers") for each in self.imported.values())

    def full_name(self, expression: ast.AST) -> str:
        """A dotted name with what its first part stands for: "torch.nn.functional.softmax"; "" for another."""
        first, dot, rest = name_of(expression).partition(".")
        return f"{self.imported.get(first, first)}{dot}{rest}"

    def calls_of(self, *names: str) -> Iterator[ast.Call]:
        """Calls of functions or methods by the last part of their names."""
        yield from (call for call in self.calls if called(call) in names)

    @cached_property
    def uses_cuda(self) -> bool:
        """Whether the script names CUDA, other than to ask about it."""
        return any(
            (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda"))
            or (isinstance(node, ast.Call) and called(node) == "cuda")
            or (isinstance(node, ast.Name | ast.Attribute) and name_of(node) == "accelerator.device")
            for node in self.nodes
        )

    # Where a node is

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function_of(self, node: ast.AST) -> ast.AST:
        """The function that a node is in; the tree for one outside of functions."""
        return next((each for each in self.ancestors(node) if isinstance(each, Function)), self.tree)

    def loop_of(self, node: ast.AST) -> Loop | None:
        """The innermost loop of its function in whose body a node is."""
        for each in self.ancestors(node):
            if isinstance(each, Function | ast.Lambda):
                return None
            if isinstance(each, Loop) and node not in (*each.orelse, getattr(each, "iter", None)):
                return each
            node = each
        return None

    def repeated_in(self, node: ast.AST) -> Loop | Comprehension | None:
        """The innermost loop or comprehension of its function that runs a node again and again."""
        for each in self.ancestors(node):
            if isinstance(each, Comprehension) and not self.is_in(node, each.generators[0].iter):
                return each
            if isinstance(each, Loop | Function | ast.Lambda):
                break
        return self.loop_of(node)

    def rounds_of(self, node: ast.AST, name: str, seen: frozenset[ast.AST] = frozenset()) -> set[Loop]:
        """Loops that run a node again for the same value of a name, also by calls of the node's function."""
        found: set[Loop] = {node} if isinstance(node, Loop) else set()
        for each in self.ancestors(node):
            if isinstance(each, Function):
                break
            if (isinstance(each, ast.If) and _may_be_last(each)) or (
                isinstance(each, Loop) and self.bindings_in(name, each)
            ):
                return found
            if isinstance(each, Loop):
                found.add(each)
        function = self.function_of(node)
        if not isinstance(function, Function) or function in seen or (function, name) in self._bindings:
            return found
        for call in self.calls_of(function.name):
            if self.functions(function.name) == [function] and _hands_on(call, function, name):
                found |= self.rounds_of(call, name, seen | {function})
        return found

    def is_in(self, node: ast.AST, outer: ast.AST) -> bool:
        """Whether a node is inside another."""
        return node is outer or outer in self.ancestors(node)

    def conditions_of(self, node: ast.AST, outer: ast.AST) -> list[ast.AST]:
        """What decides between `outer` and a node whether it runs."""
        found: list[ast.AST] = []
        for each in self.ancestors(node):
            if each is outer:
                break
            if isinstance(each, ast.If | ast.IfExp | ast.ExceptHandler | ast.Match | Loop | Function):
                found.append(each)
        return found

    def is_without_graph(self, node: ast.AST) -> bool:
        """Whether a node may run under `torch.no_grad()` or its like."""
        return any(
            each in self._without_graph
            or (isinstance(each, Function) and each.name in self._names_without_graph)
            for each in self.ancestors(node)
        )

    @cached_property
    def _without_graph(self) -> set[ast.AST]:
        """Blocks and functions without graphs."""
        found: set[ast.AST] = set()
        for node in self.nodes:
            marks: list[ast.expr] = []
            if isinstance(node, ast.With | ast.AsyncWith):
                marks = [item.context_expr for item in node.items]
            elif isinstance(node, Function | ast.ClassDef):
                marks = node.decorator_list
            if any(map(self._is_without_graphs, marks)):
                found.add(node)
        return found

    def _is_without_graphs(self, mark: ast.expr) -> bool:
        """Whether a context or decorator names one of torch without graphs, or what the script makes of one."""
        named = [node for node in ast.walk(mark) if isinstance(node, ast.Name | ast.Attribute)]
        values = [each.value for node in named for each in self.bindings(name_of(node), node) if each.value]
        made = [each for node in named for each in self._definitions.get(last_name(node), ())]
        return any(word in ast.unparse(each) for each in (mark, *values, *made) for word in _WITHOUT_GRAPH)

    @cached_property
    def _definitions(self) -> dict[str, list[ast.AST]]:
        """Functions and classes by their names."""
        found: dict[str, list[ast.AST]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, Function | ast.ClassDef):
                found[node.name].append(node)
        return found

    def classes(self, name: str) -> list[ast.ClassDef]:
        """Classes of the script that have a name."""
        return [each for each in self._definitions.get(name, ()) if isinstance(each, ast.ClassDef)]

    def functions(self, name: str) -> list[Function]:
        """Functions and methods of the script that have a name."""
        return [each for each in self._definitions.get(name, ()) if isinstance(each, Function)]

    @cached_property
    def _names_without_graph(self) -> set[str]:
        """Last parts of the names that are used without graphs, and of those that functions so named use."""
        found: set[str] = set()
        left = list(self._without_graph)
        while left:
            for node in ast.walk(left.pop()):
                name = last_name(node) if isinstance(node, ast.Name | ast.Attribute) else ""
                if name and name not in found:
                    found.add(name)
                    left += self.functions(name)
        return found

    # Bindings

    @cached_property
    def _bindings(self) -> dict[tuple[ast.AST, str], list[Binding]]:
        found = defaultdict(list)
        for node in self.nodes:
            for target, value in _assigned(node):
                scope = self.tree if "." in name_of(target) else self.function_of(node)
                found[scope, name_of(target)].append(Binding(node, value))
        return found

    def bindings(self, name: str, where: ast.AST) -> list[Binding]:
        """What a name is bound to as a node reads it: in its function, or else in the module."""
        function = self.function_of(where)
        return self._bindings.get((function, name)) or self._bindings.get((self.tree, name), [])

    def bindings_in(self, name: str, loop: Loop) -> list[Binding]:
        """What a name is bound to inside a loop."""
        return [each for each in self.bindings(name, loop) if self.is_in(each.statement, loop)]

    def made_by(self, name: str, where: ast.AST) -> list[str]:
        """Full names of what is called to make the values of a name; "" for a value of another kind."""
        values = [each.value for each in self.bindings(name, where)]
        return [self._maker(each) for each in values]

    def makers_of_called(self, call: ast.Call) -> list[str]:
        """Full names of what is called to make what a call calls: `Loss()(out, y)`, or a name for `Loss()`."""
        if isinstance(call.func, ast.Call):
            return [self._maker(call.func)]
        return self.made_by(name_of(call.func), call)

    def _maker(self, value: ast.expr | None) -> str:
        """The full name of what is called to make a value, which may be moved then: `Loss().to(device)`."""
        while isinstance(value, ast.Call):
            if called(value) not in ("cuda", "to") or not isinstance(value.func, ast.Attribute):
                return self.full_name(value.func)
            value = value.func.value
        return ""

    # Training

    @cached_property
    def models(self) -> set[str]:
        """Names of what is called, and has parameters or modes."""
        called_names = {name_of(call.func) for call in self.calls}
        of_models = {
            name_of(call.func.value)
            for call in self.calls
            if isinstance(call.func, ast.Attribute) and call.func.attr in _OF_MODELS
        }
        return (called_names & of_models) - {"", "self"}

    @cached_property
    def trainings(self) -> list[Training]:
        """The innermost loops that call backward."""
        found: dict[Loop, list[ast.Call]] = defaultdict(list)
        for call in self.calls_of("backward"):
            loop = self.loop_of(call)
            if loop is not None and isinstance(call.func, ast.Attribute):
                found[loop].append(call)
        return [
            Training(
                loop=loop, backwards=tuple(calls), losses=frozenset(n for c in calls for n in losses_of(c))
            )
            for loop, calls in found.items()
        ]

    def in_loop(self, loop: Loop) -> Iterator[ast.AST]:
        """Nodes whose innermost loop this is."""
        yield from (node for node in ast.walk(loop) if self.loop_of(node) is loop)

    def names_with_graphs(self, training: Training) -> frozenset[str]:
        """Losses, and results of models in a training loop, of those that nothing there detaches."""
        names = set(training.losses)
        for node in self.in_loop(training.loop):
            for target, value in _assigned(node):
                is_result = isinstance(value, ast.Call) and name_of(value.func) in self.models
                if is_result and not self.is_without_graph(node):
                    names.add(name_of(target))
        detached = {
            name_of(node.func.value)
            for node in ast.walk(training.loop)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "detach_"
        }
        return frozenset(
            name
            for name in names - detached - {""}
            if not any(is_a_number(each.value) for each in self.bindings_in(name, training.loop))
        )


def _may_be_last(condition: ast.If) -> bool:
    """Whether what depends on a condition may run in the last round of a loop alone."""
    ends = any(isinstance(each, ast.Break | ast.Return) for each in ast.walk(condition))
    tests = [*ast.walk(condition.test)]
    return ends or (
        any(isinstance(each, ast.Eq) for each in tests) and not any(isinstance(each, ast.Mod) for each in tests)
    )


def _hands_on(call: ast.Call, function: Function, name: str) -> bool:
    """Whether a name stands for the same value in a call's place and in the function that it calls."""
    if name.startswith("self."):
        return name_of(call.func) == f"self.{function.name}"
    parameters = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    given = {name_of(each) for each in (*call.args, *(each.value for each in call.keywords))}
    return name.partition(".")[0] not in parameters or name in given


def name_of(expression: ast.AST | None) -> str:
    """A dotted name, such as "self.model"; "" for another expression."""
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute) and (base := name_of(expression.value)):
        return f"{base}.{expression.attr}"
    return ""


def last_name(expression: ast.AST) -> str:
    """The last part of a name, also of what is not a name before it."""
    return expression.attr if isinstance(expression, ast.Attribute) else name_of(expression)


def called(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    return last_name(call.func)


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument; None without it."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def is_constant(expression: ast.AST | None, value: object) -> bool:
    """Whether an expression is True, False or another constant."""
    return isinstance(expression, ast.Constant) and expression.value is value


def has_graph_of(expression: ast.AST | None, names: frozenset[str]) -> bool:
    """Whether the value of an expression has the graph of a name."""
    match expression:
        case ast.Name():
            return expression.id in names
        case ast.Attribute():
            is_result = expression.attr in _RESULTS and has_graph_of(expression.value, names)
            return name_of(expression) in names or is_result
        case ast.BinOp():
            return has_graph_of(expression.left, names) or has_graph_of(expression.right, names)
        case ast.UnaryOp():
            return has_graph_of(expression.operand, names)
        case ast.Subscript():
            return has_graph_of(expression.value, names)
        case ast.Tuple() | ast.List():
            return any(has_graph_of(each, names) for each in expression.elts)
        case ast.Dict():
            return any(has_graph_of(each, names) for each in expression.values)
        case ast.Call(func=ast.Attribute()):
            assert isinstance(expression.func, ast.Attribute)
            return expression.func.attr in _KEEPS_GRAPH and has_graph_of(expression.func.value, names)
    return False


def is_a_number(expression: ast.AST | None) -> bool:
    """Whether an expression makes a number, or a tensor without a graph, of something."""
    return expression is not None and any(
        (isinstance(node, ast.Attribute) and node.attr in (*_ENDS_GRAPH, "data"))
        or (isinstance(node, ast.Call) and name_of(node.func) in _NUMBERS)
        for node in ast.walk(expression)
    )


def losses_of(backward: ast.Call) -> set[str]:
    """The names of which a call of backward computes gradients."""
    own = _names_in(backward.func.value) if isinstance(backward.func, ast.Attribute) else set()
    return own | {name for each in backward.args[:1] for name in _names_in(each)}


def _names_in(expression: ast.AST) -> set[str]:
    match expression:
        case ast.Name() | ast.Attribute():
            return {name_of(expression)} - {""}
        case ast.BinOp(op=ast.Div()):
            return _names_in(expression.left)  # a loss is divided by numbers
        case ast.BinOp():
            return _names_in(expression.left) | _names_in(expression.right)
        case ast.Call():
            inner = expression.func.value if isinstance(expression.func, ast.Attribute) else None
            found = set() if inner is None else _names_in(inner)
            return found | {name for each in expression.args for name in _names_in(each)}
    return set()


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """What a statement assigns to which names; additions to a name are not among it."""
    match node:
        case ast.Assign():
            pairs: list[tuple[ast.expr, ast.expr | None]] = [(target, node.value) for target in node.targets]
        case ast.AnnAssign() | ast.NamedExpr():
            pairs = [(node.target, node.value)]
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            pairs = [(node.target, None)]
        case ast.withitem() if node.optional_vars is not None:
            pairs = [(node.optional_vars, node.context_expr)]
        case _:
            pairs = []
    while pairs:
        target, value = pairs.pop()
        if isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            alike = len(values) == len(target.elts)
            pairs += zip(target.elts, values if alike else [value] * len(target.elts), strict=True)
        elif isinstance(target, ast.Starred):
            pairs.append((target.value, value))
        elif name_of(target):
            yield target, value
