"""Two steps of TRL's trainer, stock or ours, with a colocated vLLM, on a CPU."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
import trl.generation.vllm_generation as generation
import vllm._custom_ops
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from vllm import SamplingParams

from grpo_kernels.trl import FusedGRPOTrainer
from tests.vllm.engine import CHATS, KEPT

TRUNCATED = {"top_p": 0.9, "top_k": KEPT}


def as_on_a_cpu() -> None:
    """Give TRL's engine what TRL has no option for: fp32, and no compiler."""
    vllm._custom_ops._supports_onednn = False  # packed weights could not be loaded again
    more = {"enforce_eager": True, "dtype": "float32", "max_logprobs": KEPT}
    generation.LLM = functools.partial(generation.LLM, **more)


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Completions with the sets that the sampler kept, from its log-probabilities."""
    tokenizer = trainer.processing_class
    texts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    most = trainer.args.max_completion_length
    params = SamplingParams(max_tokens=most, logprobs=KEPT, **TRUNCATED)
    asked = [{"prompt_token_ids": ids} for ids in prompt_ids]
    requests = trainer.vllm_generation.llm.generate(asked, params, use_tqdm=False)
    found = [request.outputs[0] for request in requests]
    drawn = [zip(x.logprobs, x.token_ids, strict=True) for x in found]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [[*x.token_ids] for x in found],
        "logprobs": [[token[i].logprob for token, i in tokens] for tokens in drawn],
        "sampling_mask": [[*map(kept, x.logprobs)] for x in found],
    }


def kept(token: Any) -> list[int]:
    return [i for i, x in token.items() if x.logprob > -float("inf")]


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(x[0]["content"]) % 7) for x in completions]


def counted(trainer: Any) -> list[bool]:
    """Return a list that gets True for each scoring without gradient, False for a loss."""
    found, score = [], trainer._get_per_token_logps_and_entropies

    def counting(*args: Any, **kwargs: Any) -> Any:
        found.append(not torch.is_grad_enabled())
        return score(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = counting
    return found


def train(kind: str, model: str, *, truncated: bool = False, sets: bool = False) -> dict[str, Any]:
    """What TRL's trainer logs in two steps, and how often it scores; `kind` is stock or ours. The
    sampler truncates by top-p and top-k, or hands over its `sets`, to ours."""
    as_on_a_cpu()
    base: Any = GRPOTrainer if kind == "stock" else FusedGRPOTrainer
    more: dict[str, Any] = {"rollout_func": rollout, "on_missing_set": "error"} if sets else {}
    if kind == "ours":  # stated, since `counted` replaces a method that could need the scores
        more["fused_sampling_correction"] = True
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=256,
            vllm_gpu_memory_utilization=0.3, per_device_train_batch_size=4, num_generations=4,
            max_completion_length=24, max_steps=2, logging_steps=1, report_to="none",
            save_strategy="no", learning_rate=1e-5, bf16=False, use_cpu=True,
            gradient_checkpointing=False, seed=3, disable_tqdm=True,
            **(TRUNCATED if truncated else {}),
        )  # fmt: skip
        given = {"reward_funcs": reward, "train_dataset": Dataset.from_dict({"prompt": CHATS})}
        trainer = base(model=model, args=args, **given, **more)
        scored = counted(trainer)
        trainer.train()
    logs = [x for x in trainer.state.log_history if "loss" in x]
    return {"logs": logs, "scored": sum(scored), "losses": len(scored) - sum(scored)}
