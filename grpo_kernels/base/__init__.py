"""Helpers for every part: checks of arguments, collectives, agreement of ranks. They know no loss and no head."""
