"""A run from its first epoch to its last: training, validation, when to save, and how it ends.

Input: a `RunContext` (`trainer/setup.py`). Output: a `TrainingResult`. Start reading at `loop.py`.
"""
