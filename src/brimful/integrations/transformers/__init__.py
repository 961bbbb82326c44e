"""A plan for a Transformers `Trainer`, applied to it: two lines beside the ones you have.

Trainers that derive from it work too: TRL's `SFTTrainer`, `DPOTrainer` and `RewardTrainer`, and those of
sentence-transformers.

    import brimful.integrations.transformers as bft

    plan = bft.plan(trainer, budget="11GiB")
    bft.apply(plan, trainer)
    trainer.train()

Checked with transformers 5.23, trl 1.16 and sentence-transformers 6.2.
"""

from brimful.integrations.transformers.api import apply, plan
from brimful.integrations.transformers.applied_plan import AppliedPlan
from brimful.integrations.transformers.trainer_job import job

__all__ = ["AppliedPlan", "apply", "job", "plan"]
