"""The rules of the house, read from source alone: floors, sizes, names and first lines.

Nothing of the package is imported. Each rule is a function from the modules to sentences about what breaks it;
`breaches` runs them all. `test_architecture.py` holds the package to them, and holds them to planted faults.

The floors: a part may import lower floors and itself, nothing beside it and nothing above.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FLOORS = {
    "errors": 0,
    "core": 1,
    "media": 2,
    "backends": 2,
    "plan": 3,
    "compress": 3,
    "compile": 3,
    "engine": 3,
    "rollout": 3,
    "session": 4,
    "testing": 5,  # its tiny session stands on session: docs/decisions/0005
    "server": 5,
    "cli": 6,
    "__init__": 6,
}

# What a part may import that is neither ours nor Python's. The longest matching name decides.
THIRD_PARTY = {
    "errors": (),
    "core": ("numpy", "msgspec"),
    "media": ("numpy", "msgspec", "tokenizers", "jinja2", "PIL", "httpx", "llguidance"),
    "backends.base": ("numpy",),
    "backends.reference": ("numpy", "torch", "transformers"),
    "backends.torch_graph": ("numpy", "openvino", "torch"),
    "plan": ("numpy", "msgspec", "scipy", "matplotlib", "torch", "pynvml"),  # torch: gloo's ranks
    "compress": ("numpy", "msgspec", "torch", "safetensors", "ml_dtypes"),
    "backends": ("numpy", "openvino"),
    "compile": ("numpy", "msgspec", "openvino", "safetensors", "gguf", "ml_dtypes"),
    "compile.verify": ("numpy", "msgspec", "openvino", "PIL"),  # it draws its own test pictures
    "engine": ("numpy",),
    "session": ("numpy", "msgspec", "psutil"),
    "testing": ("numpy", "msgspec", "tokenizers"),
    "server": ("numpy", "msgspec", "starlette", "uvicorn", "h11", "prometheus_client", "anyio", "opentelemetry"),
    "cli": ("click", "rich", "yaml", "msgspec"),
    "__init__": (),
}

MAX_FIRST_LINE = 100
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 5
MAX_TOTAL_LINES = 34_700  # docs/decisions/0022
BAGS = ("utils", "util", "helpers", "helper", "common", "manager", "managers", "base", "misc")
CONTRACTS = ("backends.base",)  # the one `base` that names a contract

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One source file. name: dotted and without the package's, `core.spec`; the package's own is `__init__`."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def part(self) -> str:
        return self.name.split(".")[0]

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    def at(self, node: ast.AST) -> str:
        return f"{self.path.name if self.part == self.name else self.name}:{getattr(node, 'lineno', 1)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported name, absolute. `is_lazy`: inside a function; `is_typing`: under TYPE_CHECKING."""

    target: str
    node: ast.AST
    is_lazy: bool
    is_typing: bool


def read(package: Path) -> list[Module]:
    return [_read_module(package, path) for path in sorted(package.rglob("*.py"))]


def _read_module(package: Path, path: Path) -> Module:
    parts = path.relative_to(package).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
    text = path.read_text()
    return Module(path=path, name=name, text=text, tree=ast.parse(text, str(path)))


def breaches(package: Path) -> list[str]:
    """Every breach of every rule, as sentences."""
    modules = read(package)
    rules = (unknown_parts, upward_imports, foreign_imports, eager_imports, missing_first_lines, bag_names, long_code)
    return [sentence for rule in rules for sentence in rule(modules, package.name)]


def unknown_parts(modules: Sequence[Module], package: str) -> Iterator[str]:
    for module in modules:
        if module.part not in FLOORS:
            yield f"{module.name}: a new top-level part needs a floor here and a decision record"


def upward_imports(modules: Sequence[Module], package: str) -> Iterator[str]:
    """Imports go down the floors; parts of one floor never import one another."""
    names = {module.name for module in modules}
    for module in modules:
        own = FLOORS.get(module.part)
        for found in imports(module, package):
            part = _part_of(found.target, package, names)
            if own is None or part is None or part == module.part:
                continue
            if FLOORS.get(part, 99) >= own:
                yield f"{module.at(found.node)}: {module.part} (floor {own}) imports {part} (floor {FLOORS.get(part)})"


def foreign_imports(modules: Sequence[Module], package: str) -> Iterator[str]:
    """Each part has a short list of packages it may use: what it does not list, it does not load."""
    for module in modules:
        allowed = _allowed(module.name)
        for found in imports(module, package):
            top = found.target.split(".")[0]
            if top not in (package, *allowed) and top not in sys.stdlib_module_names:
                known = ", ".join(allowed) or "none"
                yield f"{module.at(found.node)}: {module.name} may not import {top}, only {known}"


def eager_imports(modules: Sequence[Module], package: str) -> Iterator[str]:
    """The command line and the package itself import a stage only when it is called for."""
    names = {module.name for module in modules}
    for module in modules:
        if module.part not in ("cli", "__init__"):
            continue
        for found in imports(module, package):
            part = _part_of(found.target, package, names)
            is_late = found.is_lazy or found.is_typing or part is None or part == module.part
            if not is_late and FLOORS.get(part or "", 99) > 1:
                yield f"{module.at(found.node)}: {module.name} imports {part} before it is called for"


def missing_first_lines(modules: Sequence[Module], package: str) -> Iterator[str]:
    for module in modules:
        first = first_line(module.tree)
        if not first.endswith("."):
            yield f"{module.name}: the first line must be a docstring that says what it is for, as one sentence"
        if len(first) > MAX_FIRST_LINE:
            yield f"{module.name}: the first line has {len(first)} characters, at most {MAX_FIRST_LINE} fit the tree"


def bag_names(modules: Sequence[Module], package: str) -> Iterator[str]:
    for module in modules:
        if module.name not in CONTRACTS and any(part in BAGS for part in module.name.split(".")):
            yield f"{module.name}: a name that holds anything says nothing"


def long_code(modules: Sequence[Module], package: str) -> Iterator[str]:
    total = sum(module.num_lines for module in modules)
    if total > MAX_TOTAL_LINES:
        yield f"{package}: {total:,} lines in all, at most {MAX_TOTAL_LINES:,}"
    for module in modules:
        if module.num_lines > MAX_MODULE_LINES:
            yield f"{module.name}: {module.num_lines} lines, at most {MAX_MODULE_LINES}: make it a folder"
        for node in ast.walk(module.tree):
            if isinstance(node, Function):
                yield from _long_function(module, node)


def _long_function(module: Module, node: Function) -> Iterator[str]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > MAX_FUNCTION_LINES:
        yield f"{module.at(node)}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
    count = len(parameters(node))
    if count > MAX_PARAMETERS and not _is_command(node):
        yield f"{module.at(node)}: {node.name} has {count} parameters, at most {MAX_PARAMETERS}: a record is missing"


def parameters(node: Function) -> list[str]:
    """The names a caller may pass; `self` and `cls` are not passed."""
    spec = node.args
    names = [arg.arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg) if arg]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _is_command(node: Function) -> bool:
    """A click command: nobody calls it but click, which hands over one parameter for each flag a person may type.

    Records need no exception: the constructors of dataclasses and Structs are never written out.
    """
    return any(ast.unparse(decorator).split("(")[0].endswith(".command") for decorator in node.decorator_list)


def first_line(tree: ast.Module) -> str:
    """The first docstring line where the file begins with it; else nothing."""
    docstring = ast.get_docstring(tree, clean=False)
    return docstring.splitlines()[0] if docstring and tree.body[0].lineno == 1 else ""


def imports(module: Module, package: str) -> Iterator[Import]:
    """All that a module imports: absolute, relative, within functions, and `import_module("…")`."""
    nodes = list(ast.walk(module.tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    guards = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    lazy = {inner for function in functions for inner in ast.walk(function)}
    typing = {inner for guard in guards for inner in ast.walk(guard)}
    for node in nodes:
        for target in _targets(node, module, package):
            yield Import(target=target, node=node, is_lazy=node in lazy, is_typing=node in typing)


def _targets(node: ast.AST, module: Module, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        source = _absolute(node, module, package)
        return [f"{source}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        name = node.args[0] if node.args else None
        return [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []
    return []


def _absolute(node: ast.ImportFrom, module: Module, package: str) -> str:
    if not node.level:
        return node.module or ""
    home = [package, *([] if module.name == "__init__" else module.name.split("."))]
    if module.path.name != "__init__.py":
        home = home[:-1]
    home = home[: len(home) - node.level + 1]
    return ".".join([*home, *([node.module] if node.module else [])])


def _part_of(target: str, package: str, names: set[str]) -> str | None:
    """The part of ours that an import names, None for what is not ours; a plain name of the package is its own."""
    first, *rest = target.split(".")
    if first != package:
        return None
    tops = {name.split(".")[0] for name in names} | set(FLOORS)
    return rest[0] if rest and rest[0] in tops else "__init__"


def _allowed(name: str) -> tuple[str, ...]:
    parts = name.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((THIRD_PARTY[prefix] for prefix in prefixes if prefix in THIRD_PARTY), ())
