"""`python -m grpo_kernels estimate`: products counted by hand, and lengths of a real run."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_kernels.__main__ import main

HEAD, BODY = 151_936 * 4096, 6_945_767_424  # of Qwen3-8B


def estimated(capsys: pytest.CaptureFixture[str], arguments: str, *paths: object) -> dict[str, Any]:
    assert main(["estimate", "--json", *arguments.split(), *map(str, paths)]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], arguments: str, *paths: object) -> str:
    with pytest.raises(SystemExit, match="2"):
        main(["estimate", *arguments.split(), *map(str, paths)])
    return capsys.readouterr().err


def written(folder: Path, rows: list[Any], name: str = "samples.jsonl") -> Path:
    lines = (json.dumps(x, ensure_ascii=False) for x in rows)
    (folder / name).write_text("\n".join(lines), encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("vllm", [False, True])
def test_gain_and_factors_are_the_products_counted_by_hand(vllm, tmp_path, capsys):
    lengths = [1024, 444, *[438] * 6]  # 512 in the mean
    samples = written(tmp_path, [{"prompt": 256, "completion": x} for x in lengths])
    given = "--lora --equal 0.5 --generation 0.25" + (" --vllm" if vllm else "")
    result = estimated(capsys, f"{given} --samples", samples)
    padded, own, once = 8 * 1280, 8 * (256 + 512), 256 + 8 * 512
    counted = HEAD * 8 * 512
    costs = [
        2 * (2 + vllm) * BODY * padded + (6 + 2 * vllm) * counted,
        2 * (2 + vllm) * BODY * own + (6 + 2 * vllm) * counted,
        2 * (2 + vllm) * BODY * once + (6 + 2 * vllm) * counted,
        2 * 2 * BODY * once + 6 * counted,
        2 * 1.5 * BODY * once + 4 * counted,
        2 * 1.5 * BODY * once + 3 * counted,
    ]
    by_hand = [a / b for a, b in itertools.pairwise(costs)]
    assert result["note"].startswith("Computed from counts of matrix products, not measured.")
    assert [*result["factors"]] == ["padding", "prompts", "scoring", "groups", "head"]
    assert [*result["factors"].values()] == pytest.approx(by_hand)
    gain = costs[0] / costs[-1]
    assert result["gain"] == pytest.approx(gain)
    assert result["gain_whole_step"] == pytest.approx(1 / (0.25 + 0.75 / gain))


def test_a_kl_term_needs_every_backward_and_a_second_iteration_saves_scoring(capsys):
    given = "--prompt 99 --completion 50 --equal 0.9 --beta 0.04 --iterations 2"
    factors = estimated(capsys, given)["factors"]
    assert factors["groups"] == 1
    assert factors["scoring"] == pytest.approx(8 / 7, rel=0.01)


def test_lengths_and_rewards_of_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two batches of two groups; a row of a third batch is left out."""
    rewards = [1, 1, 0, 1, 0, 0, 0.5, 0.5, 0]
    rows = [{"prompt": [5] * 3, "completion": 2 + i, "reward": x} for i, x in enumerate(rewards)]
    rows[0]["text"] = "a line\u2028separator"
    given = "--group 2 --batch 2 --accumulate 2 --samples"
    samples = written(tmp_path, rows)
    samples.write_text(samples.read_text("utf-8"), "utf-8-sig")  # as Windows' editors write it
    lengths = estimated(capsys, given, samples)["lengths"]
    expected = {"batches": 2, "prompt": 3, "longest_prompt": 3, "completion": 5.5, "longest": 7}
    assert lengths == expected | {"equal": 0.75}


def test_lengths_of_a_log_and_of_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import tiny_models

    names = MEAN, "completions/max_length", "frac_reward_zero_std"
    steps = [dict(zip(names, x, strict=True)) for x in ((5.0, 8.0, 0.25), (7.0, 9.0, 0.75))]
    log = written(tmp_path, [{"log_history": [{"loss": 1.0}, *steps, EMPTY]}], "state.json")
    lengths = estimated(capsys, "--prompt 4 --log", log)["lengths"]
    expected = {"batches": 2, "completion": 6.0, "longest": 8.5, "equal": 0.5}
    assert {name: lengths[name] for name in expected} == expected
    tiny_models.tokenizer().save_pretrained(tmp_path)
    samples = written(tmp_path, [{"prompt": "w1 w2 w3", "completion": "w1 w5"}] * 8)
    lengths = estimated(capsys, "--tokenizer", tmp_path, "--samples", samples)["lengths"]
    assert (lengths["prompt"], lengths["completion"]) == (3, 2)


MIXTURE = {
    "model_type": "qwen3_moe", "vocab_size": 500, "hidden_size": 16, "num_hidden_layers": 2,
    "intermediate_size": 99, "moe_intermediate_size": 8, "num_experts": 8,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def test_a_model_is_read_from_its_config(tmp_path, capsys):
    pytest.importorskip("transformers")
    given = "--prompt 256 --completion 512,0.8 --model"
    written(tmp_path, [MIXTURE], "config.json")
    attention = 16 * 16 + 2 * 16 * 8 + 16 * 16
    body = 2 * (attention + 8 * 16 + 2 * 3 * 16 * 8)  # two of eight experts, and their router
    assert estimated(capsys, given, tmp_path)["model"]["body"] == body
    written(tmp_path, [MIXTURE | {"hidden_act": "none of torch's"}], "config.json")
    assert "or a model whose config.json can be" in refused(capsys, given, tmp_path)


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "commands.md").read_text()
    [(arguments, shown)] = re.findall(
        r"^\$ python -m grpo_kernels (estimate [^\n]*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    )
    assert main(arguments.split()) == 0
    assert capsys.readouterr().out == shown


LENGTHS, ROW = "--prompt 256 --completion 512", {"prompt": 1, "completion": 1}
STATE, MEAN = "--log: expected a trainer_state.json", "completions/mean_length"
EMPTY = {MEAN: 0.0, "completions/max_length": 0.0, "frac_reward_zero_std": 1.0}
ODD = {"log_history": [3, {**EMPTY, MEAN: "x"}], "train_batch_size": "x"}
NO_LOGS: tuple[Any, ...] = ({}, [], ODD, {"log_history": {}}, {"log_history": [{MEAN: 5.0}]})
NO_LOGS += ({"log_history": [EMPTY]},)
MESSAGE = {"role": "user", "content": "two words"}


@pytest.mark.parametrize(
    ("arguments", "rows", "message"),
    [
        (f"{LENGTHS} --beta nan", [], "--beta: expected a finite number >= 0, got nan"),
        (f"{LENGTHS} --tokenizer x", [], "--tokenizer: not used with --completion"),
        (f"{LENGTHS} --max-completion 9", [], "at least the mean of --completion, 512, got 9"),
        ("--prompt 9 --samples FILE", [ROW] * 8, "--prompt: not used with --samples"),
        ("--equal 0.5 --samples FILE", [ROW | {"reward": 1}] * 8, "--equal: expected none with"),
        ("--equal 0.5 --prompt 9 --log FILE", {}, "--equal: not used with --log"),
        ("--samples FILE", [{**ROW, "prompt": [MESSAGE]}] * 8, "prompt: expected a number of tok"),
        ("--prompt 256", [], "one of the arguments --completion --samples --log is required"),
        ("--completion 512,x", [], "--completion: invalid mean_and_variation value: '512,x'"),
        (f"{LENGTHS} --batch 6", [], "expected a multiple or a divisor of --group"),
        ("--samples FILE", [ROW] * 7, "expected at least 8 completions, got 7"),
        ("--samples FILE", [{"prompt": 1}] * 8, "line 1: completion: expected a number of tokens"),
        ("--samples FILE", [ROW | {"reward": 1}, *[ROW] * 7], "a reward in every line or in none"),
        ("--samples FILE", [ROW | {"reward": [1.0]}] * 8, "reward: expected a number, got '[1.0]'"),
        *(("--prompt 9 --log FILE", [x], f"{STATE} that has {MEAN}") for x in NO_LOGS),
    ],
)
def test_wrong_arguments_say_what_was_expected(arguments, rows, message, tmp_path, capsys):
    file = written(tmp_path, rows)
    assert message in refused(capsys, arguments.replace("FILE", str(file)))
