"""A checkpoint in, a verified bundle out."""

from __future__ import annotations

import hashlib
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import openvino as ov

from triptych.compile import parts
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.config import TABLE_TYPES, Choice, CompileConfig, files_of
from triptych.compile.families import family_of
from triptych.compile.families.layout import Layout
from triptych.compile.families.tokens import json_file
from triptych.compile.graph import Store
from triptych.compile.join import join
from triptych.compile.verify import Candidate, Twin, Verification, check_reference, need_reference, prompts_for
from triptych.core.bundle import (
    COMPRESSION,
    SCHEMA_VERSION,
    Bundle,
    Compression,
    Evidence,
    Manifest,
    Part,
    Precision,
    Step,
    describe,
    digest_file,
    write_bundle,
)
from triptych.core.progress import Progress, silent
from triptych.core.quantized import Quantized, digest, plain
from triptych.core.spec import Modality, ModelSpec
from triptych.core.table import fits_table, open_table, write_int8_table
from triptych.errors import CheckpointError, ConfigError, GateError
from triptych.media.text import Text, read_template

COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def compile_checkpoint(source: Path, target: Path, config: CompileConfig, progress: Progress | None = None) -> Bundle:
    """Write the bundle of `source` at `target`, in one step and only when every gate is met.

    Raises CheckpointError, ConfigError, BundleError, and GateError when a part is not equal enough to its twin.
    """
    if config.verify == "reference":
        need_reference(source)
    checkpoint = Checkpoint.open(source)
    family = family_of(checkpoint)
    spec = family.read_spec(checkpoint)
    _check_parts(config, spec)
    _check_untouched(checkpoint, family.layout(checkpoint, spec))
    weights = family.weights(checkpoint, spec)
    work = Assembly(checkpoint, spec, weights, config, progress or silent)
    return write_bundle(target, work.fill)


class Assembly:
    """One compilation: what has been made so far, and what was refused."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, weights: parts.Weights, config: CompileConfig, progress: Progress
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._weights = weights
        self._config = config
        self._progress = progress
        self._made: dict[str, Part] = {}
        self._chosen: dict[str, Choice] = {}
        self._evidence: dict[str, tuple[Evidence, ...]] = {}
        self._refused: dict[tuple[str, Choice], str] = {}  # with the reason
        self._compression = _compression(checkpoint.folder)

    def fill(self, folder: Path) -> Manifest:
        """Write all files into `folder`. Raises GateError."""
        began = time.monotonic()
        write_text(self._checkpoint.folder, folder)
        self._write_statistics(folder)
        self._made["embedding"] = self._write_table(folder)
        text = self._text(folder)
        twin = Twin(spec=self._spec, weights=self._weights)
        verification = Verification(twin, prompts_for(self._spec, text), open_table(folder / "embedding.npy"))
        while not self._is_proved(verification, folder):
            pass
        if self._config.verify == "reference":
            self._progress("the whole against transformers", 0.0)
            self._evidence["reference"] = check_reference(self._checkpoint.folder, verification, text)
            self._progress("the whole against transformers", 1.0)
        return self._manifest(folder, time.monotonic() - began)

    def _text(self, folder: Path) -> Text:
        placeholder = None if self._spec.image is None else self._spec.image.placeholder
        return Text.open(folder, eos_ids=self._spec.eos_ids, placeholder=placeholder)

    def _is_proved(self, verification: Verification, folder: Path) -> bool:
        """Compile every part and prove the whole. False when one part's precision was given up; raises if none is."""
        for part in parts.names(self._spec):
            self._compile(part, verification, folder)
        self._progress("the whole", 0.0)
        try:
            self._evidence["whole"] = verification.check_whole()
        except GateError as error:
            self._give_up_one(error)
            return False
        self._progress("the whole", 1.0)
        return True

    def _compile(self, part: parts.PartName, verification: Verification, folder: Path) -> None:
        """The smallest precision that passes. Raises GateError when the last one is refused."""
        left = [choice for choice in self._choices(part) if (part, choice) not in self._refused]
        if part in self._evidence and self._chosen[part] == left[0]:
            return  # it passed before another part was given up
        for precision in left:
            self._progress(f"{part} {_in(precision)}", 0.0)
            candidate = self._build(part, precision, folder)
            self._progress(f"{part} {_in(precision)}", 0.5)
            try:
                self._evidence[part] = verification.check_part(candidate)
            except GateError as error:
                if precision == left[-1]:
                    raise
                self._refused[part, precision] = error.message
                continue
            finally:
                self._progress(f"{part} {_in(precision)}", 1.0)
            return

    def _choices(self, part: str) -> tuple[Choice, ...]:
        if self._checkpoint.is_compressed and self._config.is_free(part):
            return ("stored",)
        stored = str(plain(self._weights["decoder"]("norm.weight")).dtype)
        return self._config.candidates(part, "fp16" if stored == "float16" else "bf16")

    def _build(self, part: parts.PartName, choice: Choice, folder: Path) -> Candidate:
        store = Store(choice, group_size=self._config.group_size, transcribes=self._config.is_free(part))
        model = parts.build(part, self._spec, self._weights, store)
        if part == "decoder" and choice != "fp32":  # which `compress` reads weight by weight
            join(model)
        path = folder / f"{part}.xml"
        ov.save_model(model, path, compress_to_fp16=False)
        self._made[part] = Part(
            name=part,
            modality=Modality.TEXT if part == "decoder" else Modality.IMAGE,
            precision=store.told,
            fallbacks=tuple(store.fallbacks) + (self._checkpoint.remarks if part == "decoder" else ()),
            files=(path.name, path.with_suffix(".bin").name),
            inputs=tuple(port.get_any_name() for port in model.inputs),
            outputs=tuple(port.get_any_name() for port in model.outputs),
            num_parameters=store.num_parameters,
        )
        self._chosen[part] = choice
        return Candidate(
            part=part,
            precision=store.told,
            path=path,
            is_free=len(self._choices(part)) > 1,
            is_exact=choice == "stored" and not store.num_rounded,
        )

    def _give_up_one(self, error: GateError) -> None:
        """Refuse the coarsest precision that was our choice; raises `error` when nothing finer is left to choose."""
        chosen = self._chosen
        free = [part for part in chosen if self._choices(part)[-1] != chosen[part]]
        if not free:
            raise error
        worst = min(free, key=lambda part: self._choices(part).index(chosen[part]))
        self._refused[worst, chosen[worst]] = f"{worst} {_in(chosen[worst])}: {error.message}"

    def _write_table(self, folder: Path) -> Part:
        """The token embeddings, row by row as they are stored unless another type was asked for."""
        table = self._weights["decoder"]("embed_tokens.weight")
        asked = self._config.parts.get("embedding")
        if asked is None and isinstance(table, Quantized) and fits_table(table):
            precision: Precision = "int8"
            write_int8_table(folder / "embedding.npy", table)
        else:
            numbers = plain(table)
            precision = asked or TABLE_TYPES.get(str(numbers.dtype), "fp32")
            kinds = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
            held = np.asarray(numbers, kinds[precision])
            if not np.isfinite(held).all():
                raise CheckpointError(f"the token embeddings are not all finite in {precision}")
            np.save(folder / "embedding.npy", held.view(np.uint16) if precision == "bf16" else held)
        return Part(
            name="embedding",
            modality=Modality.TEXT,
            precision=precision,
            files=("embedding.npy",),
            inputs=("token_ids",),
            outputs=("embeddings",),
            num_parameters=int(np.prod(table.shape)),
        )

    def _write_statistics(self, folder: Path) -> None:
        """What the policy of the KV cache was measured by, where it needs any."""
        policy = self._compression.kv_policy if self._compression else None
        if policy is not None and policy.statistics:
            path = self._checkpoint.folder / policy.statistics
            if Path(policy.statistics).name != policy.statistics or not path.is_file():
                raise CheckpointError(f"{path} is missing, which {COMPRESSION} names", hint="compress the model again")
            shutil.copyfile(path, folder / path.name)

    def _manifest(self, folder: Path, seconds: float) -> Manifest:
        made = tuple(self._told(part) for part in self._made.values())
        files = tuple(describe(path, root=folder) for path in sorted(folder.iterdir()))
        held = {name for part in made for name in part.files}
        weights_digest = _joined(file.sha256 for file in files if file.path in held)
        done = self._compression
        metrics = {"seconds": seconds} | {f"refused {part} {choice}": 1.0 for part, choice in self._refused}
        return Manifest(
            schema_version=SCHEMA_VERSION,
            name=str(self._checkpoint.config.get("triptych_name", self._checkpoint.folder.absolute().name)),
            spec=self._spec,
            parts=made,
            files=files,
            weights_digest=weights_digest,
            evidence=tuple(one for found in self._evidence.values() for one in found) + (done.evidence if done else ()),
            history=(
                *((done.step,) if done else ()),
                Step(
                    stage="compile",
                    version=version("triptych"),
                    inputs_digest=_joined(digest_file(path) for path in files_of(self._checkpoint.folder)),
                    outputs_digest=weights_digest,
                    metrics=metrics,
                ),
            ),
            kv_policy=done.kv_policy if done else None,
            generation=_generation(self._checkpoint),
        )

    def _told(self, part: Part) -> Part:
        """The part with what was tried before it."""
        tried = (f"{choice} was refused: {why}" for (name, choice), why in self._refused.items() if name == part.name)
        return msgspec.structs.replace(part, fallbacks=(*part.fallbacks, *tried))


def _in(choice: Choice) -> str:
    return "as stored" if choice == "stored" else f"in {choice}"


def _compression(folder: Path) -> Compression | None:
    """What `compress` says that it did to this folder. Raises CheckpointError."""
    path = folder / COMPRESSION
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Compression)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: {error}", hint="compress the model again with this version") from error


def _check_untouched(checkpoint: Checkpoint, layout: Layout) -> None:
    """Raises CheckpointError, part and tensor named, where a compressed folder is not as `compress` wrote it."""
    told = _compression(checkpoint.folder)
    owners = {at: part for part, own in layout.parts.items() for at in own.values()}
    for name, wanted in (told.digests if told else {}).items():
        where = f"{owners.get(name, 'unused')}: "
        try:
            found = digest(checkpoint.held(name))
        except CheckpointError as error:
            raise CheckpointError(where + error.message, hint=error.hint) from error
        if found != wanted:
            raise CheckpointError(
                f"{where}{name} is not as `triptych compress` wrote it, and measured it",
                hint=f"compress the model again; without {COMPRESSION} the folder is taken for another program's",
            )


def write_text(source: Path, folder: Path) -> None:
    """The tokenizer's files and the chat template, wherever the checkpoint keeps it. Raises CheckpointError."""
    if not (source / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{source} has no tokenizer.json",
            hint='convert its tokenizer once: python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{source}').save_pretrained('{source}')\"",
        )
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    template = read_template(source)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _generation(checkpoint: Checkpoint) -> dict[str, float]:
    """The checkpoint's default sampling; a file that says nothing, or says `do_sample: false`, changes nothing."""
    found = json_file(checkpoint, "generation_config.json") or {}
    if found.get("do_sample") is False:
        return {}
    numbers = {name: found[name] for name in SAMPLING if isinstance(found.get(name), int | float)}
    return {name: float(value) for name, value in numbers.items()}


def _check_parts(config: CompileConfig, spec: ModelSpec) -> None:
    for part in config.parts:
        if part not in (*parts.names(spec), "embedding"):
            raise ConfigError(
                f"parts names {part}, which this {spec.family} model does not have",
                hint=f"it has {', '.join(parts.names(spec))} and embedding",
            )


def _joined(digests: Any) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()
