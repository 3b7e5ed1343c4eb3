"""The losses: functions of log-probabilities, entropies and advantages; no vocabulary, no
engine."""
