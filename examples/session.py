"""Ask a model about a picture from Python: one whole answer, then one that streams.

    python examples/session.py demo cup.png "What is this?"
    python examples/session.py BUNDLE PICTURE QUESTION
"""

from __future__ import annotations

import sys

from triptych import Session, TriptychError


def main(model: str, picture: str, question: str) -> None:
    with Session.open(model) as session:
        answer = session.ask(question, images=[picture], max_tokens=60)
        usage, timing = answer.usage, answer.timing
        print(answer.text)
        print(
            f"{usage.image_tokens} of {usage.prompt_tokens} prompt tokens were the picture's; "
            f"encoding it took {timing.encode_s:.2f} s, the first token {timing.prefill_s:.2f} s"
        )
        for piece in session.stream(question, images=[picture], max_tokens=60):  # now from the caches
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except TriptychError as error:
        sys.exit(f"error: {error}")
