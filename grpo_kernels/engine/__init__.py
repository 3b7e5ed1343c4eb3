"""Engines: the passes of a call over its rows, with their matrix products and chunks.

They do not know the objective.
"""

from __future__ import annotations
