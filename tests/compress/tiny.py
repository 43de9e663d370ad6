"""A tiny decoder in torch, with tokens of two modalities, for tests of calibration and of the loss."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as op

from numpy_decoder import random_weights, spec_of
from triptych.backends.torch_graph import TorchPart
from triptych.compile import decoder
from triptych.compile.graph import Store, named, parameter
from triptych.compress.model import Model
from triptych.compress.samples import Sample
from triptych.core.spec import Modality


def model(**changed: object) -> Model:
    spec = spec_of(**changed)
    weights = random_weights(spec)
    part = TorchPart(decoder.build(spec, weights.__getitem__, Store("fp32")))
    return Model({"decoder": part}, weights["embed_tokens.weight"].__getitem__)


def seeing() -> Model:
    """Its vision tower is one kernel, `stem`, over tiles of 4 × 4 pixels; nothing reads what that makes."""
    pixels = parameter("pixels", [-1, 4, 4, 3], ov.Type.u8)
    image = op.transpose(op.convert(pixels, "f32"), op.constant(np.array([0, 3, 1, 2])))
    kernel = np.ones((2, 3, 3, 3), np.float32)
    x = op.convolution(image, Store("fp32").weight("stem", kernel), [1, 1], [0, 0], [0, 0], [1, 1])
    vision = TorchPart(ov.Model([op.result(named(x, "features"))], [pixels], "vision"))
    return Model({"vision": vision, "projector": vision}, np.empty(0).__getitem__)


def sample(seed: int = 0, num_tokens: int = 12) -> Sample:
    """Its last four tokens are the answer. It has no tiles, so what it shows is said by `modality` alone."""
    rng = np.random.default_rng(seed)
    return Sample(
        name=f"sample {seed}",
        token_ids=rng.integers(0, 50, num_tokens).astype(np.int32),
        embeddings=np.empty((num_tokens, 0), np.float32),
        modality=np.full(num_tokens, Modality.TEXT, np.uint8),
        is_answer=np.arange(num_tokens) >= num_tokens - 4,
        tiles=np.empty((0, 4, 4, 3), np.uint8),
        rows=np.empty(0, np.int32),
    )
