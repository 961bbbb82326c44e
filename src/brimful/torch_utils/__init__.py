"""Helpers for torch: dispatch modes, names of modules, replaced attributes, what a model holds."""
