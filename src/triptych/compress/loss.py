"""What compression costs: answers of the fp32 model held against the compressed one's, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.compress.model import TOWERS, Changed, Model
from triptych.compress.samples import Sample
from triptych.core.bundle import Evidence, Measure
from triptych.core.spec import Modality
from triptych.errors import GateError

TWIN = "the same model in fp32, in torch"
MEAN = "KL divergence, mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Of each judged token: its KL divergence in nats, whether the likeliest token stayed, and how much less likely
    the answer's own token became (nats); and whether it answers a picture.
    """

    divergence: NDArray[np.float64]
    same_top: NDArray[np.bool_]
    surprise: NDArray[np.float64]
    sees_media: NDArray[np.bool_]

    def measures(self, most: float | None = None) -> tuple[Measure, ...]:
        """In the words of a bundle's evidence; `most` is the gate on the mean divergence."""
        found = [
            Measure(name=MEAN, value=float(self.divergence.mean()), at_most=most),
            Measure(name="KL divergence, median", value=float(np.median(self.divergence))),
            Measure(name="KL divergence, 99 %", value=float(np.quantile(self.divergence, 0.99))),
            Measure(name="same likeliest token, %", value=100 * float(self.same_top.mean())),
            Measure(name="perplexity ratio", value=float(np.exp(self.surprise.mean()))),
        ]
        if self.sees_media.any() and not self.sees_media.all():
            after = self.divergence[self.sees_media]
            found.append(Measure(name="KL divergence after pictures, mean", value=float(after.mean())))
            same = 100 * float(self.same_top[self.sees_media].mean())
            found.append(Measure(name="same likeliest token after pictures, %", value=same))
        return tuple(found)


class Judge:
    """Holds the fp32 model's log-probabilities on samples; `model` is whatever is put into it."""

    def __init__(self, model: Model, samples: Sequence[Sample]) -> None:
        self._model = model
        self.samples = [sample for sample in samples if len(sample.judged)]
        model.use({})
        self._exact = [self._logprobs(sample) for sample in self.samples]

    @property
    def fed(self) -> str:
        tokens = sum(len(sample.judged) for sample in self.samples)
        pictures = sum(sample.has_media for sample in self.samples)
        return f"{tokens:,} answer tokens of {len(self.samples)} samples, {pictures} with pictures"

    def judge(self, changed: Changed) -> Losses:
        """With these tensors in their place. They stay there."""
        self._model.use(changed)
        sees = changed.keys() <= set(TOWERS)  # then a sample without pictures meets nothing that was changed
        found = [
            self._compare(sample, exact, exact if sees and not sample.has_media else self._logprobs(sample))
            for sample, exact in zip(self.samples, self._exact, strict=True)
        ]
        return Losses(
            divergence=np.concatenate([each.divergence for each in found]),
            same_top=np.concatenate([each.same_top for each in found]),
            surprise=np.concatenate([each.surprise for each in found]),
            sees_media=np.concatenate([each.sees_media for each in found]),
        )

    def _logprobs(self, sample: Sample) -> Tensor:
        with torch.no_grad():
            return torch.log_softmax(self._model.logits(sample), -1)

    def _compare(self, sample: Sample, exact: Tensor, tested: Tensor) -> Losses:
        own = torch.from_numpy(sample.token_ids[sample.judged + 1].astype(np.int64))[:, None]
        nats, same_top = divergence(exact, tested)
        seen = np.maximum.accumulate(sample.modality != Modality.TEXT)[sample.judged]
        return Losses(
            divergence=nats,
            same_top=same_top,
            surprise=(exact.gather(1, own) - tested.gather(1, own))[:, 0].double().numpy(),
            sees_media=seen,
        )


def divergence(exact: Tensor, tested: Tensor) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Of each row of log-probabilities: the KL divergence in nats, and whether the likeliest token stayed."""
    nats = torch.nn.functional.kl_div(tested, exact, reduction="none", log_target=True).sum(-1).clamp(min=0)
    return nats.double().numpy(), (tested.argmax(-1) == exact.argmax(-1)).numpy()


def unmet(samples: Iterable[Sample], parts: Iterable[str]) -> list[str]:
    """The towers among `parts` where no sample that is judged has media: what they cost cannot be measured."""
    is_shown = any(sample.has_media and len(sample.judged) for sample in samples)
    return [part for part in parts if part in TOWERS and not is_shown]


def measure(judge: Judge, changed: Changed, *, fed: str, max_kld: float | None = None) -> tuple[Evidence, ...]:
    """The whole, then each part alone; there is no evidence of one that is `unmet`. `fed`: what the samples are, in
    words.

    Raises GateError when the whole's mean divergence is over `max_kld`, naming the part that alone costs most.
    """
    whole = judge.judge(changed)
    blind = unmet(judge.samples, changed)
    parts = {part: judge.judge({part: own}) for part, own in changed.items() if own and part not in blind}
    words = f"{judge.fed}, {fed}"
    found = [Evidence(subject="whole", twin=TWIN, inputs=words, measures=whole.measures(max_kld))]
    found += [
        Evidence(subject=part, twin=TWIN, inputs=f"{words}; this part alone compressed", measures=own.measures())
        for part, own in parts.items()
    ]
    lost = float(whole.divergence.mean())
    if max_kld is not None and not lost <= max_kld:
        worst = max(parts, key=lambda part: float(parts[part].divergence.mean()))
        alone = float(parts[worst].divergence.mean())
        raise GateError(
            f"the mean KL divergence is {lost:.4g}, the gate {max_kld:g}; the {worst} alone costs {alone:.4g}",
            hint=f"give the {worst} more bits or smaller groups in a recipe of your own, or raise --max-kld",
        )
    return tuple(found)
