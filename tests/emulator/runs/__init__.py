"""Tests that the plugin runs on emulated kernels: ``make emulate``."""
