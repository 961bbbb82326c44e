"""Ranks that train one model: DDP, FSDP2, DeepSpeed ZeRO. Start reading at `strategies`.

`ranks` has the process group and its collectives, `fsdp` and `deepspeed` the sharding, `gather` the way from
sharded state to whole tensors and back.
"""
