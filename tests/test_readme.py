"""README.md: every block of it run as it is written, its two losses compared with each other.

Names of models and data sets are replaced by tiny local ones, and TRL is told to use the CPU;
nothing else.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCK.findall(TEXT) if language == "python"]


def test_links_lead_to_files_of_the_checkout() -> None:
    """An image stands on a line of its own, so that whoever shows no images can leave it out."""
    for target in re.findall(r"\[[^\]]*\]\(([^)]+)\)", TEXT):
        assert "://" not in target
        assert (ROOT / target.partition("#")[0]).exists(), target
    assert all(
        re.fullmatch(r"!\[[^\]]+\]\([^)]+\)", line) for line in TEXT.splitlines() if "![" in line
    )


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    transformers = pytest.importorskip("transformers")
    from benchmarks import tiny_models

    folder = tmp_path_factory.mktemp("readme")
    transformers.set_seed(0)
    tiny_models.model().save_pretrained(folder / "model")
    tiny_models.tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text('{"prompt": "w1 w2 w3"}\n')
    return {"Qwen/Qwen3-0.6B": str(folder / "model"), "trl-lib/tldr": str(folder / "data")}


def run(code, local, names=None):
    names = {"__name__": "readme"} if names is None else names
    for name, place in local.items():
        code = code.replace(f'"{name}"', repr(place))
    assert "Qwen" not in code
    exec(compile(code, "README.md", "exec"), names)
    return names


STOCK = """
from datasets import load_dataset
from trl import GRPOTrainer

data = load_dataset("trl-lib/tldr", split="train")
trainer = GRPOTrainer(
    "Qwen/Qwen3-0.6B", lambda completions, **_: [0.0] * len(completions), train_dataset=data
)
trainer.train()
"""


def test_the_changed_import_trains_with_our_trainer(local, tmp_path, monkeypatch):
    for needed in ("trl", "datasets", "transformers"):
        pytest.importorskip(needed)
    from trl.trainer import grpo_trainer

    from grpo_kernels.trl import FusedGRPOTrainer

    monkeypatch.chdir(tmp_path)
    on_cpu = functools.partial(grpo_trainer.GRPOConfig, use_cpu=True)
    monkeypatch.setattr(grpo_trainer, "GRPOConfig", on_cpu)
    (diff,) = (code for language, code in BLOCK.findall(TEXT) if language == "diff")
    old, new = diff.splitlines()
    assert (old[0], new[0]) == ("-", "+") and old[1:] in STOCK
    names = run(STOCK.replace(old[1:], new[1:]), local)
    assert type(names["trainer"]) is FusedGRPOTrainer
    # a step for each epoch of the one prompt
    assert (tmp_path / "model-GRPO" / "checkpoint-3").is_dir()
    assert "tokens/computed" in names["trainer"].state.log_history[0]


@pytest.mark.parametrize("adapted", [False, True], ids=["whole model", "PEFT LoRA"])
def test_before_and_after_have_the_same_loss_and_gradients(local, adapted):
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(local["Qwen/Qwen3-0.6B"], dtype=torch.float64)
    if adapted:
        peft = pytest.importorskip("peft")
        fields = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
        config = peft.LoraConfig(r=4, **fields)
        model = peft.get_peft_model(model, config).to(torch.float64)
    gen = torch.Generator().manual_seed(0)
    input_ids = torch.randint(3, model.config.vocab_size, (4, 12), generator=gen)
    attention_mask = torch.ones(4, 12, dtype=torch.long)
    attention_mask[0, :3] = attention_mask[1, 10:] = attention_mask[3, 8:] = 0
    names: dict[str, Any] = {
        "model": model, "input_ids": input_ids, "attention_mask": attention_mask, "T": 5,
        "completion_mask": attention_mask[:, -5:], "torch": torch,
        "advantages": torch.tensor([1.0, -0.5, 0.0, 0.3]),
    }  # fmt: skip
    after, before = PYTHON
    parameters = [x for x in model.parameters() if x.requires_grad]
    names["old"] = torch.zeros(4, 5)
    run(before, local, names)
    noise = 0.3 * torch.randn(4, 5, generator=gen)
    names["old"] = names["logps"].detach() + noise
    found = []
    for block in (before, after):
        loss = run(block, local, names)["loss"]
        found.append([loss.detach().double(), *torch.autograd.grad(loss, parameters)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-8)
