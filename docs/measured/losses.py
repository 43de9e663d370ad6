"""What was measured of compression's losses, as tables; and the promises that no other table shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from docs.measured.tables import by_name, figure, read, subjects, table, targets, verdict, where

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
    found = read("compression")
    cells = {row["cell"]: row for row in found["cells"]}
    rows = [[words, *_cell(cells[name])] for name, words in SHOWN_CELLS.items() if name in cells]
    head = ["", "MB", "divergence", "same top token", "one picture", "kept", "long talk", "kept"]
    total = cells["fp32 · whole · f32 · never"]["accuracy"]
    about = (
        f"Divergence: mean KL from fp32 in nats a token, on answers after pictures. Right answers to "
        f"{total['single']['total']} questions on one picture and {total['long']['total']} at the end of long "
        f"conversations; kept: of fp32's, with 95 % intervals. {where(found)}"
    )
    return "\n".join([*table(head, rows), "", about, "", *targets(found)])


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


def few_bits() -> str:
    """What `bench/decoder_w4.py` found: recipes beside llama.cpp's files on the same weights."""
    found = read("decoder_w4")
    own, rows = by_name(found), []
    for subject in subjects(found):
        mean = own[subject, "KL divergence, mean"]
        names = ("bits a weight", "KL divergence, 99 %", "same likeliest token")
        bits, most, same = (own[subject, name]["value"] for name in names)
        spread = f"{mean['value']:.4f} ({mean['lowest']:.3f}–{mean['highest']:.3f})"
        rows.append([subject, f"{bits:.2f}", spread, f"{most:.2f}", f"{same:.1f} %"])
    head = ["", "bits a weight", "KL divergence, mean (windows)", "99 %", "same likeliest token"]
    return "\n".join([*table(head, rows), "", *targets(found)])


def weighing() -> str:
    """What `bench/mbq.py` found of weighing tokens by modality."""
    found = read("mbq")
    own = by_name(found)
    names = dict.fromkeys(name for _, name in own)
    rows = [[f"{name}, {own['AWQ', name]['unit']}", *(figure(own[who, name]) for who in ("AWQ", "MBQ"))]
            for name in names]  # fmt: skip
    return "\n".join([*table(["", "AWQ", "MBQ"], rows), "", *targets(found)])


def shared_scales() -> str:
    """What `bench/joint.py` found each weighting to leave to whom."""
    own, rows = by_name(read("joint")), []
    for way in ("unified maximum", "snr", "equal", "worst", "maxmin", "scales of its own"):
        places = (f"entrance, {projector} projector, 8 bits, {way}" for projector in ("fitted", "turned"))
        levels = [own[place, f"SQNR of {stream}"]["value"] for place in places for stream in ("image", "audio")]
        rows.append([way if " " in way else f"`{way}`", *(f"{level:.1f}" for level in levels)])
    return "\n".join(table(["8 bits", "fitted: pictures", "speech", "turned: pictures", "speech"], rows))


def settling() -> str:
    """When `bench/joint.py`'s observers settled, and on what."""
    own, rows = by_name(read("joint")), []
    for interval in (1, 10, 50):
        cells = [str(interval)]
        for stream in ("image", "audio"):
            seen = f"{stream}, interval {interval}"
            cells.append(f"{own[seen, 'steps, settled']['value']:.0f}")
            cells.append(f"{own[seen, 'settled scale, share of the greatest']['value']:.3f}")
        rows.append(cells)
    pictures = "pictures: steps until settled"
    return "\n".join(
        table(["steps between updates", pictures, "scale, of the greatest value's", "speech: steps", "scale"], rows)
    )


def first_layers() -> str:
    """What few bits save in first convolutions, and the noise of their outputs: `bench/first_layers.py`."""
    layers: dict[str, dict[str, list[float]]] = {}
    for entry in read("first_layers")["measures"]:
        layer = entry["subject"].partition(" bits")[0].rpartition(", ")[0]
        layers.setdefault(layer, {}).setdefault(entry["name"], []).append(entry["value"])
    rows = [
        [layer, *(f"{saved:.2g} %" for saved in own["bytes saved, share of the tower"])]
        + [f"{' / '.join(f'{level:.0f}' for level in own[f'output SQNR, {way}'])} dB" for way in ("clipped", "GPTQ")]
        for layer, own in layers.items()
    ]
    head = ["layer", "8 bits", "6 bits", "4 bits", "nearest, clipped, 8 / 6 / 4", "GPTQ, 8 / 6 / 4"]
    return "\n".join(table(head, rows))


HEARD = ("fp32", "encoder", "decoder", "convolutions")


def whisper() -> str:
    """Whisper-base under each quantizer, as `bench/whisper.py` found."""
    found = read("whisper")
    own, rows = by_name(found), []
    for subject in sorted(subjects(found), key=lambda subject: HEARD.index(subject.split()[0])):
        more = own.get((subject, "word error rate, more than fp32"))
        spread = f"{more['value']:.1f} ({more['lowest']:.1f} to {more['highest']:.1f})" if more else ""
        loss, noise = (own.get((subject, name)) for name in ("KL divergence, mean to 99 %", "encoder output SQNR"))
        cells = [f"{own[subject, 'word error rate']['value']:.1f}", spread.replace("-", "−")]
        cells += [f"{loss['value']:.4f}" if loss else "", f"{noise['value']:.1f} dB" if noise else ""]
        rows.append([subject, *cells])
    return "\n".join(table(["", "words wrong, %", "more than fp32", "KL divergence", "encoder"], rows))


OTHERS = ("fuzz", "steady", "forms", "vision_int8", "kv", "reduction")


def promises() -> str:
    """Targets of the benches that have no table of their own."""
    rows = [
        [f"{name}: {aim['name']}", *verdict(aim), found["when"][:10]]
        for name, found in ((name, read(name)) for name in OTHERS)
        for aim in found["targets"]
    ]
    return "\n".join(table(["", "wanted", "measured", "kept", "on"], rows))


MAKERS: dict[str, Callable[[], str]] = {
    "compression": compression,
    "few bits": few_bits,
    "weighing": weighing,
    "shared scales": shared_scales,
    "settling": settling,
    "first layers": first_layers,
    "whisper": whisper,
    "promises": promises,
}
