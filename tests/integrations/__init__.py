"""Trainers, and the models of transformers."""
