"""A real model and a real task on a CPU: SmolLM2-135M-Instruct learns one-digit sums with TRL's
GRPO trainer. Nothing is fetched from a hub."""
