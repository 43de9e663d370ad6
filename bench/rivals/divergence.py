"""What a rival's rounding costs: its logits on held-out tokens against the reference's, by the one function for all.

usage: divergence.py nncf|llama MODEL WINDOWS.npy REFERENCE.f32 OUT.json        (inside the rival's own environment)

WINDOWS: (num_windows, tokens) ids. REFERENCE: fp32 logits (num_windows, scored, vocab) of the second half's every
other token, where llama.cpp's own measure begins too. Both runtimes read each window whole, in one sequence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from compression.figures import divergence

NUM_THREADS = 2
Logits = Callable[[NDArray[np.int32]], NDArray[np.float32]]  # (tokens,) → (tokens, vocab)


def scored(num_tokens: int) -> slice:
    """The rows of a window that are compared."""
    return slice(num_tokens // 2, num_tokens - 1, 2)


def nncf(model: Path, precision: str = "f32") -> Logits:
    """An OpenVINO model with a state, as optimum exports it; weights decompressed into f32 arithmetic."""
    import openvino as ov

    hints = {"INFERENCE_PRECISION_HINT": precision, "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": "f32"}
    compiled = ov.Core().compile_model(
        model / "openvino_model.xml", "CPU", hints | {"INFERENCE_NUM_THREADS": NUM_THREADS}
    )
    request = compiled.create_infer_request()
    names = {port.get_any_name() for port in compiled.inputs}

    def logits(ids: NDArray[np.int32]) -> NDArray[np.float32]:
        request.reset_state()
        row = ids[None].astype(np.int64)
        inputs = {"input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(len(ids))[None]}
        inputs["beam_idx"] = np.zeros(1, np.int32)
        return np.asarray(request.infer({name: inputs[name] for name in names})["logits"][0])

    return logits


def llama(model: Path) -> Logits:
    """llama.cpp, all rows of a window in one batch. Its CPU kernels round activations to 8 bits; there is no switch."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 512
    settings.n_threads = settings.n_threads_batch = NUM_THREADS
    settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
    settings.flash_attn_type = 0
    context = llama_cpp.llama_init_from_model(loaded, settings)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
    batch = llama_cpp.llama_batch_init(512, 0, 1)

    def logits(ids: NDArray[np.int32]) -> NDArray[np.float32]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = int(token), i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if failed := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode: {failed}")
        rows = llama_cpp.llama_get_logits(context)
        return np.ctypeslib.as_array(rows, shape=(len(ids), vocab)).copy()

    return logits


def compare(logits: Logits, windows: NDArray[np.int32], reference: Path) -> dict[str, Any]:
    """Each row's divergence and whether its top token is the reference's."""
    rows = scored(windows.shape[1])
    expected = np.memmap(reference, np.float32, "r").reshape(
        len(windows), len(range(*rows.indices(windows.shape[1]))), -1
    )
    klds, tops = [], []
    for ids, wanted in zip(windows, expected, strict=True):
        kld, same = divergence(wanted, logits(ids)[rows])
        klds += [float(value) for value in kld]
        tops += [bool(value) for value in same]
    return {"kld": klds, "same": tops}


def main() -> None:
    runtime, model, windows, reference, out = sys.argv[1:]
    logits = {"nncf": nncf, "llama": llama}[runtime](Path(model))
    found = compare(logits, np.load(windows), Path(reference))
    found["version"] = version({"nncf": "openvino", "llama": "llama_cpp_python"}[runtime])
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
