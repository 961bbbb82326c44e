"""The data of a run: which batches, in which order, from which position. Start reading at `batches`."""
