"""Engines: which passes over the rows, which products, which rows, how many at a time. They know no objective."""

from __future__ import annotations
