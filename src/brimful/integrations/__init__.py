"""brimful inside other training frameworks: plans for their jobs, applied to their loops."""
