"""Policy losses of verl and others as objectives: `grpo_loss(..., objective=objectives.gspo())`. See `objective.verl`."""
