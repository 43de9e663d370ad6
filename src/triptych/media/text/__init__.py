"""Chat template, tokenizer, incremental detokenizer, tools, guides."""

from triptych.media.text.calls import CallDelta, CallReader
from triptych.media.text.detokenize import Detokenizer
from triptych.media.text.guide import Guides
from triptych.media.text.stop import StopStrings
from triptych.media.text.tokens import Text, read_template
from triptych.media.text.tools import CallSyntax

__all__ = ["CallDelta", "CallReader", "CallSyntax", "Detokenizer", "Guides", "StopStrings", "Text", "read_template"]
