"""Which tests protect which module: the table of tests/README.md, from what the tests import.

python scripts/test_map.py            # writes it
python scripts/test_map.py --check    # exit status 1 if the page has another, or a module has no test
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES, TESTS = ROOT / "src" / "brimful", ROOT / "tests"
PAGE = TESTS / "README.md"
BLOCK = re.compile(r"(<!-- scripts/test_map\.py -->\n).*?(<!-- end -->)", re.DOTALL)
MOST_TESTS = 4
"""Files listed for a module; the nearest come first."""
WITHOUT_IMPORT = {
    "__main__": "cli/test_cli.py",
    "api.exports": "unit/test_exports.py",
    "report.text": "unit/planner/test_offloading.py",
}
"""By module that no import leads to, a test that launches it, or calls what imports it by name."""


def main() -> int:
    """Write or check; the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    table = "\n".join(_table())
    fresh = BLOCK.sub(lambda found: f"{found.group(1)}{table}\n{found.group(2)}", text)
    if "--check" not in sys.argv:
        PAGE.write_text(fresh, encoding="utf-8")
    problems = [f"{module}: no test imports it, or a module that imports it" for module in _untested()]
    problems += [f"{test}: imports tests.helpers, which is helpers" for test in _with_another_root()]
    if "--check" in sys.argv and fresh != text:
        problems.append("tests/README.md is out of date: run python scripts/test_map.py")
    print("\n".join(problems), end="\n" * bool(problems))
    return int(bool(problems))


def _table() -> Iterator[str]:
    yield from ("", "| module | tests |", "|---|---|")
    for module in MODULES:
        direct = _nearest(module)
        names = [f"`{test}`" for test in direct[:MOST_TESTS]]
        more = len(direct) - MOST_TESTS
        names += [f"and {more} more"] if more > 0 else []
        if not names and (way := _way(module)):
            names = [f"through `{way}`: `{_nearest(way)[0]}`"]
        yield f"| `{module}` | {', '.join(names)} |"
    yield ""


def _nearest(module: str) -> list[str]:
    return sorted(DIRECT[module], key=lambda test: (_distance(module, test), test))


def _distance(module: str, test: str) -> tuple[bool, int]:
    """How far a test file is from where one would look for it: its name, then its folder."""
    parts = set(test.split("/")[:-1])
    near = sum(part in parts for part in module.split(".")) + ("unit" in parts)
    return _named(test) != _named(module.replace(".", "/")), -near


def _named(path: str) -> str:
    """What a file is named after."""
    return path.rpartition("/")[2].removesuffix(".py").removeprefix("test_").rstrip("s")


def _is_mirror(module: str, test: str) -> bool:
    folders = test.split("/")[:-1]
    is_near = any(package in folders for package in module.split(".")[:-1])
    return is_near and _named(test) == _named(module.replace(".", "/"))


def _way(module: str) -> str:
    """The nearest module with tests of its own that imports this one; empty if there is none."""
    seen, border = {module}, [module]
    while border:
        border = sorted({each for inner in border for each in IMPORTERS[inner]} - seen)
        seen.update(border)
        for each in border:
            if DIRECT[each]:
                return each
    return ""


def _untested() -> list[str]:
    return [module for module in MODULES if not DIRECT[module] and not _way(module)]


def _with_another_root() -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for path in sorted(TESTS.rglob("*.py"))
        if re.search(r"^\s*(?:from|import) tests\.helpers\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def _module_of(path: Path) -> str:
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _imports(path: Path) -> dict[str, set[tuple[str, str]]]:
    """By name in a file, what it may be: a module's full name and a name in it, empty for the module itself.

    Programs in texts count, which tests run in processes of their own.
    """
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    source = path.read_text(encoding="utf-8")
    trees = [ast.parse(source)]
    is_test = TESTS in path.parents
    for node in ast.walk(trees[0]) if is_test else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "brimful" in node.value:
            programs = re.findall(
                r"^ *((?:from|import) brimful[\w. ]*(?: import [\w, ]+)?)$", node.value, re.MULTILINE
            )
            trees += [ast.parse(program.strip()) for program in programs]
            named = re.fullmatch(r"brimful\.([\w.]+)\.(\w+)", node.value)  # what a test replaces
            if named:
                found[node.value].add((f"brimful.{named[1]}", named[2]))
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name].add((alias.name, ""))
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name].add((node.module, alias.name))
    tops = {name for name, targets in found.items() if ("brimful", "") in targets}
    for node in ast.walk(trees[0]):  # bf.plan
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in tops:
            found[f"{node.value.id}.{node.attr}"].add(("brimful", node.attr))
    return found


@cache
def _homes() -> dict[str, str]:
    """The package of each public name."""
    imports = ast.parse((SOURCES / "__init__.pyi").read_text(encoding="utf-8")).body
    return {
        alias.name: node.module.removeprefix("brimful.")
        for node in imports
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _defining(module: str, name: str) -> str | None:
    """The module of brimful in which a name that is imported is defined; None if it is not brimful's."""
    if module == "brimful" and name in _homes():
        return _defining(f"brimful.{_homes()[name]}", name)
    own = f"{module}.{name}" if name else module
    for full in (own, module):
        inside = full.removeprefix("brimful").lstrip(".")
        if full.split(".")[0] != "brimful" or inside not in PATHS:
            continue
        path = PATHS[inside]
        if full == module and name and path.name == "__init__.py":
            for target in _imports(path).get(name, ()):
                return _defining(*target)
        return inside
    return None


def _used(path: Path) -> set[str]:
    """Modules of brimful whose names a file imports."""
    pairs = {pair for targets in _imports(path).values() for pair in targets}
    return {module for pair in pairs if (module := _defining(*pair)) is not None}


PATHS = {_module_of(path): path for path in sorted(SOURCES.rglob("*.py"))}
MODULES = [module for module, path in PATHS.items() if path.name != "__init__.py"]
DIRECT: dict[str, set[str]] = defaultdict(set)
"""By module, the test files that import a name of it, or have its name and lie in a folder of its package's."""
for _path in sorted(TESTS.rglob("test_*.py")):
    _test = str(_path.relative_to(TESTS))
    for _module in _used(_path) | {each for each in MODULES if _is_mirror(each, _test)}:
        DIRECT[_module].add(_test)
for _module, _test in WITHOUT_IMPORT.items():
    DIRECT[_module].add(_test)
IMPORTERS: dict[str, set[str]] = defaultdict(set)
for _importer, _path in PATHS.items():
    for _module in _used(_path) - {_importer}:
        IMPORTERS[_module].add(_importer)

if __name__ == "__main__":
    sys.exit(main())
