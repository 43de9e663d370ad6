"""Talk to a Triptych server with OpenAI's own client: a chat, a picture, a stream, several answers, an error.

triptych serve demo                              # in one terminal
python examples/openai_client.py                 # in another; pip install openai
python examples/openai_client.py --url http://127.0.0.1:8000 --image picture.png
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
from pathlib import Path

from openai import BadRequestError, OpenAI

PICTURE = Path(__file__).parents[1] / "src/triptych/data/demo/apple.png"


def data_uri(path: Path) -> str:
    """A picture travels inside the request: a server reads no addresses unless its operator allows them."""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def main(url: str, key: str, picture: Path) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Name three fruits."}], max_tokens=40, temperature=0
    )
    print("chat:   ", answer.choices[0].message.content)

    question = [
        {"type": "image_url", "image_url": {"url": data_uri(picture)}},
        {"type": "text", "text": "What is in the picture?"},
    ]
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=40, temperature=0
    )
    print("picture:", answer.choices[0].message.content)
    print("usage:  ", answer.usage.model_dump())

    print("stream:  ", end="")
    for chunk in client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=40, temperature=0, stream=True
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    several = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Pick a colour."}], n=3, seed=7, temperature=1, max_tokens=12
    )
    print("several:", [choice.message.content for choice in several.choices])

    try:
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "hi"}], extra_body={"max_token": 3}
        )
    except BadRequestError as error:
        print("error:  ", error.body["message"] if isinstance(error.body, dict) else error)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--image", type=Path, default=PICTURE)
    given = parser.parse_args()
    main(given.url, given.api_key, given.image)
