"""How an optimizer step runs, on real tensors and on fake ones. Start reading at `step.run_step`.

| module | what it does |
|---|---|
| `step` | the algorithm: micro-batches, loss weights, autocast, scaling, clipping, update |
| `executor` | a step as `Settings` say, wired once for capture, measurement, `bf.apply` and the trainer |
| `planned_step` | `bf.apply`: one call is one optimizer step |
| `transaction`, `update`, `out_of_memory` | a step completes or changes nothing; OOM recovery |
| `coupled_loss`, `update_in_backward`, `host_optimizer`, `prefetch` | memory-saving ways to run parts of it |
| `job_loop` | a job's own training loop |
"""
