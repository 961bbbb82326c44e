"""Helpers without torch: units, files, the terminal, docstrings of fields, garbage collection, one lock."""
