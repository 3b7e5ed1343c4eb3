"""On-policy distillation on GSM8K with TRL's trainer: a Qwen3 model learns from a larger one.

    python examples/distill.py                                              # one GPU
    python examples/distill.py --use_peft --lora_r 16 --learning_rate 1e-4  # LoRA
    python examples/distill.py --use_vllm --vllm_mode colocate              # completions by vLLM
    accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/distill.py
    accelerate launch --config_file examples/accelerate/zero3.yaml examples/distill.py
    python examples/distill.py --resume                                     # after a break
    python examples/distill.py --smoke                                      # ten steps, on a CPU

The trainer is FusedDistillationTrainer: of TRL's trainers that distill on-policy,
DistillationTrainer alone is not experimental, and it generates with vLLM too. Its loss is the
divergence over the whole vocabulary: the reverse KL, or with --beta 0 the forward KL. Every option
of TRL's DistillationConfig and ModelConfig is an option here: --model_name_or_path,
--teacher_model_name_or_path, --max_steps, --report_to wandb or tensorboard; --help lists them. The
teacher has to have the student's vocabulary. What to install, and the server for --vllm_mode
server, are as for gsm8k_trl.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gsm8k import (
    Options,
    exact_match,
    model_arguments,
    parse,
    problems,
    smoke_model,
    train_and_evaluate,
)
from trl import DistillationConfig

from grpo_kernels.trl import FusedDistillationTrainer

DEFAULTS = {
    "output_dir": "out/distill",
    "teacher_model_name_or_path": "Qwen/Qwen3-4B",
    "teacher_model_init_kwargs": {
        "dtype": "auto"
    },  # it does not train, so the dtype of its checkpoint will do
    "learning_rate": 1e-5,
}
SMOKE = {"output_dir": "out/distill-smoke", "per_device_train_batch_size": 4}


class Trainer(FusedDistillationTrainer):
    """Logs the accuracy of what the student writes, beside TRL's loss, which is the divergence from
    the teacher."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        texts = self.processing_class.batch_decode(
            batch["completion_ids"], skip_special_tokens=True
        )
        right = exact_match(
            [[{"content": text}] for text in texts], [row["solution"] for row in inputs]
        )
        found = self.accelerator.gather(torch.tensor(right, device=self.accelerator.device))
        self._metrics["train" if self.model.training else "eval"]["accuracy"].append(
            found.mean().item()
        )
        return batch


def main() -> None:
    options, args, model = parse(__doc__, Options, DistillationConfig, DEFAULTS, SMOKE)
    if options.smoke:
        folder = Path(args.output_dir)
        model.model_name_or_path = smoke_model(folder / "model", hidden_size=32, seed=0)
        args.teacher_model_name_or_path = smoke_model(folder / "teacher", hidden_size=64, seed=1)
    data = problems(options)
    trainer = Trainer(
        args=args,
        teacher_model=args.teacher_model_name_or_path,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        **model_arguments(model),
    )
    train_and_evaluate(
        trainer, options, {"eval_loss": "divergence from the teacher", "eval_accuracy": "accuracy"}
    )


if __name__ == "__main__":
    main()
