"""The bare decoder off its 4-bit grid: our rounding beside NNCF's and llama.cpp's, on the same held-out tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
RIVALS = ROOT / ".rivals"
MODELS = RIVALS / "models"
DITHERED = MODELS / "smollm2-dithered-hf"
NUM_PARAMETERS = 134_515_008  # embedding and head are one matrix
HEAD, HEAD_BITS = 49_152 * 576, 8 + 16 / 576


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """One decoder in few bits. weights: the file whose bytes count, or several."""

    name: str
    runtime: str  # nncf, llama, or ours with its arithmetic
    model: Path
    weights: tuple[Path, ...]
    remark: str = ""

    @property
    def bits(self) -> float:
        """Of storage a parameter, all told: scales, zero points, embedding and head."""
        return 8 * sum(path.stat().st_size for path in self.weights) / NUM_PARAMETERS

    @property
    def layer_bits(self) -> float | None:
        """The same of the layers' matrices alone, for those whose head is int8 with a scale a row."""
        if self.runtime == "llama":
            return None
        return (self.bits * NUM_PARAMETERS - HEAD_BITS * HEAD) / (NUM_PARAMETERS - HEAD)


def rivals() -> list[Rounded]:
    """Those that stand; `bench/rivals/install.py compression` makes them."""
    floor = "the same numbers, unrounded: that both read them alike"
    found = [_gguf("F16", "", floor)]
    for name in ("Q8_0", "Q4_K_M", "Q4_0"):
        suffix = f"-{name.lower()}"
        found.append(_gguf(name, suffix, "as it runs: activations in 8 bits"))
        alone = MODELS / f"smollm2-dithered{suffix}-widened.gguf"
        if alone.exists():
            remark = "its numbers widened to F16: the weights' loss alone"
            found.append(replace(found[-1], name=f"llama.cpp {name}, weights alone", model=alone, remark=remark))
    folder = MODELS / "smollm2-dithered-nncf-int4"
    weights = (folder / "openvino_model.bin",)
    found.append(
        Rounded(name="NNCF int4, weights alone", runtime="nncf", model=folder, weights=weights,
                remark="asymmetric, groups of 64, AWQ and scale estimation; embedding and head int8; f32 arithmetic")
    )  # fmt: skip
    return [each for each in found if all(path.exists() for path in each.weights)]


def _gguf(name: str, suffix: str, remark: str) -> Rounded:
    path = MODELS / f"smollm2-dithered{suffix}.gguf"
    return Rounded(name=f"llama.cpp {name}", runtime="llama", model=path, weights=(path,), remark=remark)


def ours(recipe: str, bundle: Path) -> list[Rounded]:
    """A bundle of the same checkpoint, twice. Head and token table are one matrix: the table is not counted again."""
    alone = Rounded(
        name=f"triptych {recipe}, weights alone",
        runtime="ours float",
        model=bundle,
        weights=(bundle / "decoder.bin",),
        remark="f32 arithmetic",
    )
    served = replace(
        alone, name=f"triptych {recipe}", runtime="ours auto", remark="as it runs: bf16, activations in 8 bits"
    )
    return [served, alone]


def samples() -> Path:
    """What the model said when let run (`texts.py`), as conversations that `triptych compress --calibrate` reads."""
    from tokenizers import Tokenizer

    path, tokenizer = DITHERED / "calibration.jsonl", Tokenizer.from_file(str(DITHERED / "tokenizer.json"))
    lines = []
    for ids in np.load(DITHERED / "calibration.npy"):
        asked, said = (tokenizer.decode([int(token) for token in part]) for part in (ids[:64], ids[64:]))
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": messages}, ensure_ascii=False))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_reference(bundle: Path, windows: NDArray[np.int32], target: Path) -> None:
    """fp32 logits of the scored rows, (num_windows, scored, vocab) f32."""
    scratch = target.with_suffix(".part")
    with scratch.open("wb") as file:
        for logits in _plain(bundle, windows, "float"):
            file.write(np.ascontiguousarray(logits, np.float32).tobytes())
    scratch.rename(target)


def compare_ours(bundle: Path, windows: NDArray[np.int32], reference: Path, compute: str) -> dict[str, Any]:
    """As `rivals/divergence.compare`; `compute` float shows the weights' loss alone."""
    from compression.figures import divergence

    expected = np.memmap(reference, np.float32, "r").reshape(len(windows), -1, _vocab(bundle))
    klds: list[float] = []
    tops: list[bool] = []
    for wanted, logits in zip(expected, _plain(bundle, windows, compute), strict=True):
        kld, same = divergence(wanted, logits)
        klds += [float(value) for value in kld]
        tops += [bool(value) for value in same]
    return {"kld": klds, "same": tops}


def compare(rival: Rounded, windows: Path, reference: Path, out: Path) -> dict[str, Any]:
    """In the rival's own environment; ours here."""
    if rival.runtime.startswith("ours"):
        compute = rival.runtime.partition(" ")[2]
        found = compare_ours(rival.model, np.load(windows), reference, compute)
        out.write_text(json.dumps(found))
        return found
    python = RIVALS / {"nncf": "export", "llama": "llama"}[rival.runtime] / "bin" / "python"
    script = ROOT / "rivals" / "divergence.py"
    with out.with_suffix(".log").open("w") as log:
        command = [python, script, rival.runtime, rival.model, windows, reference, out]
        if subprocess.run(command, stdout=log, stderr=log).returncode:
            raise SystemExit(f"{rival.name} failed, see {log.name}")
    found = json.loads(out.read_text())
    return found


def _plain(bundle: Path, windows: NDArray[np.int32], compute: Any) -> Any:
    """Each window's logits on its scored rows."""
    from rivals.divergence import scored

    from triptych.backends.base import Placement
    from triptych.backends.ov import open_plain_decoder
    from triptych.core.table import open_table

    decoder = open_plain_decoder(bundle / "decoder.xml", Placement(device="cpu:0", compute=compute, num_threads=2))
    table = open_table(bundle / "embedding.npy")
    rows = np.arange(windows.shape[1])[scored(windows.shape[1])]
    for ids in windows:
        arrays = {"embeddings": table(ids), "position_ids": np.arange(len(ids)), "sampled": rows}
        yield decoder(arrays)["logits"]


def _vocab(bundle: Path) -> int:
    from triptych.core.bundle import open_bundle

    return open_bundle(bundle).manifest.spec.decoder.vocab_size


if __name__ == "__main__":
    sys.exit("run bench/compression.py")
