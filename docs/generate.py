"""Fill the marked blocks of README.md, bench/README.md and docs/ from the code and from measurements.

A block stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->`. `python docs/generate.py` rewrites the
blocks; with `--check` it writes nothing, prints what is stale and exits 1.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from docs.measured import losses, speeds  # noqa: E402

PACKAGE = ROOT / "src" / "triptych"
TEXT_COLUMN = 26  # where the tree's sentences begin
# by floor
FOLDERS = ("core", "media", "backends", "plan", "compress", "compile", "engine", "rollout", "session", "server")
HELP_WIDTH = 100


def block(text: str, name: str) -> str:
    """What stands between a block's marks. Raises LookupError."""
    _, begin, rest = text.partition(_begin(name))
    inside, end, _ = rest.partition(_end(name))
    if not begin or not end:
        raise LookupError(f"no block named {name}")
    return inside


def fill(text: str, makers: dict[str, Callable[[], str]]) -> str:
    """`text` with each block made anew. A mark that nobody makes raises KeyError, one without an end LookupError."""
    for name in re.findall(r"<!-- generated: (.+?) -->", text):
        old, new = block(text, name), f"{makers[name]().rstrip()}\n"
        text = text.replace(f"{_begin(name)}{old}{_end(name)}", f"{_begin(name)}{new}{_end(name)}")
    return text


def _begin(name: str) -> str:
    return f"<!-- generated: {name} -->\n"


def _end(name: str) -> str:
    return f"<!-- end: {name} -->"


# ── the tree ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def draw_tree(package: Path) -> str:
    """The package's folders and modules, each with its first docstring line."""
    return "\n".join([f"src/{package.name}/", *_branches(package, "")])


def _branches(folder: Path, indent: str) -> Iterator[str]:
    entries = _entries(folder, is_top=not indent)
    for entry in entries:
        is_last = entry == entries[-1]
        stem = f"{indent}{'└' if is_last else '├'}── {entry.name}{'/' if entry.is_dir() else ''}"
        yield f"{stem:<{TEXT_COLUMN}}{'' if len(stem) < TEXT_COLUMN else '  '}{_first_line(entry)}"
        if entry.is_dir():
            yield from _branches(entry, f"{indent}{' ' if is_last else '│'}   ")


def _entries(folder: Path, *, is_top: bool) -> list[Path]:
    """Modules by name, then folders; at the top the folders stand in the order of the floors."""
    modules = [path for path in sorted(folder.glob("*.py")) if is_top or path.name != "__init__.py"]
    folders = [path for path in sorted(folder.iterdir()) if (path / "__init__.py").is_file()]
    rank = {name: index for index, name in enumerate(FOLDERS)}
    return modules + sorted(folders, key=lambda path: (rank.get(path.name, len(rank)), path.name))


def _first_line(path: Path) -> str:
    source = path / "__init__.py" if path.is_dir() else path
    docstring = ast.get_docstring(ast.parse(source.read_text()))
    return docstring.splitlines()[0] if docstring else ""


def _code(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────────


def command_reference() -> str:
    """Each verb's `--help`, as a terminal of HELP_WIDTH columns prints it."""
    from triptych.cli import main

    width: dict[str, Any] = {"max_content_width": HELP_WIDTH, "terminal_width": HELP_WIDTH}
    top = click.Context(main, info_name="triptych", **{**main.context_settings, **width})
    sections = [_code(main.get_help(top), "text")]
    for verb in verbs():
        command = main.get_command(top, verb)
        assert command is not None
        context = click.Context(command, info_name=verb, parent=top, **width)
        sections.append(f"## triptych {verb}\n\n{_code(command.get_help(context), 'text')}")
        for name, own in (command.commands if isinstance(command, click.Group) else {}).items():
            inner = click.Context(own, info_name=name, parent=context, **width)
            sections.append(f"### triptych {verb} {name}\n\n{_code(own.get_help(inner), 'text')}")
    return "\n\n".join(sections)


def other_flags() -> str:
    """Flags of `vllm serve` that `triptych serve` has for their name alone, and what it does instead."""
    from triptych.cli.flags import IDLE, REFUSED

    said = {flag: f"accepted: {instead}" for flag, instead in IDLE.items()}
    for flag, (anyway, instead) in REFUSED.items():
        said[flag] = f"refused{f' but for {anyway}' if anyway else ''}: {instead}"
    return "\n".join(["| flag | here |", "| --- | --- |", *(f"| `{flag}` | {words} |" for flag, words in said.items())])


def error_tree() -> str:
    """The errors as `errors.py` draws them."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / "errors.py").read_text())) or ""
    return _code(docstring.partition("\n")[2].strip(), "text")


def verbs() -> list[str]:
    from triptych.cli import main

    return main.list_commands(click.Context(main))


# ── the Python names ─────────────────────────────────────────────────────────────────────────────────────────────────


def python_reference() -> str:
    """Each public name of `triptych`: its signature and docstring, its fields, its public methods."""
    import triptych

    names = [name for name in triptych.__all__ if name[0].isupper()]
    return "\n\n".join(_class_reference(getattr(triptych, name)) for name in names)


def _class_reference(kind: type) -> str:
    node, lines = _source_of(kind)
    parts = [f"## {kind.__name__}", inspect.getdoc(kind) or ""]
    if dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        parts.append(_fields(node, lines))
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            parts += [_code(_signature(method), "python"), ast.get_docstring(method) or ""]
    return "\n\n".join(part for part in parts if part)


def _source_of(kind: type) -> tuple[ast.ClassDef, list[str]]:
    source = Path(inspect.getsourcefile(kind) or "").read_text()
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return next(node for node in classes if node.name == kind.__name__), source.splitlines()


def _signature(method: ast.FunctionDef) -> str:
    """`name(…) -> …` as it is written, without `self` or `cls`; a property shows as one."""
    decorators = [ast.unparse(each) for each in method.decorator_list]
    names = [arg.arg for arg in method.args.args]
    bound = ast.parse(ast.unparse(method)).body[0]
    assert isinstance(bound, ast.FunctionDef)
    bound.args.args = bound.args.args[1:] if names[:1] in (["self"], ["cls"]) else bound.args.args
    returns = f" -> {ast.unparse(method.returns)}" if method.returns else ""
    if "property" in decorators:
        return f"{method.name}{returns}"
    arguments = re.sub(r"(?<=[\w\]])=(?=[\w'\"(])", " = ", ast.unparse(bound.args))
    return f"{method.name}({arguments}){returns}"


# ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def record_tables(*modules: str) -> str:
    """Each stored record of the modules: its fields, types, defaults, and the comments beside them."""
    sections = []
    for module in modules:
        source = (PACKAGE / f"{module}.py").read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Fact" for base in node.bases):
                sections.append(_record(node, source.splitlines()))
    return "\n\n".join(sections)


def _record(node: ast.ClassDef, lines: list[str]) -> str:
    docstring = ast.get_docstring(node)
    return "\n\n".join([f"### {node.name}", *([docstring] if docstring else []), _fields(node, lines)])


def _fields(node: ast.ClassDef, lines: list[str]) -> str:
    fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
    rows = []
    for field in fields:
        kind = ast.unparse(field.annotation).replace("|", "\\|")
        default = f"`{_default(field.value)}`" if field.value else ""
        remark = "; ".join(line.partition("  # ")[2] for line in lines[field.lineno - 1 : field.end_lineno])
        rows.append(f"| `{ast.unparse(field.target)}` | `{kind}` | {default} | {remark.strip('; ')} |")
    return "\n".join(["| field | type | default | |", "| --- | --- | --- | --- |", *rows])


def _default(value: ast.expr) -> str:
    made = re.fullmatch(r"field\(default_factory=(.+)\)", ast.unparse(value))
    return f"{made[1]}()" if made else ast.unparse(value)


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────────


def demo_output() -> str:
    """What `python examples/demo.py > bench/results/demo.txt` said when it was last recorded."""
    return _code((ROOT / "bench" / "results" / "demo.txt").read_text(), "text")


MAKERS: dict[str, Callable[[], str]] = {
    "tree": lambda: _code(draw_tree(PACKAGE)),
    "commands": command_reference,
    "other flags": other_flags,
    "errors": error_tree,
    "python": python_reference,
    "bundle records": lambda: record_tables("core/bundle"),
    "spec records": lambda: record_tables("core/spec"),
    "demo output": demo_output,
    **speeds.MAKERS,
    **losses.MAKERS,
}


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a block is stale")
    is_check = parser.parse_args().check
    stale = 0
    for path in documents():
        before = path.read_text()
        after = fill(before, MAKERS)
        if before == after:
            continue
        stale += 1
        name = path.relative_to(ROOT).as_posix()
        if is_check:
            sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), after.splitlines(True), name, "fresh"))
        else:
            path.write_text(after)
            print(f"{name}: rewritten")
    if is_check and stale:
        print(f"{stale} stale: run `python docs/generate.py`")
    return int(is_check and stale > 0)


if __name__ == "__main__":
    raise SystemExit(main())
