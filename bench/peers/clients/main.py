"""Run one client's cases inside its environment: `python main.py NAME URL MODEL OUT`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from peers.clients.case import Server, run  # noqa: E402

if __name__ == "__main__":
    name, url, model, out = sys.argv[1:]
    cases = importlib.import_module(f"peers.clients.{name}_cases").CASES
    Path(out).write_text(json.dumps(run(name, cases, Server(url=url, model=model))))
