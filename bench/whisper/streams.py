"""Two encoders before one decoder: triptych-mini's rows of pictures, Whisper's rows of speech, SmolLM2 reading both.

The pictures' projector is the one that triptych-mini was trained with. Nobody has trained one for speech: `fitted` is
a ridge regression from Whisper's frames to the decoder's own embeddings of the words spoken then (spread evenly over a
piece), `turned` a random rotation, which keeps the encoder's own loudness and outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from triptych.backends.torch_graph import Hooks, TorchPart
from triptych.compile.assemble import compile_checkpoint
from triptych.compile.config import CompileConfig, fingerprint
from triptych.compile.mini import assemble
from triptych.compress.samples import Sample, builtin
from triptych.core.bundle import MANIFEST, Bundle, open_bundle
from triptych.core.spec import Modality
from triptych.core.table import Table, open_table
from triptych.session.calibration import prepare
from triptych.session.opening import CACHE

FRAMES_A_ROW = 4  # of the encoder's 50 a second
FRAMES_A_SECOND = 50
RIDGE = 1e-3  # of the frames' mean square
ASK = "<|im_start|>user\n", "\nRepeat what was said.<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """One piece of sound: the encoder's frames (n, 512) while it lasts, and its words."""

    frames: Tensor
    text: str

    @property
    def rows(self) -> Tensor:
        """A mean of every four frames."""
        count = len(self.frames) // FRAMES_A_ROW
        return self.frames[: count * FRAMES_A_ROW].reshape(count, FRAMES_A_ROW, -1).mean(1)


class Reader:
    """SmolLM2 in fp32 with gradients, and triptych-mini's samples as it reads them."""

    def __init__(self) -> None:
        bundle = _in_fp32()
        self.part = TorchPart.open(bundle.file("decoder.xml"))
        self.table: Table = open_table(bundle.file("embedding.npy"))
        self.words = Tokenizer.from_file(str(bundle.file("tokenizer.json")))
        found = prepare(bundle, builtin(), lambda what, share: None)
        self.samples: list[Sample] = [sample for sample in found if (sample.modality == Modality.IMAGE).any()]

    def embedded(self, text: str) -> tuple[Tensor, list[int]]:
        ids = self.words.encode(text, add_special_tokens=False).ids
        return torch.from_numpy(np.array(self.table(np.array(ids, np.int32)))), ids

    def image_rows(self) -> list[Tensor]:
        """Of each sample, the projector's rows."""
        return [torch.from_numpy(one.embeddings[one.modality == Modality.IMAGE]) for one in self.samples]

    def fitted(self, speech: Sequence[Speech]) -> Tensor:
        """(512, hidden): least squares from the mean frame of a word's time to its embedding."""
        heard, said = [], []
        for piece in speech:
            embeddings, ids = self.embedded(piece.text)
            edges = np.linspace(0, len(piece.frames), len(ids) + 1).round().astype(int)
            heard += [
                piece.frames[start : max(end, start + 1)].mean(0) for start, end in zip(edges, edges[1:], strict=False)
            ]
            said.append(embeddings)
        x, y = torch.stack(heard), torch.cat(said)
        gram = x.T @ x
        return torch.linalg.solve(gram + RIDGE * gram.diagonal().mean() * len(x) ** 0.5 * torch.eye(len(gram)), x.T @ y)

    def of_image(self, sample: Sample, hooks: Hooks | None = None) -> tuple[Tensor, Tensor]:
        """The answer's loss, its gradient at the picture's rows."""
        shown = torch.from_numpy(sample.modality == Modality.IMAGE)
        return self._pulled(torch.from_numpy(sample.embeddings), shown, (sample.token_ids, sample.judged), hooks)

    def of_speech(self, piece: Speech, projector: Tensor, hooks: Hooks | None = None) -> tuple[Tensor, Tensor]:
        """The loss of the piece's own words after its rows, and its gradient at them."""
        before, after, end = (self.embedded(text) for text in ASK)
        said, rows = self.embedded(piece.text), piece.rows @ projector
        embeddings = torch.cat([before[0], rows, after[0], said[0], end[0]])
        ids = np.array([*before[1], *[0] * len(rows), *after[1], *said[1], *end[1]])
        start = len(before[0]) + len(rows) + len(after[0])
        shown = torch.zeros(len(ids), dtype=torch.bool)
        shown[len(before[0]) : len(before[0]) + len(rows)] = True
        return self._pulled(embeddings, shown, (ids, np.arange(start - 1, len(ids) - 1)), hooks)

    def _pulled(
        self, embeddings: Tensor, shown: Tensor, answer: tuple[np.ndarray, np.ndarray], hooks: Hooks | None
    ) -> tuple[Tensor, Tensor]:
        ids, judged = answer
        embeddings = embeddings.clone().requires_grad_()
        arrays = {"embeddings": embeddings, "position_ids": np.arange(len(ids)), "sampled": judged}
        logits = self.part(arrays, hooks)["logits"]
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[judged + 1]).long())
        (gradient,) = torch.autograd.grad(loss, embeddings)
        return loss.detach(), gradient[shown]


def turned(width: int, hidden: int) -> Tensor:
    """(width, hidden) with orthonormal rows."""
    return torch.linalg.qr(torch.randn(hidden, width, generator=torch.Generator().manual_seed(0)))[0].T


def _in_fp32() -> Bundle:
    """Where `triptych compress` keeps it too."""
    source, config = assemble(CACHE), CompileConfig(weights="fp32")
    target = CACHE / "bundles" / f"{source.name}-fp32-{fingerprint(source, config)[:16]}"
    return open_bundle(target) if (target / MANIFEST).is_file() else compile_checkpoint(source, target, config)
