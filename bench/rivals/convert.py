"""The same trained weights in every rival's own format. `install.py` runs this inside the environments it makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

GROUP = 64  # weights that share one scale in openvino-genai's int4, as in ours
LINEARS = ("_proj.weight", ".proj.weight", ".fc1.weight", ".fc2.weight")
BLOCK = 32  # as in onnxruntime-genai's int4: its kernels are written for 32


def folder(gguf: Path, target: Path) -> None:
    """The GGUF's weights, dequantized, as a Hugging Face folder that the exporters read. Needs transformers, torch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    model.config.rms_norm_eps = 1e-5  # the file's own figure, which the conversion rounds
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(str(target))
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(str(target))


def genai(source: Path, target: Path) -> None:
    """An OpenVINO model for openvino-genai: int4, all layers, one scale for 64 weights. Needs optimum-intel."""
    tool = Path(sys.executable).with_name("optimum-cli")
    task = ["--task", "text-generation-with-past", "--weight-format", "int4"]
    groups = ["--group-size", str(GROUP), "--ratio", "1.0"]
    subprocess.run([tool, "export", "openvino", "--model", source, *task, *groups, target], check=True)


def ort(source: Path, target: Path) -> None:
    """An ONNX model for onnxruntime-genai: int4 weights, int8 activations. Needs its model builder."""
    precision = ["-p", "int4", "-e", "cpu", "-c", target.with_name("ort-cache")]
    options = ["--extra_options", "int4_accuracy_level=4", f"int4_block_size={BLOCK}", "prune_lm_head=true"]
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", "smollm2"]
    subprocess.run([*builder, "-i", source, "-o", target, *precision, *options], check=True)


def vllm(source: Path, target: Path, kind: str = "int8") -> None:
    """A folder for vLLM, all in bf16, or the linears in int8, a scale a row, and activations in int8, a scale a token.

    SmolVLM's graph is called by its other name, Idefics3, whose processor needs nothing for video. Needs torch.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if kind == "int8" and name.endswith(LINEARS):
            scales = weight.abs().amax(1, keepdim=True) / 127
            weights[name] = (weight / scales).round().to(torch.int8)
            weights[f"{name}_scale"] = scales.to(torch.bfloat16)
        else:
            weights[name] = weight.to(torch.bfloat16)
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    if kind == "int8":
        eight = {"num_bits": 8, "type": "int", "symmetric": True}
        tokens = eight | {"strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": eight | {"strategy": "channel"}, "input_activations": tokens}
        facts = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
        config["quantization_config"] = facts | {"ignore": ["lm_head"], "config_groups": {"group_0": group}}
    target.mkdir()
    content = {"config.json": json.dumps(config, indent=1)}
    for beside in source.iterdir():
        if beside.suffix in (".json", ".jinja"):
            content.setdefault(beside.name, beside.read_text())
    for name, text in content.items():
        for ours, theirs in (("SmolVLM", "Idefics3"), ("smolvlm", "idefics3")) if "tokenizer" not in name else ():
            text = text.replace(ours, theirs)
        (target / name).write_text(text)
    save_file(weights, target / "model.safetensors", {"format": "pt"})


def nncf(source: Path, target: Path) -> None:
    """NNCF's best 4 bits: asymmetric, AWQ and scale estimation on `calibration.npy` of the source. Needs optimum-intel.

    `target` ends in the group's size. Embedding and head are int8, as NNCF has it by default.
    """
    import nncf as tool
    import numpy as np
    import openvino as ov

    exported = source.with_name("smollm2-dithered-ov")
    if not (exported / "openvino_model.xml").exists():
        task = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
        command = Path(sys.executable).with_name("optimum-cli")
        subprocess.run([command, "export", "openvino", "--model", source, *task, exported], check=True)
    model = ov.Core().read_model(exported / "openvino_model.xml")

    def inputs(ids: np.ndarray) -> dict[str, np.ndarray]:
        row = ids[None].astype(np.int64)
        every = {"input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(len(ids))[None]}
        every["beam_idx"] = np.zeros(1, np.int32)
        return {port.get_any_name(): every[port.get_any_name()] for port in model.inputs}

    windows = np.load(source / "calibration.npy")
    made = tool.compress_weights(
        model,
        mode=tool.CompressWeightsMode.INT4_ASYM,
        group_size=GROUP,
        ratio=1.0,
        dataset=tool.Dataset(list(windows), inputs),
        subset_size=len(windows),
        awq=True,
        scale_estimation=True,
    )
    target.mkdir()
    ov.save_model(made, target / "openvino_model.xml", compress_to_fp16=False)


def llama(source: Path, target: Path, kind: str = "Q4_0") -> None:
    """A GGUF file again in another type: Q4_0, for which llama.cpp has its fastest kernels. Needs llama-cpp-python."""
    import ctypes

    import llama_cpp

    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.allow_requantize = True
    settings.nthread = 2
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings))
    if failed:
        raise SystemExit(f"llama.cpp could not quantize {source}: {failed}")


def widened(source: Path, target: Path) -> None:
    """A quantized GGUF file's numbers in F16: its rounding without that of llama.cpp's kernels. Needs gguf."""
    import gguf
    import numpy as np

    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            kinds = field.types
            writer.add_key_value(field.name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        is_plain = tensor.tensor_type == gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32 if is_plain else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    conversion, source, target = sys.argv[1:]
    name, _, kind = conversion.partition(":")
    known = {"folder": folder, "genai": genai, "ort": ort, "llama": llama}
    known |= {"vllm": vllm, "nncf": nncf, "widened": widened}
    known[name](Path(source), Path(target), *([kind] if kind else []))
