"""Two captures → the optimization problem of a candidate. Start reading at `build`.

`build` prices keeping and recomputing each unit; `savable_ops` adds selective checkpointing; `nested`
poses nested segments; `splice` predicts a step for any choice of actions from one capture; `logits` finds the
output layer.
"""
