"""GRPO on GSM8K with a Qwen3 model: TRL's trainer, loss and training step by grpo_kernels.

    python examples/gsm8k_trl.py                                              # one GPU
    python examples/gsm8k_trl.py --use_peft --lora_r 16 --learning_rate 1e-5  # LoRA
    python examples/gsm8k_trl.py --use_vllm --vllm_mode colocate              # completions by vLLM
    accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/gsm8k_trl.py
    accelerate launch --config_file examples/accelerate/zero3.yaml examples/gsm8k_trl.py
    python examples/gsm8k_trl.py --resume                                     # after a break
    python examples/gsm8k_trl.py --model_name_or_path DIR --dataset_name DIR  # offline
    python examples/gsm8k_trl.py --smoke                                      # ten steps, on a CPU

TRL comes with `pip install '.[trl]'`; LoRA needs peft, vLLM `pip install 'trl[vllm]'`. With `pip
install math-verify` the reward reads an answer, the last in \\boxed{} or after ####, as
mathematics; without it as a number. On a CPU add --use_cpu True --bf16 False. Every option of TRL's
GRPOConfig and ModelConfig is an option here: --model_name_or_path, --max_steps, --report_to wandb
or tensorboard; --help lists them. A server for --vllm_mode server is started first, on other GPUs:

    VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B \\
        --weight-transfer-config '{"backend": "nccl"}' \\
        --logprobs-mode processed_logprobs --max-logprobs -1

The accuracy before and after is that of one completion a problem, sampled at the temperature of the
training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gsm8k import (
    Options,
    exact_match,
    model_arguments,
    parse,
    problems,
    smoke_model,
    train_and_evaluate,
)
from trl import GRPOConfig

from grpo_kernels.trl import FusedGRPOTrainer

DEFAULTS = {"output_dir": "out/gsm8k", "num_generations": 8, "num_generations_eval": 1}
SMOKE = {
    "output_dir": "out/gsm8k-smoke",
    "num_generations_eval": 8,
    "per_device_eval_batch_size": 24,
}


@dataclass
class StepOptions(Options):
    """The library's options besides (docs/skipped-work.md). Losses and gradients stay TRL's with
    all of them."""

    layout: str = field(default="tree", metadata={"choices": ["tree", "trim", "padded"]})
    zero_advantage: str = field(default="score", metadata={"choices": ["score", "skip", "train"]})


def main() -> None:
    options, args, model = parse(__doc__, StepOptions, GRPOConfig, DEFAULTS, SMOKE)
    if options.smoke:
        model.model_name_or_path = smoke_model(
            Path(args.output_dir) / "model", hidden_size=32, seed=0
        )
    data = problems(options)
    trainer = FusedGRPOTrainer(
        args=args,
        reward_funcs=exact_match,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        layout=options.layout,
        zero_advantage=options.zero_advantage,
        **model_arguments(model),
    )
    train_and_evaluate(trainer, options, {"eval_reward": "accuracy"})


if __name__ == "__main__":
    main()
