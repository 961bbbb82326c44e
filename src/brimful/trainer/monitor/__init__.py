"""The records of a run: in memory, in files, shown, and passed to callbacks."""
