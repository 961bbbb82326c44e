"""Exact solvers: `chain` chooses one action per unit within a budget, `segments` nests recomputed units."""
