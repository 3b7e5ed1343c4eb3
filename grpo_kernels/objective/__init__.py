"""The losses: functions of log-probabilities, entropies and advantages.

They know neither the vocabulary nor the engines.
"""
