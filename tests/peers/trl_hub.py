"""What TRL's tests take from the hub, made here: tiny models, their tokenizers and a few prompts,
under the same names.

transformers and datasets read a folder where one has the name that they are given: with these in
the working folder nothing asks the network. Shapes and weights are not the hub's, and the
tokenizers split into bytes: a test that has the ids of a real vocabulary in it fails, with whatever
trainer it runs.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OWNER = "trl-internal-testing"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
# pad, end of text, begin of text; then what the chat templates and the tests name
SPECIAL = (
    "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|finetune_right_pad_id|>", "<|begin_of_text|>",
    "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<tool_call>", "</tool_call>",
    "<think>", "</think>",
)  # fmt: skip
VOCAB = len(BYTES) + len(SPECIAL)
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": len(BYTES),
    "eos_token_id": len(BYTES) + 1, "bos_token_id": len(BYTES) + 4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
# name on the hub -> the class of its configuration, its fields
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2Config", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3Config", {"head_dim": 8}),
    "tiny-LlamaForCausalLM-3.2": ("LlamaConfig", {}),
    "tiny-MistralForCausalLM-0.2": ("MistralConfig", {}),
    "tiny-Gemma2ForCausalLM": ("Gemma2Config", {"head_dim": 8}),
    "tiny-Cohere2ForCausalLM": ("Cohere2Config",
        {"logit_scale": 0.125, "tie_word_embeddings": True}),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4}),
    "tiny-GptOssForCausalLM": ("GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "tiny-Glm4MoeForCausalLM": ("Glm4MoeConfig",
        {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "tiny-NemotronHForCausalLM-nano": ("NemotronHConfig", {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": 4,
        "head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 4, "ssm_state_size": 8,
        "n_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    }),
}  # fmt: skip
REWARD = {
    f"tiny-{family}ForSequenceClassification{more}": f"{family}Config"
    for family, more in (("Qwen2", "-2.5"), ("Qwen3", ""), ("Llama", "-3.2"))
}
TEMPLATES = {
    "Qwen3": "qwen3", "Llama": "llama3_2", "Cohere2": "cohere2", "GptOss": "gptoss",
    "Glm4Moe": "glm4moe",
}  # fmt: skip
KINDS = (
    "prompt_only", "language_modeling", "prompt_completion", "preference",
    "implicit_prompt_preference", "unpaired_preference",
)  # fmt: skip
PROMPTS = (
    "Short is better than", "What is plain is", "Nested code is", "An error should never",
    "If it is hard", "Now is",
)  # fmt: skip


def make(folder: Path) -> None:
    """Writes all of it under `folder`."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    owner = folder / OWNER
    for name, (config, fields) in CAUSAL.items():
        _write(owner / name, config, fields, transformers.AutoModelForCausalLM)
    classes = transformers.AutoModelForSequenceClassification
    for name, config in REWARD.items():
        _write(owner / name, config, {"num_labels": 1}, classes)
    _remote(owner)
    _texts(owner / "zen")


def _write(folder: Path, config_class: str, fields: dict[str, Any], auto: Any) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**BASE, **fields})
    auto.from_config(config).save_pretrained(folder)
    tokenizer(folder.name).save_pretrained(folder)


def tokenizer(model: str) -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens; with the chat template of the model's family, which TRL brings
    along."""
    core = Tokenizer(models.BPE({x: i for i, x in enumerate(BYTES)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[1], bos_token=SPECIAL[4],
        padding_side="left",
    )  # fmt: skip
    families = (t for start, t in TEMPLATES.items() if model.startswith(f"tiny-{start}"))
    template = f"{next(families, 'qwen2_5')}.jinja"
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / template).read_text()
    return made


def _remote(owner: Path) -> None:
    """A model whose class is in its own folder."""
    folder = owner / "tiny-RemoteForCausalLM"
    _write(folder, "Qwen2Config", {}, transformers.AutoModelForCausalLM)
    (folder / "modeling.py").write_text(
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n\n\n"
        'class RemoteConfig(Qwen2Config):\n    model_type = "remote"\n\n\n'
        "class RemoteForCausalLM(Qwen2ForCausalLM):\n    config_class = RemoteConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling.RemoteConfig",
        "AutoModelForCausalLM": "modeling.RemoteForCausalLM",
    }
    config |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))


def _texts(folder: Path) -> None:
    """Prompts and answers, as text and as conversations, 4 to train on and 2 to test with."""
    folder.mkdir(parents=True)
    configurations = []
    for style, kind in product(("standard", "conversational"), KINDS):
        name = f"{style}_{kind}"
        for split, texts in {"train": PROMPTS[:4], "test": PROMPTS[4:]}.items():
            lines = [json.dumps(_line(kind, x, i, style)) for i, x in enumerate(texts)]
            (folder / f"{name}-{split}.jsonl").write_text("\n".join(lines))
        files = "".join(f"  - split: {s}\n    path: {name}-{s}.jsonl\n" for s in ("train", "test"))
        configurations.append(f"- config_name: {name}\n  data_files:\n{files}")
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(configurations)}---\n")


def _line(kind: str, prompt: str, place: int, style: str) -> dict[str, Any]:
    """A line of a data set of that `kind`, as TRL's documentation names them."""

    def said(*texts: str, by: tuple[str, ...] = ("assistant",)) -> Any:
        if style == "standard":
            return "".join(texts)
        return [{"role": role, "content": x} for role, x in zip(by, texts, strict=True)]

    both, asked = ("user", "assistant"), said(prompt, by=("user",))
    good, bad = f" long{'er' * place}.", " ugly."
    if kind == "prompt_only":
        return {"prompt": asked}
    if kind == "language_modeling":
        name = "text" if style == "standard" else "messages"
        return {name: said(prompt, good, by=both)}
    if kind == "prompt_completion":
        return {"prompt": asked, "completion": said(good)}
    if kind == "preference":
        return {"prompt": asked, "chosen": said(good), "rejected": said(bad)}
    if kind == "implicit_prompt_preference":
        return {"chosen": said(prompt, good, by=both), "rejected": said(prompt, bad, by=both)}
    is_good = place % 2 == 0
    return {"prompt": asked, "completion": said(good if is_good else bad), "label": is_good}
