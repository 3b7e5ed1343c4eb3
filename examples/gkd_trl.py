"""GKD with TRL's experimental trainer, but without logits: a subclass that replaces the loss.

TRL's GKDTrainer computes the logits (B, L, V) of student and teacher. `causal_lm_divergence` never
stores them, and projects only tokens that have a label. The same lines work in other trainers that
compute all logits. For TRL's IWOPDTrainer, which reads only log-probabilities of sampled tokens,
use `causal_lm_logps`. If you have only a teacher's top logits, use `topk_divergence`. At the
end, the script asserts that both trainers log the same losses, and that the student gets closer.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

from begin import begin, steps_of

if __name__ == "__main__":
    begin(__doc__)

import transformers
from arithmetic import all_problems, build_model, build_tokenizer
from datasets import Dataset

from grpo_kernels.transformers import causal_lm_divergence

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # read when the next import runs
from trl.experimental.gkd import GKDConfig, GKDTrainer


class FusedGKDTrainer(GKDTrainer):
    """Losses and gradients of TRL's GKDTrainer; in 16 bits the divergence is in float32."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if return_outputs:  # an evaluation, which reads the logits
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.teacher_model.eval()
        mask = inputs["labels"] != -100
        batch = inputs["input_ids"], inputs["attention_mask"], mask
        divergence = causal_lm_divergence(
            model, self.teacher_model, *batch, divergence="jsd", beta=self.beta
        ).divergence
        items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return divergence.sum() / items


def losses(trainer_class: type, steps: int) -> list[float]:
    """Train a small student of a larger teacher, and return the logged losses."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    turns = [
        [{"role": "user", "content": x.prompt}, {"role": "assistant", "content": x.working}]
        for x in all_problems()
    ]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = GKDConfig(
            folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            beta=0.5,
            lmbda=0.0,  # on the demonstrations; 1.0: on what the student writes
            max_length=32,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = trainer_class(
            model=build_model(tokenizer, hidden_size=32, layers=1, seed=1),
            teacher_model=build_model(tokenizer),
            args=args,
            train_dataset=Dataset.from_dict({"messages": turns}),
            processing_class=tokenizer,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


def main() -> None:
    steps = steps_of(__doc__, 20, "optimizer steps of each trainer")
    ours, stock = losses(FusedGKDTrainer, steps), losses(GKDTrainer, steps)
    for step in range(0, steps, max(1, steps // 4)):
        print(f"step {step:3d}  loss {ours[step]:.5f}  TRL's {stock[step]:.5f}")
    worst = max(abs(x - y) for x, y in zip(ours, stock, strict=True))
    print(f"loss: {ours[0]:.4f} -> {ours[-1]:.4f}, largest difference from TRL's: {worst:.1e}")
    assert worst < 1e-6, "the losses are not those of TRL's trainer"
    assert ours[-1] < 0.8 * ours[0], "the student did not come nearer to the teacher"


if __name__ == "__main__":
    main()
