"""Ask a model about a picture from Python: one whole answer, then one that streams.

    python examples/session.py                      # the demo's model and one of its pictures
    python examples/session.py BUNDLE PICTURE
"""

from __future__ import annotations

import sys
from pathlib import Path

from triptych import Session, TriptychError


def main(model: str, picture: Path) -> None:
    with Session.open(model) as session:
        answer = session.ask("What is this?", images=[picture], max_tokens=40)
        print(answer.text)
        print(f"({answer.usage.image_tokens} of {answer.usage.prompt_tokens} prompt tokens are the picture's)")

        for piece in session.stream("Name three fruits.", max_tokens=40):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    model, picture = (*sys.argv[1:], "demo", "examples/cup.png")[:2] if len(sys.argv) < 3 else sys.argv[1:3]
    try:
        main(model, Path(picture))
    except TriptychError as error:
        sys.exit(f"error: {error}")
