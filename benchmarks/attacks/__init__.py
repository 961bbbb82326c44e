"""Attacks on brimful's reliability and security, one module per area; `benchmarks/attack.py` runs them."""
