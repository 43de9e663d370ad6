"""Chat template, tokenizer, incremental detokenizer."""

from triptych.media.text.detokenize import Detokenizer
from triptych.media.text.stop import StopStrings
from triptych.media.text.tokens import Text, read_template

__all__ = ["Detokenizer", "StopStrings", "Text", "read_template"]
