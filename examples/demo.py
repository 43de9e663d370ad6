"""What `make demo` runs: assemble and open triptych-mini, serve it, ask it through OpenAI's client, and check.

Prints what was verified, bytes, the answers, time to first token and tokens a second. Exits 1 if an answer lacks the
word it must have.
"""

from __future__ import annotations

import base64
import sys
import time
from dataclasses import dataclass
from importlib.resources import files

from openai import OpenAI

from triptych import Session, TriptychError
from triptych.core.bundle import Manifest
from triptych.server.app import create_app
from triptych.server.run import background
from triptych.session import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """words: any of them makes the answer right."""

    text: str
    picture: str | None = None
    words: tuple[str, ...]


QUESTIONS = (
    Question(picture="apple.png", text="What is in the picture?", words=("apple",)),
    Question(picture="cat.jpg", text="What is in the picture?", words=("cat", "kitten")),
    Question(text="What is the capital of France?", words=("Paris",)),
)


def main() -> int:
    started_s = time.perf_counter()
    source = Source(model="demo", progress=Told())
    with Session.open(source) as session:
        opened_s = time.perf_counter()
        tell_bundle(session.manifest)
        with background(create_app(session)) as url:
            print(f"\nserving {session.name} on {url}, opened in {opened_s - started_s:.1f} s")
            for part, place in session.placements().items():
                print(f"  {part} runs on {place}")
            with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
                right = [ask(client, session.name, question) for question in QUESTIONS]
    print(f"\n{sum(right)} of {len(right)} answers are right; {time.perf_counter() - started_s:.1f} s in all")
    return 0 if all(right) else 1


class Told:
    """Progress, one line for each new thing."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, what: str, share: float) -> None:
        if what not in self._seen:
            self._seen.add(what)
            print(f"  {what} …", file=sys.stderr, flush=True)


def tell_bundle(manifest: Manifest) -> None:
    print(f"\n{manifest.name}: a {manifest.spec.family} model")
    for part in manifest.parts:
        print(f"  {part.name:<10} {part.precision:<5} {manifest.num_bytes(part) / 1e6:7.1f} MB")
    print("verified:")
    for evidence in manifest.evidence:
        gated = [one for one in evidence.measures if one.at_least is not None or one.at_most is not None]
        figures = ", ".join(f"{one.name} {one.value:.4g}" for one in gated)
        print(f"  {evidence.subject:<10} against {evidence.twin}: {figures}")


def ask(client: OpenAI, model: str, question: Question) -> bool:
    content = [{"type": "text", "text": question.text}]
    if question.picture is not None:
        data = (files("triptych") / "data" / "demo" / question.picture).read_bytes()
        kind = "png" if question.picture.endswith("png") else "jpeg"
        url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    print(f"\n{f'[{question.picture}] ' if question.picture else ''}{question.text}")
    answer = ""
    began_s = time.perf_counter()
    first_s = None
    usage = None
    print("  ", end="")
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        if piece and first_s is None:
            first_s = time.perf_counter() - began_s
        answer += piece
        print(piece, end="", flush=True)
    took_s = time.perf_counter() - began_s
    is_right = any(word.lower() in answer.lower() for word in question.words)
    speed = (usage.completion_tokens - 1) / (took_s - first_s) if first_s and usage and took_s > first_s else 0.0
    tokens = f"{usage.prompt_tokens} tokens in, {usage.completion_tokens} out, " if usage else ""
    print(f"\n  ({tokens}first after {first_s or 0:.2f} s, {speed:.0f} tokens/s)")
    if not is_right:
        print(f"  WRONG: none of {', '.join(question.words)} is in it", file=sys.stderr)
    return is_right


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TriptychError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
