"""Recording: code that runs on fake tensors → its ops, its blocks of memory, and what is not certain of them.

`recorder.Recorder` is the dispatch mode. `runner` runs an op, `op_log` records it,
`ledger` follows its storages.
"""
