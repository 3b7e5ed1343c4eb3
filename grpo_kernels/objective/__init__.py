"""Which loss: functions of log-probabilities, entropies and advantages. It knows no vocabulary and no engine."""
