"""The losses: functions of log-probabilities, entropies and advantages, without vocabulary or engine."""
