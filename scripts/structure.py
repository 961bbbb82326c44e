"""Figures about the structure of `src/brimful`, as JSON: `python scripts/structure.py [ROOT] [--list]`.

Lines, packages, import arrows between packages and their cycles, the largest module, class, function and
parameter list, uses of `Any`, and modules that use private names of torch. `--list` also names what is over the
limits.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MOST_LINES, MOST_MEMBERS, MOST_FUNCTION_LINES, MOST_PARAMETERS = 450, 20, 60, 8


def modules_of(root: Path) -> dict[str, ast.Module]:
    """Every module of the package by its dotted name below `brimful`."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(root.rglob("*.py"))
    }


def members_of(node: ast.ClassDef) -> int:
    """Attributes and methods: those of the class body, and those that its methods assign to `self`."""
    names: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            names.add(each.name)
            for inner in ast.walk(each):
                is_set = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
                if is_set and isinstance(inner.value, ast.Name) and inner.value.id == "self":
                    names.add(inner.attr)
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            names.add(each.target.id)
    return len(names - {"__init__", "__post_init__", "__slots__"})


def own_lines(node: ast.FunctionDef) -> int:
    """Lines of a function without its docstring and signature."""
    body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1


def parameters_of(node: ast.FunctionDef) -> int:
    """Parameters but `self` and `cls`."""
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function, its class before its name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    yield f"{node.name}.{each.name}", each


def arrows_of(trees: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Imports between top-level packages and modules; those for type checkers alone count too."""
    found = set()
    for name, tree in trees.items():
        if name == "__init__":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("brimful."):
                found.add((name.split(".")[0], node.module.split(".")[1]))
    return {(start, end) for start, end in found if start != end}


def cycles_of(arrows: set[tuple[str, str]]) -> list[list[str]]:
    """Groups of packages that import each other."""
    follows = defaultdict(set)
    for start, end in arrows:
        follows[start].add(end)

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for each in follows[todo.pop()] - seen:
                seen.add(each)
                todo.append(each)
        return seen

    reach = {name: reached(name) for name in list(follows)}
    groups = {tuple(sorted(b for b in reach if b in reach[a] and a in reach[b])) for a in reach}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def figures(root: Path) -> dict[str, object]:
    """The figures of a package."""
    trees = modules_of(root)
    texts = {name: root.joinpath(*name.split(".")).with_suffix(".py").read_text() for name in trees}
    lines = {name: text.count("\n") for name, text in texts.items()}
    classes = {
        f"{name}.{node.name}": members_of(node)
        for name, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    functions = {
        f"{name}.{function}": (own_lines(node), parameters_of(node))
        for name, tree in trees.items()
        for function, node in functions_of(tree)
    }
    arrows = arrows_of(trees)

    def largest(sizes: dict[str, int]) -> list[object]:
        return list(max(sizes.items(), key=lambda each: each[1]))

    private = re.compile(r"\btorch(?:\.\w+)*\._\w+|from torch[\w.]*\._|import _\w+")
    return {
        "lines": sum(lines.values()),
        "modules": len(lines),
        "packages": len({name.split(".")[0] for name in trees if "." in name}),
        "top_level_modules": len([name for name in trees if "." not in name]),
        "import_arrows": len(arrows),
        "import_cycles": cycles_of(arrows),
        "largest_module": largest(lines),
        "modules_over_450_lines": sum(size > MOST_LINES for size in lines.values()),
        "largest_class": largest(classes),
        "classes_over_20_members": sum(size > MOST_MEMBERS for size in classes.values()),
        "longest_function": largest({name: size for name, (size, _) in functions.items()}),
        "functions_over_60_lines": sum(size > MOST_FUNCTION_LINES for size, _ in functions.values()),
        "most_parameters": largest({name: count for name, (_, count) in functions.items()}),
        "functions_over_8_parameters": sum(count > MOST_PARAMETERS for _, count in functions.values()),
        "uses_of_any": sum(len(re.findall(r"\bAny\b", text)) for text in texts.values()),
        "modules_with_private_torch": sum(bool(private.search(text)) for text in texts.values()),
    } | (
        {
            "over": {
                "modules": {name: size for name, size in lines.items() if size > MOST_LINES},
                "classes": {name: size for name, size in classes.items() if size > MOST_MEMBERS},
                "functions": {n: s for n, (s, _) in functions.items() if s > MOST_FUNCTION_LINES},
                "parameters": {n: c for n, (_, c) in functions.items() if c > MOST_PARAMETERS},
            }
        }
        if "--list" in sys.argv
        else {}
    )


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    package = Path(given[0]) if given else Path(__file__).resolve().parents[1] / "src" / "brimful"
    print(json.dumps(figures(package), indent=2))
