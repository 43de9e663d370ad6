"""`triptych plan`: what serving a model will cost on which machine, and whether that came true."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from triptych.cli.tables import console_of, write
from triptych.cli.values import NewFile, Seconds
from triptych.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from triptych.core.device import DeviceSpec
    from triptych.core.plan import Plan
    from triptych.plan.plots import Mark
    from triptych.session.planning import Question


WIDE = 110  # columns of a terminal, from which a table has room for reasons


@click.command(
    epilog="""
\b
Examples:
  triptych plan ./smolvlm --workload mixed --ttft 0.5 --tpot 0.05 --hardware h200,a100,l40s,orin,epyc
  triptych measure -o machine.json
  triptych plan ./smolvlm --machine machine.json --fit        a minute; kept in the bundle
  triptych plan ./smolvlm --machine machine.json --workload work.yaml --ttft 0.5 --tpot 0.05 -o plan.json
  triptych plan ./smolvlm --check plan.json                   runs it here and compares
"""
)
@click.argument("model", metavar="BUNDLE|CHECKPOINT|demo")
@click.option(
    "--machine", "machines", multiple=True, metavar="FILE|NAME",
    help="What `triptych measure` wrote, or a data sheet's name; may be given several times.",
)  # fmt: skip
@click.option("--hardware", metavar="NAME,…", help="Several data sheets at once, such as h200,l40s,epyc.")
@click.option(
    "--workload", metavar="FILE|NAME",
    help="A YAML file, or mixed, chat, pictures.  [default: mixed; chat for a model that sees none]",
)  # fmt: skip
@click.option("--ttft", "ttft_s", type=Seconds(0, min_open=True), help="Time to first token, p95, in seconds.")
@click.option("--tpot", "tpot_s", type=Seconds(0, min_open=True), help="Time per output token, p95, in seconds.")
@click.option(
    "--target-rate", "requests_per_s", type=Seconds(0, min_open=True), metavar="R",
    help="Requests a second; the workload's own if not given. Says how many devices.",
)  # fmt: skip
@click.option("--devices", "num_devices", type=click.IntRange(1), metavar="N", help="Have so many, and no more.")
@click.option(
    "--weights", type=click.Choice(["int4", "int8", "bf16", "fp32"]),
    help="Of a checkpoint's decoder, as it will be compiled; a bundle's are what they are.  [default: int8]",
)  # fmt: skip
@click.option("--simulate", is_flag=True, help="Simulate the first choice whole: every replica, request by request.")
@click.option("--num-threads", type=click.IntRange(1), metavar="N", help="CPU threads, for --fit and --check.")
@click.option("--fit", is_flag=True, help="Measure the bundle's real steps here first, and keep them in the bundle.")
@click.option(
    "--check", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PLAN",
    help="Run a plan's first choice on this machine, write what was measured into it, and compare.",
)  # fmt: skip
@click.option("-o", "--output", type=NewFile(), help="Write the plan here, as JSON.")
@click.option(
    "--html", type=NewFile(),
    help="Write the report as one HTML file that needs nothing else.",
)  # fmt: skip
def verb(model: str, check: Path | None, output: Path | None, html: Path | None, **asked: Any) -> None:
    """Predict what MODEL does on machines that are here or not: what fits, how many answers at once, how fast.

    A bundle that was measured here (--fit) is predicted from its own steps; any other model from the machine's
    figures or a data sheet's. Nothing is said beyond what was measured.
    """
    from triptych.core.spec import pretty_json
    from triptych.plan.extra import extra

    if asked["requests_per_s"] is not None and asked["num_devices"] is not None:
        raise ConfigError("--target-rate and --devices were both given", hint="one follows from the other")
    options = click.get_current_context().command.params if check is not None else []
    given = [one.opts[0] for one in options if one.name != "num_threads" and asked.get(one.name or "")]
    if given:
        raise ConfigError(
            f"--check runs a plan as it is, {', '.join(given)} was given too", hint="plan anew, then check"
        )
    if asked["num_threads"] is not None and not (asked["fit"] or check):
        raise ConfigError("--num-threads is for --fit and --check, of which none was given")
    if html is not None:
        extra("matplotlib")
    if asked["fit"]:
        extra("scipy.optimize")
    folder = folder_of(model)
    plan, marks = _plan(folder, asked) if check is None else (_check(folder, check, asked["num_threads"]), ())
    target = output or check
    if target is not None:
        write(target, pretty_json(plan), "plan")
    if html is not None:
        from triptych.plan.report import plan_page

        write(html, plan_page(plan, marks).encode(), "report")
    _print(plan)


def folder_of(model: str) -> Path:
    """Of what MODEL names. Raises ConfigError where there is none."""
    if model == "demo":
        from triptych.session.opening import Source, find_bundle

        return find_bundle(Source(model=model)).path
    if not Path(model).is_dir():
        raise ConfigError(f"{model} is not a folder here", hint="a bundle's or a checkpoint's folder, or `demo`")
    return Path(model)


def _plan(model: Path, asked: dict[str, Any]) -> tuple[Plan, tuple[Mark, ...]]:
    """And what its page marks on the roofline."""
    from triptych.cli.workloads import read_workload
    from triptych.core.plan import Target
    from triptych.plan.graphs import counted
    from triptych.session.placing import placed, step_marks
    from triptych.session.planning import Question, make_plan, read_model

    names = ("ttft_s", "tpot_s", "requests_per_s", "num_devices")
    devices = devices_of(asked["machines"], asked["hardware"])
    spec, held, bundle = read_model(model, asked["weights"] or "int8")
    if bundle is not None:
        if asked["weights"] is not None:
            raise ConfigError(
                f"--weights is of a checkpoint; this bundle's decoder is in {held.decoder}",
                hint="plan for the checkpoint, or leave --weights out",
            )
        spec = counted(spec, bundle)
    workload = read_workload(asked["workload"] or ("mixed" if spec.vision else "chat"))
    question = Question(
        name=model.name if bundle is None else bundle.manifest.name,
        spec=spec,
        held=held,
        devices=devices,
        workload=workload,
        target=Target(**{name: asked[name] for name in names}),
        bundle=bundle,
    )
    if asked["fit"]:
        question = _fitted(question, model, asked)
    plan = placed(question, make_plan(question))
    if asked["simulate"]:
        from triptych.session.fleet import simulated

        plan = simulated(question, plan)
    return plan, step_marks(question, plan)


def _fitted(question: Question, model: Path, asked: dict[str, Any]) -> Question:
    """The question about the bundle with its steps in it, named for the machine that is measured: this one."""
    from dataclasses import replace

    from triptych.cli.compile import progress_bar
    from triptych.core.bundle import open_bundle
    from triptych.engine.config import EngineConfig
    from triptych.session.planning import fit_bundle

    here = [device for device in question.devices if device.source == "measured"]
    if question.bundle is None or len(here) != 1:
        raise ConfigError(
            "--fit measures a bundle on this machine", hint="give a compiled bundle, and --machine machine.json of here"
        )
    with progress_bar() as progress:
        cost = fit_bundle(question.bundle, here[0].name, EngineConfig(num_threads=asked["num_threads"]), progress)
    click.echo(f"nine of ten measured steps lie within {cost.error:.1%} of what was fitted to them", err=True)
    return replace(question, bundle=open_bundle(model))


def _check(model: Path, path: Path, num_threads: int | None) -> Plan:
    import msgspec

    from triptych.cli.compile import progress_bar
    from triptych.core.plan import Plan
    from triptych.engine.config import EngineConfig
    from triptych.session.planning import check

    try:
        plan = msgspec.json.decode(path.read_bytes(), type=Plan)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}", hint="`triptych plan … -o plan.json` writes one") from error
    with progress_bar() as progress:
        return check(plan, model, EngineConfig(num_threads=num_threads), progress)


def devices_of(machines: tuple[str, ...], hardware: str | None = None) -> tuple[DeviceSpec, ...]:
    """What `--machine` and `--hardware` name. Raises ConfigError, MeasurementError for a file at odds with itself."""
    import msgspec

    from triptych.core.device import DeviceSpec
    from triptych.plan.measure import check as agreeing
    from triptych.plan.sheets import load, names

    asked = [*machines, *(name.strip() for name in (hardware or "").split(",") if name.strip())]
    if not asked:
        raise ConfigError("no machine was named", hint=f"--machine machine.json, or --hardware {','.join(names())}")
    found = []
    for name in asked:
        if name in names() or not Path(name).suffix:
            found.append(load(name))
            continue
        try:
            found.append(agreeing(msgspec.json.decode(Path(name).read_bytes(), type=DeviceSpec)))
        except (OSError, msgspec.DecodeError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{name}: {said}", hint="`triptych measure -o machine.json` writes one") from error
    called = [device.name for device in found]
    if twice := next((name for name in called if called.count(name) > 1), None):
        raise ConfigError(f"two machines are named {twice}", hint="name one of them apart: `triptych measure --name`")
    return tuple(found)


def _print(plan: Plan) -> None:
    console = console_of(200)
    is_wide = console.width >= WIDE
    console.print(_table(plan, is_wide))
    if not any(choice.fits for choice in plan.choices):
        console.print("[red]Nothing meets the targets[/]; of each device the nearest is shown.")
    for device in plan.devices:
        first = next((choice for choice in plan.choices if choice.device == device.name), None)
        if first is not None:
            why = "" if is_wide else f"{first.reason}; "
            console.print(f"{device.name}, {first.batch} at once: {why}{first.placed}", markup=False)
    for one in plan.choices[0].predictions if plan.choices else ():
        if one.name.startswith("fleet_"):
            console.print(f"{one.name}: {one.value:,.4g} {one.unit} ({one.lowest:,.3g} to {one.highest:,.3g})")
    if plan.checked is not None:
        for one in plan.choices[0].predictions:
            said = "not measured" if one.error is None else f"{one.measured:,.4g}, {one.error:+.1%}"
            console.print(f"{one.name}: predicted {one.value:,.4g} {one.unit}, measured {said}")
    for sentence in plan.assumptions:
        console.print(f"· {sentence}", style="dim", markup=False)


def _table(plan: Plan, is_wide: bool) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{escape(plan.model)}, {escape(plan.workload.name)}", title_justify="left")
    table.add_column("device")
    for heading in ("how\nmany", "at\nonce", "TTFT ms\np50 · p95", "TPOT ms\np50 · p95", "requests/s", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("why")
    for choice in _shown(plan):
        values = {one.name: one.value for one in choice.predictions}
        each = [[1e3 * values[f"{name}_{share}"] for share in ("p50", "p95")] for name in ("ttft", "tpot")]
        together = f" ({choice.tensor_parallel} together)" if choice.tensor_parallel > 1 else ""
        table.add_row(
            escape(choice.device), f"{choice.num_devices}{together}", str(choice.batch),
            *(f"{half:,.1f} · {most:,.1f}" for half, most in each),
            f"{values['requests_per_s']:,.2f}", f"{values['memory_bytes'] / 1e9:,.2f} GB",
            *([f"[{'green' if choice.fits else 'red'}]{escape(choice.reason)}[/]"] if is_wide else ()),
        )  # fmt: skip
    return table


def _shown(plan: Plan) -> list[Any]:
    """Of each device the best three ways that fit, or the one that comes nearest."""
    shown = []
    for device in plan.devices:
        own = [choice for choice in plan.choices if choice.device == device.name]
        shown += [choice for choice in own if choice.fits][:3] or own[:1]
    return shown
