"""README.md: every block of it run as it is written, and its plain loop held against full logits.

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

from grpo_kernels import GRPOLoss

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCK.findall(TEXT) if language == "python"]
SHELL = [
    line
    for language, code in BLOCK.findall(TEXT)
    if language != "python"
    for line in code.splitlines()
    if line
]


def test_shell_blocks_name_what_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in SHELL:
        words = line.partition("#")[0].split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
        elif words[:2] == ["python", "-m"]:
            assert (ROOT / words[2] / "__main__.py").exists(), line
        else:
            assert words[:2] == ["pip", "install"], line
            extra = re.search(r"\[(\w+)\]", line)
            assert extra is None or f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text(), (
                line
            )


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
    """The names in the blocks, each with what stands in for it."""
    transformers = pytest.importorskip("transformers")
    from benchmarks import tiny_models

    folder = tmp_path_factory.mktemp("readme")
    transformers.set_seed(0)
    tiny_models.model().save_pretrained(folder / "model")
    tiny_models.tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text('{"prompt": "w1 w2 w3"}\n')
    return {"Qwen/Qwen3-0.6B": str(folder / "model"), "trl-lib/tldr": str(folder / "data")}


def run(
    blocks: list[str], local: dict[str, str], names: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Execute the blocks in order; what they have defined."""
    names = {"__name__": "readme"} if names is None else names
    for code in blocks:
        for name, place in local.items():
            code = code.replace(f'"{name}"', repr(place))
        assert "Qwen" not in code
        exec(compile(code, "README.md", "exec"), names)
    return names


def test_every_block_runs_as_it_is_written(
    local: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of them, in order, each with the names of those before it."""
    for needed in ("trl", "datasets", "transformers"):
        pytest.importorskip(needed)
    from trl.trainer import grpo_trainer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        grpo_trainer, "GRPOConfig", functools.partial(grpo_trainer.GRPOConfig, use_cpu=True)
    )
    assert len(PYTHON) == 2
    run(PYTHON, local)
    # a step for each epoch of the one prompt
    assert (tmp_path / "model-GRPO" / "checkpoint-3").is_dir()
    assert capsys.readouterr().out.count("reward ") >= 2


def loop_block() -> tuple[str, str]:
    """What loads the model, and the loop."""
    code = next(code for code in PYTHON if "for step in" in code)
    load, marker, loop = code.partition("prompts = ")
    return load, marker + loop


def full_logits_loss(
    names: dict[str, Any], model: Any, loss_fn: GRPOLoss
) -> tuple[Any, torch.Tensor]:
    """Loss and log-probabilities of the last batch from all logits, each sequence alone and without
    padding."""
    ids, attended, counted = (names[x] for x in ("input_ids", "attention", "completion_mask"))
    advantages = names["group_advantages"](names["rewards"], num_generations=8)
    logps = torch.zeros(counted.shape)
    for row in range(len(ids)):
        kept = attended[row].bool()
        sequence, length = ids[row][kept], int(counted[row].sum())
        scored = model(input_ids=sequence[None]).logits[0, -length - 1 : -1].log_softmax(-1)
        logps = logps.index_put(
            (torch.tensor(row), torch.arange(length)),
            scored.gather(1, sequence[-length:, None])[:, 0],
        )
    ratio = (logps - logps.detach()).exp() * counted
    return -(ratio * advantages[:, None]).sum() / counted.sum(), logps


@pytest.mark.parametrize("adapted", [False, True], ids=["whole model", "PEFT LoRA"])
def test_plain_loop_is_right_with_left_padding(local: dict[str, str], adapted: bool) -> None:
    """Log-probabilities, loss and gradients of its last step are those of full logits of sequences
    without padding."""
    load, loop = loop_block()
    names = run([load], local)
    if adapted:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(
            target_modules=["q_proj", "down_proj"], init_lora_weights=False, r=4
        )
        names["model"] = peft.get_peft_model(names["model"], config)
    before: dict[str, torch.Tensor] = {}

    class Kept(torch.optim.AdamW):  # the weights that the last gradient is of
        def step(self, *given: Any) -> Any:
            before.update({k: x.detach().clone() for k, x in names["model"].state_dict().items()})
            return super().step(*given)

    original, torch.optim.AdamW = torch.optim.AdamW, Kept
    try:
        run([loop], local, names)
    finally:
        torch.optim.AdamW = original
    model, out = names["model"], names["out"]
    padded = names["attention"][:, 0] == 0
    assert padded.any() and not padded.all(), "expected prompts of different lengths"
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    got = {name: x.grad for name, x in trained.items()}
    model.load_state_dict(before)
    loss, logps = full_logits_loss(names, model, names["loss_fn"])
    torch.testing.assert_close(out.logps, logps.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out.loss.detach(), loss.detach(), atol=1e-6, rtol=1e-5)
    wanted = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    assert any(x is not None and x.abs().max() > 0 for x in wanted)
    for (name, grad), want in zip(got.items(), wanted, strict=True):
        if want is None:
            assert grad is None, name
        else:
            torch.testing.assert_close(grad, want, atol=1e-6, rtol=1e-3, msg=name)
