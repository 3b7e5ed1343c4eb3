"""Tests that the plugin runs on emulated kernels: ``python -m tests.emulator``."""
