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
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "triptych"
RESULTS = ROOT / "bench" / "results"
TEXT_COLUMN = 26  # where the tree's sentences begin
# by floor
FOLDERS = ("core", "media", "backends", "plan", "compress", "compile", "engine", "rollout", "session", "server")
HELP_WIDTH = 100
SHOWN_PACKAGES = 6


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


# ── measurements ─────────────────────────────────────────────────────────────────────────────────────────────────────


def read_results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def install_size() -> str:
    """What `pip install .` puts on a disk, as `bench/install_size.py` counted it."""
    found = read_results("install_size")
    total, *packages = found["measures"]
    shown, rest = packages[:SHOWN_PACKAGES], packages[SHOWN_PACKAGES:]
    numbers = found["settings"]["packages"]
    rows = [[f"{each['subject']} {numbers[each['subject']]}", each["value"]] for each in shown]
    rows.append([f"{len(rest)} more", sum(each["value"] for each in rest)])
    head = (
        f"{len(packages)} packages, {total['value'] / 1e6:,.0f} MB on disk ({found['machine']['system'].split()[0]}, "
        f"Python {found['versions']['python']}, {found['when'][:10]}); neither torch nor transformers is among them."
    )
    table = _table(["package", "on disk"], [[name, f"{num_bytes / 1e6:,.1f} MB"] for name, num_bytes in rows])
    return "\n".join([head, "", *table])


SPEED_COLUMNS = {
    "prefill": "prompt of 512",
    "decode 1": "1 answer",
    "decode 8": "8 answers",
    "decode 16": "16 answers",
    "load": "load, s",
    "peak": "peak memory, MB",
}


def speed() -> str:
    """Each runtime's figures as `bench/engine.py` measured them: medians, with the extremes of the rounds."""
    if not (RESULTS / "engine.json").is_file():
        return "No figures of this version are stored; `make bench` measures them."
    found = read_results("engine")
    by_name = {(entry["subject"], entry["name"]): entry for entry in found["measures"]}
    subjects = [name for name in dict.fromkeys(subject for subject, _ in by_name) if (name, "prefill") in by_name]
    rows = [[name, *(_figure(by_name.get((name, figure))) for figure in SPEED_COLUMNS)] for name in subjects]
    head = ["tokens a second", *SPEED_COLUMNS.values()]
    machine, settings = found["machine"], found["settings"]
    rounds = {name: by_name[name, "load"]["num_samples"] for name in subjects}
    fewer = ", ".join(f"{name} {number}" for name, number in rounds.items() if number < settings["rounds"])
    about = (
        f"{machine['cpu']}, {machine['cores']} cores; medians (least–most) of {settings['rounds']} interleaved rounds"
        f"{f' ({fewer})' if fewer else ''}, {found['when'][:10]}, commit {found['commit'][:9]}. "
    )
    return "\n".join([*_table(head, rows), "", about + _how_asked(settings["runtimes"]), "", *_targets(found)])


def _how_asked(runtimes: dict[str, Any]) -> str:
    """What a reader would not expect: weights that are not in four bits, a flag of ours that is not its default."""
    weights = {name: one["settings"]["weights"] for name, one in runtimes.items()}
    wider = [f"{name} is in {held}" for name, held in weights.items() if isinstance(held, str) and "4" not in held]
    choices = runtimes["triptych"]["settings"]["choices"]
    flags = [f"`--{one.split(' (')[0].replace(' = ', ' ')}`" for one in choices if one.startswith("prompt-stretch")]
    return " ".join(
        [*(f"{one}." for one in wider), f"triptych runs with {' '.join(flags)}: prompts first, as the others do."]
        + ["Prompts are words at random; greedy answers to those soon repeat themselves, and look-up gains by that."]
    )


SHOWN_CELLS = {  # of those that bench/compression.py measures
    "fp32 · whole · f32 · never": "fp32, cache and arithmetic too",
    "bf16 · whole · u8 · never": "bf16",
    "int8 · whole · u8 · never": "int8, as `compile` makes it",
    "modality · whole · u8 · never": "recipe `modality`",
    "w8 · whole · u8 · never": "recipe `w8`",
    "w4 · whole · u8 · never": "recipe `w4`",
    "int8 · cenprune:0.5 · u8 · never": "int8, half the visual tokens",
    "int8 · cenprune:0.33 · u8 · never": "int8, a third of the visual tokens",
    "int8 · whole · u4 · never": "int8, cache in u4",
    "int8 · whole · u8 · snapkv:0.6": "int8, cache at 0.6 (SnapKV)",
    "int8 · whole · u8 · snapkv:0.33": "int8, cache at 0.33 (SnapKV)",
    "modality · cenprune:0.5 · u8 · expected:0.6": "`modality`, half the tokens, cache at 0.6 (expected attention)",
    "w4 · cenprune:0.33 · u8 · expected:0.33": "`w4`, a third of the tokens, cache at 0.33 (expected attention)",
}


def compression() -> str:
    """What `bench/compression.py` found, in short; its HTML has the rest."""
    if not (RESULTS / "compression.json").is_file():
        return "No figures of this version are stored; `bench/compression.py` measures them."
    found = read_results("compression")
    by_name = {row["cell"]: row for row in found["cells"]}
    rows = [[words, *_cell(by_name[name])] for name, words in SHOWN_CELLS.items() if name in by_name]
    head = ["", "MB", "divergence", "same top token", "one picture", "kept", "long talk", "kept"]
    machine, total = found["machine"], by_name["fp32 · whole · f32 · never"]["accuracy"]
    about = (
        f"Divergence: mean KL from fp32 in nats a token, on answers after pictures. Right answers to "
        f"{total['single']['total']} questions on one picture and {total['long']['total']} at the end of long "
        f"conversations; kept: of fp32's, with 95 % intervals. {machine['cpu']}, {machine['cores']} cores, "
        f"{found['when'][:10]}, commit {found['commit'][:9]}."
    )
    return "\n".join([*_table(head, rows), "", about, "", *_targets(found)])


def _cell(row: dict[str, Any]) -> list[str]:
    loss = row["kld"].get("single") or row["kld"]["long"]
    cells = [f"{row['disk_bytes'] / 1e6:,.0f}", f"{loss['mean']:.4f}", f"{loss['same_top']:.1%}"]
    for name in ("single", "long"):
        verdict = row["accuracy"].get(name)
        if verdict is None:
            cells += ["–", "–"]
            continue
        low, high = 100 * verdict["retention_low"], 100 * verdict["retention_high"]
        share, kept = 100 * verdict["right"] / verdict["total"], 100 * verdict["retention"]
        cells += [f"{share:.1f} %", f"{kept:.1f} % ({low:.0f}–{high:.0f})"]
    return cells


SIGNS = (
    "Positive: ours would cost that much more without it. Negative, or less than runs of the same differ by: noise, "
    "nothing that this traffic shows."
)
SAVED = ("core-seconds × GB", "core-seconds", "memory", "TTFT p95", "latency p95")


def saving() -> str:
    """What `bench/saving.py` found: both ends, each factor switched off, what was promised."""
    if not (RESULTS / "saving.json").is_file():
        return "No figures of this version are stored; `bench/saving.py` measures them."
    found = read_results("saving")
    by_name = {(one["subject"], one["name"]): one for one in found["measures"]}
    subjects = dict.fromkeys(subject for subject, _ in by_name)
    rows = [[name, *(_figure(by_name.get((name, figure))) for figure in SAVED)] for name in subjects]
    head = ["", "core-seconds × GB", "core-seconds", "memory, MB", "first token p95, s", "whole answer p95, s"]
    shares = [
        [one["name"], *(f"{100 * one[key]:+.1f} %" for key in ("cost_off", "cpu_off", "memory_off"))]
        + [f"{100 * (one['step'] - 1):+.1f} %"]
        for one in found["effects"]
    ]
    factors = _table(["switched off alone", "cost", "core-seconds", "memory", "its step of the whole"], shares)
    machine = found["machine"]
    about = f"{machine['cpu']}, {machine['cores']} cores, {found['when'][:10]}, commit {found['commit'][:9]}. "
    about += " ".join(found["settings"]["about"][-2:])  # what ours is, and what is noise
    return "\n".join([*_table(head, rows), "", about, "", *factors, "", SIGNS, "", *_targets(found)])


def few_bits() -> str:
    """What `bench/decoder_w4.py` found: recipes beside llama.cpp's files on the same weights."""
    found = read_results("decoder_w4")
    by_subject: dict[str, dict[str, Any]] = {}
    for entry in found["measures"]:
        by_subject.setdefault(entry["subject"], {})[entry["name"]] = entry
    rows = []
    for subject, own in by_subject.items():
        mean = own["KL divergence, mean"]
        figures = [own[name]["value"] for name in ("KL divergence, 99 %", "same likeliest token")]
        spread = f"{mean['value']:.4f} ({mean['lowest']:.3f}–{mean['highest']:.3f})"
        rows.append(
            [subject, f"{own['bits a weight']['value']:.2f}", spread, f"{figures[0]:.2f}", f"{figures[1]:.1f} %"]
        )
    head = ["", "bits a weight", "KL divergence, mean (windows)", "99 %", "same likeliest token"]
    return "\n".join([*_table(head, rows), "", *_targets(found)])


def weighing() -> str:
    """What `bench/mbq.py` found of weighing tokens by modality."""
    found = read_results("mbq")
    by_name = {(entry["name"], entry["subject"]): entry for entry in found["measures"]}
    names = list(dict.fromkeys(name for name, _ in by_name))
    rows = [[f"{name}, {by_name[name, 'AWQ']['unit']}", *(_figure(by_name[name, who]) for who in ("AWQ", "MBQ"))]
            for name in names]  # fmt: skip
    return "\n".join([*_table(["", "AWQ", "MBQ"], rows), "", *_targets(found)])


def soak() -> str:
    """What `bench/soak.py` did to the server, and whether every promise was kept."""
    found = read_results("soak")
    settings = found["settings"]
    ends = ", ".join(f"{number:,} {what}" for what, number in sorted(settings["outcomes"].items()))
    about = f"{settings['requests']:,} requests in {settings['seconds'] / 60:.0f} minutes ({ends}), "
    about += f"{settings['decoders_killed']} picture decoders killed, {found['when'][:10]}. "
    about += f"The server ran with `{settings['flags']}`."
    return "\n".join([about, "", *_targets(found)])


MIXED = (
    "peak memory",
    "processor time a request",
    "core-seconds × GB a request",
    "facts right, of those f32 has right",
)
BY_RATE = ("TTFT p95, text, {}", "TPOT p95, text, {}", "TTFT p95, picture, {}", "TPOT p95, picture, {}", "goodput {}")


def mixed() -> str:
    """What `bench/mixed.py` found of texts and pictures together, in short: `mixed_rates` has the rest."""
    if not (RESULTS / "mixed.json").is_file():
        return "No figures of this version are stored; `bench/mixed.py` measures them."
    found = read_results("mixed")
    by_name, subjects = _by_name(found)
    shared = [where for where in _rates(found) if all((one, f"goodput {where}") in by_name for one in subjects)]
    middle = shared[(len(shared) - 1) // 2]
    names = ["highest rate at both promises", *(f"TTFT p95, {kind}, {middle}" for kind in ("text", "picture")), *MIXED]
    about = f"{_tried(found)} {found['when'][:10]}, commit {found['commit'][:9]}."
    return "\n".join([*_mixed_table(found, names), "", about, "", *_targets(found)])


def mixed_rates() -> str:
    """All that `bench/mixed.py` found: each server at each rate, and whether its answers are the exact model's."""
    if not (RESULTS / "mixed.json").is_file():
        return "No figures of this version are stored; `bench/mixed.py` measures them."
    found = read_results("mixed")
    by_name, subjects = _by_name(found)
    rows = [
        [one, where.removeprefix("at "), *(_figure(by_name.get((one, name.format(where)))) for name in BY_RATE)]
        for where in ("alone", *_rates(found))
        for one in subjects
        if (one, f"TTFT p95, text, {where}") in by_name
    ]
    head = ["", "rate", *(name.partition(", {}")[0] + ", s" for name in BY_RATE[:-1]), "goodput, 1/s"]
    named = {entry["name"] for entry in found["measures"] if entry["unit"] in ("%", "nat")}
    names = [name for name in dict.fromkeys(entry["name"] for entry in found["measures"]) if name in named]
    return "\n".join([*_table(head, rows), "", _tried(found), "", *_mixed_table(found, names)])


def _by_name(found: dict[str, Any]) -> tuple[dict[tuple[str, str], dict[str, Any]], list[str]]:
    """Measures by subject and name; and the subjects."""
    by_name = {(entry["subject"], entry["name"]): entry for entry in found["measures"]}
    return by_name, list(dict.fromkeys(subject for subject, _ in by_name))


def _rates(found: dict[str, Any]) -> list[str]:
    return [f"at {rate:g}/s" for rate in found["settings"]["rates"]]


def _mixed_table(found: dict[str, Any], names: list[str]) -> list[str]:
    by_name, subjects = _by_name(found)
    units = {entry["name"]: "MB" if entry["unit"] == "B" else entry["unit"] for entry in found["measures"]}
    rows = [
        [f"{name}, {units[name]}", *(_figure(by_name.get((subject, name))) for subject in subjects)]
        for name in names
        if name in units
    ]
    return _table(["", *subjects], rows)


def _tried(found: dict[str, Any]) -> str:
    """Which rates there were, who kept which, and what was promised."""
    settings, (by_name, subjects) = found["settings"], _by_name(found)
    rates = ", ".join(f"{rate:g}" for rate in settings["rates"])
    best = {one: by_name[one, "highest rate at both promises"]["value"] for one in subjects}
    kept = ", ".join(f"{one} all up to {rate:g}" if rate else f"{one} none" for one, rate in best.items())
    rounds = f"{settings['rounds']} round{'s' if settings['rounds'] > 1 else ''}"
    busy = f" Just before a trial, others had up to {100 * settings['busy_before']:.0f} % of the processors."
    return (
        f"Requests a second that were tried: {rates}, {settings['count']} requests each, {rounds}. Kept: {kept}. "
        f"Promised to {100 * settings['share_in_time']:.0f} % of them: the first token within "
        f"{settings['ttft_s']:.1f} s, {settings['times_unloaded']:g} times what the slowest server needs unloaded, "
        f"then one every {1e3 * settings['tpot_s']:.0f} ms. Goodput counts the answers that kept both."
        f"{busy if settings['busy_before'] > 0.1 else ''}"
    )


def simulated() -> str:
    """How far off `bench/simulated.py` found the simulation of one replica."""
    found = read_results("simulated")
    about = f"Errors are shares of what was measured; {found['when'][:10]}, commit {found['commit'][:9]}."
    if found["commit"].startswith("35d2dfa3a"):
        about += " These are of an earlier simulation, whose replicas flowed; this one is to be measured."
    return "\n".join([*_targets(found), "", about])


def guesses() -> str:
    """What `bench/speculation.py` found of guessing next tokens."""
    found = read_results("speculation")
    by_name = {(entry["name"], entry["subject"]): entry for entry in found["measures"]}
    rows = []
    for name in dict.fromkeys(name for name, _ in by_name):
        speeds = [_figure(by_name[name, subject]) for subject in ("plain", "guessed")]
        gain, same = by_name[name, "gain"]["value"], by_name[name, "same tokens"]["value"]
        rows.append([name, *speeds, f"{gain:.2f} ×", f"{same:.0f} %"])
    return "\n".join(
        [*_table(["tokens a second", "plain", "guessed", "gain", "same answers"], rows), "", *_targets(found)]
    )


def beside() -> str:
    """What `bench/fairness.py` found of texts beside a flood of pictures."""
    found = read_results("fairness")
    by_name = {(entry["name"], entry["subject"]): entry for entry in found["measures"]}
    names = (("gap p50", "ms"), ("gap p99", "ms"), ("first piece", "ms"))
    rows = [[f"{name}, {unit}", *(_figure(by_name[name, who]) for who in ("alone", "beside"))] for name, unit in names]
    pictures = [_figure(by_name["pictures answered", who]) for who in ("pictures", "beside")]
    about = f"Pictures answered meanwhile, a second: {pictures[1]}; without texts {pictures[0]}. {found['when'][:10]}."
    return "\n".join([*_table(["texts", "alone", "beside pictures"], rows), "", about, "", *_targets(found)])


def clients() -> str:
    """How many of each client's cases work, as `bench/clients.py` found; and how llama.cpp's own tests fared."""
    found, peer = read_results("clients"), read_results("peer_suite")
    had, settings = Counter(case["client"] for case in found["settings"]["cases"]), found["settings"]["clients"]
    rows = [[one["subject"], f"{one['value']:g} of {had[one['subject']]}"] for one in found["measures"]]
    named = ", ".join(f"{name} {number}" for name, number in sorted(settings.items()))
    passed, meant, _ = (f"{one['value']:g}" for one in peer["measures"])
    tests = f"llama.cpp's server tests ({peer['settings']['source']}): {passed} pass, {meant} differ by design."
    return "\n".join([*_table(["client", "cases that work"], rows), "", f"{named}.", "", tests])


LOAD_COLUMNS = (
    "TTFT, text p50",
    "TTFT, text p99",
    "TTFT, pictures p50",
    "TTFT, pictures p99",
    "TPOT, text p50",
    "goodput",
)
SEEN = ("TTFT", "TPOT", "whole answer")


def load() -> str:
    """What `bench/serve.py` found: the server by rate, and what three clients saw beside what it counted itself."""
    if not (RESULTS / "serve.json").is_file():
        return "No figures of this version are stored; `bench/serve.py` measures them."
    found = read_results("serve")
    values: dict[str, dict[str, float]] = {}
    for one in found["measures"]:
        values.setdefault(one["subject"], {})[one["name"]] = one["value"]
    rates = [(name, own) for name, own in values.items() if "goodput" in own]
    rows = [[name, *(f"{own[column]:.3g}" if column in own else "–" for column in LOAD_COLUMNS)] for name, own in rates]
    head = ["seconds", *LOAD_COLUMNS[:-1], "in time, answers/s"]
    seen = [
        [
            name,
            *(
                f"{1e3 * own[f'{one} mean']:.1f} ({1e3 * own[f'{one} mean, counted by the server']:.1f})"
                for one in SEEN
            ),
        ]
        + [f"{own['answered']:.0f}", f"{own['tokens']:,.0f}"]
        for name, own in values.items()
        if "tokens" in own and "goodput" not in own
    ]
    missed = [f"{aim['name']} {aim['value']:.3g}" for aim in found["targets"] if not aim["is_met"]]
    kept = f"{len(found['targets']) - len(missed)} of {len(found['targets'])} promises of agreement are kept"
    about = f"{kept}{'; not ' + ', '.join(missed) if missed else ''}. {found['machine']['cpu']}, "
    about += f"{found['machine']['cores']} cores, {found['when'][:10]}, commit {found['commit'][:9]}."
    clients = _table(["mean, ms (counted by the server)", *SEEN, "answers", "tokens"], seen)
    runs = (
        f"One run of {found['settings']['seconds']:.0f} s a rate, on a machine that drifts: rows differ by their "
        "minute as well as by their rate. In time: within "
        f"{found['settings']['ttft_s']:g} s to the first token, {found['settings']['tpot_s']:g} s for each further one."
    )
    return "\n".join([*_table(head, rows), "", runs, "", *clients, "", about])


def machine() -> str:
    """What `bench/machine.py` found of its machine, and what the demo does there."""
    if not (RESULTS / "machine.json").is_file():
        return "No figures of this version are stored; `bench/machine.py` measures them."
    found = read_results("machine")
    scales = {"B/s": (1e-9, "GB/s"), "operations/s": (1e-9, "G operations/s"), "s": (1e6, "µs")}
    rows = []
    for one in found["measures"]:
        scale, unit = scales.get(one["unit"], (1, one["unit"]))
        ends = [one[key] * scale for key in ("value", "lowest", "highest")]
        value, low, high = (f"{end:,.0f}" if end >= 100 else f"{end:.3g}" for end in ends)
        name = re.sub(r" together$", " together, prompts' time included", one["name"])
        rows.append([f"{one['subject']}: {name}", value if low == high else f"{value} ({low}–{high})", unit])
    about = (
        f"{found['machine']['cpu']}, {found['machine']['cores']} cores; medians (least–most), {found['when'][:10]}, "
        f"commit {found['commit'][:9]}."
    )
    return "\n".join(
        [*_table(["", "measured", "unit"], rows), "", about, "", *(f"- {x}" for x in found["settings"]["notes"])]
    )


def _targets(found: dict[str, Any]) -> list[str]:
    """What was promised of those figures, and whether it was kept."""
    rows = [
        [
            aim["name"],
            f"≥ {aim['at_least']:g}" if aim["at_least"] is not None else f"≤ {aim['at_most']:g}",
            f"{aim['value']:.3g} {aim['unit']}",
            "yes" if aim["is_met"] else "**no**",
        ]
        for aim in found["targets"]
    ]
    return _table(["", "wanted", "measured", "kept"], rows)


def demo_output() -> str:
    """What `python examples/demo.py > bench/results/demo.txt` said when it was last recorded."""
    return _code((RESULTS / "demo.txt").read_text(), "text")


def _figure(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    small = {
        "B": (1e-6, 0), "s": (1, 2 if entry["value"] >= 0.1 else 3), "1/s": (1, 2), "nat": (1, 2),
        "s·GB": (1, 1 if entry["value"] >= 5 else 2),
    }  # fmt: skip
    scale, digits = small.get(entry["unit"], (1, 0))
    value, low, high = (f"{entry[key] * scale:,.{digits}f}" for key in ("value", "lowest", "highest"))
    is_one = low == high or entry["unit"] == "%"  # a share's samples are ones and zeroes
    return value if is_one else f"{value} ({low}–{high})"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---", *["--:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


MAKERS: dict[str, Callable[[], str]] = {
    "tree": lambda: _code(draw_tree(PACKAGE)),
    "commands": command_reference,
    "other flags": other_flags,
    "errors": error_tree,
    "python": python_reference,
    "bundle records": lambda: record_tables("core/bundle"),
    "spec records": lambda: record_tables("core/spec"),
    "install size": install_size,
    "speed": speed,
    "compression": compression,
    "saving": saving,
    "soak": soak,
    "machine": machine,
    "mixed": mixed,
    "mixed rates": mixed_rates,
    "simulated": simulated,
    "guesses": guesses,
    "beside": beside,
    "clients": clients,
    "load": load,
    "few bits": few_bits,
    "weighing": weighing,
    "demo output": demo_output,
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
