"""Plans as the configuration of other training tools."""

from __future__ import annotations

from dataclasses import replace

from brimful.api.plans import check_plan
from brimful.arguments import checks_arguments
from brimful.capture.fakes.model import fake_model
from brimful.distributed.fsdp import sharded_units
from brimful.errors import UnknownNameError
from brimful.execution.attached import parameter_count
from brimful.execution.random_state import undisturbed
from brimful.exports import Export, ExportSource, ExportTool, write_export
from brimful.job import Job
from brimful.optimizers import NamedOptimizer
from brimful.planner import Plan
from brimful.utils.status import busy


@undisturbed()
@busy("exporting")
@checks_arguments
def export(job: Job, plan: Plan, tool: str) -> Export:
    """A plan as the file that another training tool reads; see `Plan.export`."""
    try:
        known = ExportTool(tool)
    except ValueError:
        raise UnknownNameError("tool", str(tool), [str(each) for each in ExportTool]) from None
    made = write_export(_source(job, plan), known)
    peak_bytes = plan.predicted_peak_device_bytes
    if made.settings != plan.settings:
        peak_bytes = check_plan(job, replace(plan, settings=made.settings)).predicted_peak_device_bytes
    return replace(made, predicted_peak_device_bytes=peak_bytes, budget_bytes=plan.budget_bytes)


def _source(job: Job, plan: Plan) -> ExportSource:
    settings = plan.settings
    model = fake_model(job) if settings.divides_state else None
    paths = {} if model is None else {module: path for path, module in model.named_modules()}
    own = job.optimizer.name if isinstance(job.optimizer, NamedOptimizer) else job.optimizer
    return ExportSource(
        settings=settings,
        device_kind=plan.device_kind,
        optimizer=settings.optimizer or (own if isinstance(own, str) else None),
        counts=job.count is not None,
        sums=job.reduction == "sum",
        couples=job.embed is not None,
        parameter_count=0 if model is None else parameter_count(model.parameters()),
        sharded_modules=(
            ()
            if model is None
            else tuple((paths[module], type(module).__name__) for module in sharded_units(model))
        ),
    )
