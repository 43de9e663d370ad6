"""Torch: slow, exact, the judge of the others.

Opens the checkpoint itself through transformers, fp32 and eager attention, behind the contracts of `backends/base`.
Nothing of the compiler is used, so that a mistake there cannot repeat itself here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import BLOCK_TOKENS, Array, Executable, PagedDecoder
from triptych.errors import BackendError, install

Tensors = dict[str, Any]  # torch's, by name


def check_known(folder: Path) -> None:
    """Raises BackendError when transformers does not know this kind of model; reads no weights."""
    import transformers

    try:
        transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (KeyError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise BackendError(
            f"transformers does not know the model in {folder}: {reason}", hint="`--verify graph` needs no transformers"
        ) from error


class Reference:
    """A checkpoint loaded into transformers. Raises BackendError without torch and transformers."""

    def __init__(self, model: Any, colours: Mapping[str, Any]) -> None:
        self.model = model  # a transformers model for generation
        self._colours = colours

    @classmethod
    def open(cls, folder: Path) -> Reference:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise BackendError(f"the reference: {error}", hint=install("reference")) from error
        config = json.loads((folder / "config.json").read_bytes())
        is_seeing = "vision_config" in config
        kind = transformers.AutoModelForImageTextToText if is_seeing else transformers.AutoModelForCausalLM
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True)
        _unpack(model)
        return cls(model.eval(), _colours(folder) if is_seeing else {})

    def part(self, part: Literal["vision", "projector"]) -> Executable:
        return _Part(self._vision if part == "vision" else self._projector)

    def decoder(self) -> PagedDecoder:
        """It recomputes every sequence whole in each call."""
        return _Decoder(self.model)

    def _vision(self, inputs: Tensors) -> Tensors:
        import torch

        mean, std = (torch.tensor(self._colours[key], dtype=torch.float32) for key in ("image_mean", "image_std"))
        pixels = ((inputs["pixels"].float() / 255.0 - mean) / std).permute(0, 3, 1, 2)
        core, config = self.model.model, self.model.config
        if hasattr(core, "vision_model"):  # Idefics3: the last layer, normed
            return {"features": core.vision_model(pixel_values=pixels).last_hidden_state}
        states = core.vision_tower(pixels, output_hidden_states=True).hidden_states
        layer = config.vision_feature_layer
        features = states[layer] if isinstance(layer, int) else torch.cat([states[index] for index in layer], dim=-1)
        return {"features": features[:, 1:] if config.vision_feature_select_strategy == "default" else features}

    def _projector(self, inputs: Tensors) -> Tensors:
        core = self.model.model
        if hasattr(core, "connector"):
            return {"embeddings": core.connector(inputs["features"])}
        found = {"embeddings": core.multi_modal_projector(inputs["features"])}
        return found | ({"extra": core.image_newline[None]} if hasattr(core, "image_newline") else {})


def _unpack(model: Any) -> None:
    """A model of compressed-tensors as plain numbers: its parts are called apart, and no twin rounds their inputs."""
    compressor = getattr(getattr(model, "hf_quantizer", None), "compressor", None)
    if compressor is not None:
        compressor.decompress_model(model)
        for module in model.modules():
            module.quantization_enabled = False


def _colours(folder: Path) -> dict[str, Any]:
    """image_mean and image_std, from the processor's own file."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_bytes())
            found = found.get("image_processor", found)
            if "image_mean" in found:
                return {"image_mean": found["image_mean"], "image_std": found["image_std"]}
    raise BackendError(f"{folder}: no file says how pixels are normalised", hint="add preprocessor_config.json")


class _Part:
    """Numpy in and out of a function of tensors."""

    def __init__(self, run: Callable[[Tensors], Tensors]) -> None:
        self._run = run

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        import torch

        with torch.inference_mode():
            found = self._run({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
            return {name: value.numpy().copy() for name, value in found.items()}

    def place(self) -> str:
        import torch
        import transformers

        return f"torch {torch.__version__}, transformers {transformers.__version__}, f32, eager"


class _Decoder(_Part):
    """Its pages hold what went in, embeddings and positions, in place of keys and values.

    A slot that was never written is not a number, and so are the logits of a step that reads it.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(self._step)
        self._model = model
        core = getattr(model, "model", model)
        self._text = getattr(core, "text_model", None) or getattr(core, "language_model", None) or core
        self._hidden = int(model.get_input_embeddings().weight.shape[1])
        self._embeddings: Any = None  # (num_blocks, 32, hidden)
        self._positions: Any = None  # (num_blocks, 32)

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * (4 * self._hidden + 8)

    def allocate(self, num_blocks: int) -> None:
        import torch

        if self._embeddings is not None:
            raise BackendError(f"the cache is already made: {len(self._embeddings):,} blocks")
        self._embeddings = torch.full((num_blocks, BLOCK_TOKENS, self._hidden), torch.nan)
        self._positions = torch.zeros((num_blocks, BLOCK_TOKENS), dtype=torch.int64)

    def _step(self, inputs: Tensors) -> Tensors:
        import torch

        if self._embeddings is None:
            raise BackendError("the cache was not made", hint="call `allocate` before the first step")
        begins, pages = inputs["subsequence_begins"].tolist(), inputs["block_indices_begins"].tolist()
        last = []
        for index, past in enumerate(inputs["past_lens"].tolist()):
            new = slice(begins[index], begins[index + 1])
            blocks = inputs["block_indices"][pages[index] : pages[index + 1]].long()
            places = torch.arange(past + new.stop - new.start)
            where = (blocks[places // BLOCK_TOKENS], places % BLOCK_TOKENS)
            fresh = tuple(part[past:] for part in where)
            self._embeddings[fresh] = inputs["embeddings"][new]
            self._positions[fresh] = inputs["position_ids"][new]
            last.append(self._sequence(self._embeddings[where], self._positions[where])[past:])
        hidden = torch.cat(last)[inputs["sampled"]]
        return {"logits": self._model.get_output_embeddings()(hidden)}

    def _sequence(self, embeddings: Any, positions: Any) -> Any:
        """The whole sequence through the text model: (T, hidden) normed states."""
        found = self._text(inputs_embeds=embeddings[None], position_ids=positions[None], use_cache=False)
        return found.last_hidden_state[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessed:
    """What transformers' own processor makes of a message: ids, (T,), and tiles, (N, size, size, 3) in 0 to 255."""

    input_ids: NDArray[np.int64]
    tiles: NDArray[np.float64]


def preprocess(folder: Path, question: str, images: Sequence[Any]) -> Preprocessed:
    """A user's pictures (PIL) and question. Raises BackendError where transformers cannot make the processor."""
    processor = _processor(folder)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    found = processor(images=list(images), text=[prompt], return_tensors="np")
    pixels = found["pixel_values"].reshape(-1, *found["pixel_values"].shape[-3:])
    real = pixels[(pixels != 0).reshape(len(pixels), -1).any(axis=1)]  # the others only fill up a batch
    colours = _colours(folder)
    mean, std = (np.array(colours[key], np.float64) for key in ("image_mean", "image_std"))
    tiles = (real.transpose(0, 2, 3, 1).astype(np.float64) * std + mean) * 255
    return Preprocessed(input_ids=np.asarray(found["input_ids"][0], np.int64), tiles=tiles)


def _processor(folder: Path) -> Any:
    """SmolVLM's differs from Idefics3's in video alone, and cannot be made without a library for video."""
    import transformers

    path = folder / "processor_config.json"
    is_smol = path.is_file() and json.loads(path.read_bytes()).get("processor_class") == "SmolVLMProcessor"
    kind = transformers.Idefics3Processor if is_smol else transformers.AutoProcessor
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except (ImportError, OSError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise BackendError(f"transformers cannot make this model's processor: {reason}") from error
