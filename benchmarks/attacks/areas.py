"""All areas, in the order of the result."""

from __future__ import annotations

from attacks import calls, commands, files, inputs, jobs, kills, memory, saves, system
from attacks.case import Area

AREAS = (
    Area(name="kills of one process", cases=kills.process_cases),
    Area(name="kills of ranks", cases=kills.rank_cases),
    Area(name="kills of adapters", cases=kills.adapter_cases),
    Area(name="errors at random ops", cases=memory.run_cases),
    Area(name="errors in a whole fit", cases=memory.fit_cases),
    Area(name="allocations that fail", cases=memory.allocation_cases),
    Area(name="errors in a step", cases=memory.step_cases),
    Area(name="errors under prepare", cases=memory.retry_cases),
    Area(name="memory of a process", cases=memory.leak_cases),
    Area(name="saves and run directories", cases=saves.tampering_cases),
    Area(name="disks", cases=system.disk_cases),
    Area(name="file operations that fail", cases=system.operation_cases),
    Area(name="clocks", cases=system.clock_cases),
    Area(name="data workers", cases=system.worker_cases),
    Area(name="trackers and callbacks", cases=system.tracker_cases),
    Area(name="signals", cases=system.signal_cases),
    Area(name="two processes", cases=system.pair_cases),
    Area(name="standard streams", cases=system.stream_cases),
    Area(name="plan.json", cases=files.plan_cases),
    Area(name="traces", cases=files.trace_cases),
    Area(name="calibrations and homes", cases=files.calibration_cases),
    Area(name="calibrations at once", cases=files.race_cases),
    Area(name="exports", cases=files.export_cases),
    Area(name="weights and models of others", cases=files.weights_cases),
    Area(name="paths, encodings, environment", cases=commands.surroundings_cases),
    Area(name="arguments", cases=commands.argument_cases),
    Area(name="arguments of functions", cases=calls.call_cases),
    Area(name="job files", cases=jobs.job_cases),
    Area(name="images, tables and texts", cases=inputs.input_cases),
)
