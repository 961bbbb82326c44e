"""The tables of README.md and docs/, made from the JSON in benchmarks/results/.

python benchmarks/tables.py            # writes them
python benchmarks/tables.py --check    # exit status 1 if a file has others

A page has each table between `<!-- benchmarks/tables.py: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from answer_tables import public_script_lines, silent_error_lines
from brimful.quantities import format_bytes, format_seconds
from gpu_tables import h100_accuracy_lines, mechanism_lines, step_lines
from gpu_tables import plan_lines as gpu_plan_lines
from gpu_time_tables import (
    batch_verdict_lines,
    gpu_class_lines,
    gpu_fraction_lines,
    gpu_peer_lines,
    gpu_time_lines,
)
from plan_tables import bound_lines, simplest_lines
from walk import BEFORE_COMMIT, WALK

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/benchmarks.md",
    "docs/howto/frameworks.md",
    "docs/howto/own-loop.md",
    "docs/reference/jobs.md",
)
BLOCK = re.compile(r"<!-- benchmarks/tables\.py: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def main() -> int:
    """Write or check; the exit status."""
    made: set[str] = set()
    stale = [path for path in map(ROOT.joinpath, PAGES) if not _write(path, made)]
    unused = TABLES.keys() - made
    for path in stale:
        print(f"{path.relative_to(ROOT)} has other tables than the results")
    for name in sorted(unused):
        print(f"no page has the table {name!r}")
    return int(bool(unused) or ("--check" in sys.argv and bool(stale)))


def _write(path: Path, made: set[str]) -> bool:
    """Bring a page up to date; whether it was."""

    def block(found: re.Match[str]) -> str:
        name = found.group(1)
        made.add(name)
        lines = "\n".join(TABLES[name]()).rstrip()
        return f"<!-- benchmarks/tables.py: {name} -->\n{lines}\n<!-- end -->"

    text = path.read_text(encoding="utf-8")
    fresh = BLOCK.sub(block, text)
    if "--check" not in sys.argv:
        path.write_text(fresh, encoding="utf-8")
    return fresh == text


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def accuracy_lines() -> Iterator[str]:
    """The README's summary, a row for each kind of comparison."""
    gpu = load("gpu_truth")["summary"]
    zoo, jobs = load("cpu_zoo")["summary"], load("job_zoo")["summary"]
    plans, times = load("plan_measured")["summary"], load("step_time")["summary"]
    yield "| predicted | measured | cases | median error | spread |"
    yield "|---|---|--:|--:|---|"
    yield (
        f"| peak memory | public runs on RTX 3060, RTX 4060 and A100 | {gpu['brimful']['rows']} "
        f"| {gpu['brimful']['median_error_fraction']:.1%} "
        f"| 90 % within {gpu['brimful']['percentile_90_error_fraction']:.1%}; next best estimator "
        f"{gpu['xMem']['median_error_fraction']:.1%} |"
    )
    yield from h100_accuracy_lines(load)
    lora = load("litgpt")["summary"]
    yield (
        f"| peak memory | LoRA and adapters on an A100, bf16 and 4-bit, by LitGPT | {lora['memory']['rows']} "
        f"| {lora['memory']['median_error_fraction']:.1%} | at most "
        f"{lora['memory']['largest_error_fraction']:.1%}; {lora['verdicts_that_agree']} of {lora['rows']} "
        "verdicts right |"
    )
    yield (
        f"| peak memory | one step of {zoo['families']} kinds of models, CPU | {zoo['rows']} "
        f"| {percent(zoo['median_error_fraction'])} | {zoo['rows_within_1_percent']} within 1 % |"
    )
    yield (
        f"| peak memory | whole jobs of {jobs['kinds']} kinds, CPU | {jobs['predicted']} "
        f"| {percent(jobs['median_error_fraction'])} | {jobs['predicted_within_1_percent']} within 1 %; "
        f"{jobs['plans_within_budget']} of {jobs['plans']} plans within budget |"
    )
    yield (
        f"| fastest plan in a budget | beside seven other ways, CPU | {plans['ours_feasible']} "
        f"| {plans['step_error_median']:.1%} of step time "
        f"| {plans['ours_measured_within_budget']} within budget, {plans['ours_fastest_measured']} fastest; "
        f"{plans['cases'] - plans['ours_feasible']} further budgets have no plan |"
    )
    fit = load("times_fit")
    steps, ratios = fit["by_source"]["vision"], fit["ratios_of_gpus"]
    yield (
        f"| step time | vision models on an RTX 3090, by others | {steps['rows']} "
        f"| {steps['median_error']:.1%} | 90 % within {steps['p90_error']:.0%}, families held out; "
        f"ratio of two GPUs {ratios['median_error']:.0%} |"
    )
    unprepared = load("step_time_unprepared")["summary"]
    yield (
        f"| step time | small models, calibrated CPU | {times['rows']} "
        f"| {times['median_error_fraction']:.1%} | at most {times['largest_error_fraction']:.0%}; "
        f"{load('step_time_xeon')['summary']['median_error_fraction']:.1%} on a second CPU, "
        f"{unprepared['median_error_fraction']:.0%} for {unprepared['rows']} whole jobs as people write them |"
    )


def gpu_lines() -> Iterator[str]:
    """Public runs on GPUs, beside other estimators."""
    result = load("gpu_truth")
    summary, rows = result["summary"], result["rows"]
    ours = summary["brimful"]
    yield f"*{ours['rows']} runs, predicted without a GPU. {stamp(result)}*"
    yield ""
    yield "| estimator | runs | median error | 90 % of errors up to | runs above the prediction |"
    yield "|---|--:|--:|--:|--:|"
    for name, found in summary.items():
        yield (
            f"| {name} | {found['rows']} | {found['median_error_fraction']:.1%} "
            f"| {found['percentile_90_error_fraction']:.1%} | {found['share_measured_above_predicted']:.0%} |"
        )
    yield ""
    yield (
        f"Median error of brimful: {ours['median_error_fraction_of_transformers']:.1%} for transformers, "
        f"{ours['median_error_fraction_of_CNNs']:.1%} for CNNs. "
        f"{ours['share_measured_in_interval']:.0%} of the runs lie in the interval; "
        f"{ours['share_measured_above_interval']:.1%} lie above its upper end. "
        "(xMem: 8.9 % of runs capped at its estimate failed.)"
    )
    yield ""
    yield "Errors above 6 %:"
    yield ""
    yield "| run | error | known cause |"
    yield "|---|--:|---|"
    for row in rows:
        if row["explanation"]:
            model = row["model"].rpartition("/")[2]
            run = f"{model}, {row['optimizer']}, batch {row['batch_size']}, {row['gpu']}"
            yield f"| {run} | {row['error_fraction']:+.1%} | {row['explanation']} |"


def published_lines() -> Iterator[str]:
    """What articles published, predicted."""
    result = load("published")
    yield f"*{stamp(result)}*"
    yield ""
    yield "| article and row | published | predicted, with the CUDA context | error | interval |"
    yield "|---|--:|--:|--:|--:|"
    for row in result["rows"]:
        if not row["variant"]:
            published = row["published_device_bytes"]
            low, high = row["predicted_device_interval_bytes"]
            yield (
                f"| {row['table']}, {row['name']} | {'OOM' if published is None else format_bytes(published)} "
                f"| {format_bytes(row['predicted_peak_device_bytes'])} "
                f"| {row['predicted_verdict'] if published is None else format(row['error_fraction'], '+.1%')} "
                f"| {format_bytes(low)} to {format_bytes(high)} |"
            )


def litgpt_lines() -> Iterator[str]:
    """LitGPT's table of LoRA and adapters, predicted."""
    result = load("litgpt")
    summary = result["summary"]
    memory, times = summary["memory"], summary["time"]
    other = summary["memory_of_variants"]["norms in float32"]
    yield (
        f"*{summary['rows']} rows. Memory: median error {memory['median_error_fraction']:.1%}, at most "
        f"{memory['largest_error_fraction']:.1%} (Llama 2; with norms in float32 at most "
        f"{other['largest_error_fraction']:.1%}). Verdicts: {summary['verdicts_that_agree']} of "
        f"{summary['rows']} right. Time: median error {times['median_error_fraction']:.0%}. "
        f"{stamp(result)}*"
    )
    yield ""
    yield "| model, method, weights, samples | published | predicted | error | published | predicted | error |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for row in result["rows"]:
        weights = "bf16" if row["quantization"] == "None" else row["quantization"].removeprefix("bnb.")
        name = f"{row['model']}, {row['method']}, {weights}, {row['micro_batch_size']}"
        if row["published_gb"] is None:
            verdict = row["predicted_verdict"]
            yield f"| {name} | OOM | {row['predicted_gb']:.2f} GB | {verdict} | – | – | – |"
            continue
        yield (
            f"| {name} | {row['published_gb']:.2f} GB | {row['predicted_gb']:.2f} GB "
            f"| {row['error_fraction']:+.1%} | {row['published_minutes']:.2f} min "
            f"| {row['predicted_minutes']:.2f} min | {row['time_error_fraction']:+.0%} |"
        )


def attack_lines() -> Iterator[str]:
    """Attacks by area, beside those on the code before."""
    result, before = load("attack"), load("attack_before")
    total, seconds = result["total"], result["seconds"]
    yield (
        f"*{total['tried']:,} attacks, repeated in {format_seconds(seconds)}. Succeeded: {kinds(total)}. "
        f"At commit {before['attacked_commit'][:9]}: {kinds(before['total'])}. {stamp(result)}*"
    )
    yield ""
    yield "| area | tried | succeeded at the earlier commit | succeeded |"
    yield "|---|--:|---|---|"
    earlier = {row["area"]: row for row in before["areas"]}
    for row in result["areas"]:
        was = kinds(earlier[row["area"]]) if row["area"] in earlier else "–"
        yield f"| {row['area']} | {row['tried']} | {was} | {kinds(row)} |"


def kinds(found: dict[str, Any]) -> str:
    """How many attacks succeeded, by what went wrong."""
    return ", ".join(f"{count} {kind}" for kind, count in found["failures"].items()) or "0"


def zoo_lines() -> Iterator[str]:
    """The zoo on a CPU."""
    result = load("cpu_zoo")
    summary = result["summary"]
    yield (
        f"*{summary['rows']} architectures of {summary['families']} kinds: median error "
        f"{percent(summary['median_error_fraction'])}, {summary['rows_within_1_percent']} within 1 %. "
        f"{stamp(result)}*"
    )
    yield ""
    yield "The others:"
    yield ""
    yield "| model | error | why |"
    yield "|---|--:|---|"
    for row in result["rows"]:
        if abs(row["error_fraction"]) > 0.01:
            why = "; ".join(row["uncertain_ops"]) or ", ".join(
                each["op"] for each in row["temporaries_at_peak"]
            )
            yield f"| {row['model']} | {percent(row['error_fraction'])} | {why} |"


def job_lines() -> Iterator[str]:
    """Whole jobs on a CPU, and those whose prediction is off."""
    result = load("job_zoo")
    summary, rows = result["summary"], result["rows"]
    yield f"*{stamp(result)}*"
    yield ""
    yield "| question | answer |"
    yield "|---|---|"
    yield (
        f"| Is the job supported? | {summary['supported']} of {summary['rows']}; {summary['refused']} "
        f"refused with a message, {summary['warned']} with a warning, {summary['wrong']} wrong without one |"
    )
    yield (
        f"| Is the peak right? | median error {percent(summary['median_error_fraction'])}; "
        f"{summary['predicted_within_1_percent']} of {summary['predicted']} within 1 % |"
    )
    yield (
        f"| Do plans keep their budget? | {summary['plans_within_budget']} of {summary['plans']}; the largest "
        f"peak is {summary['largest_part_of_budget']:.2%} of its budget |"
    )
    yield (
        f"| Is the training the same? | {summary['pinned_plans_equal_to_the_last_bit']} of "
        f"{summary['pinned_plans']} plans that do not split the batch are bit-identical; "
        f"{summary['split_or_chunked_plans_within_rounding']} of {summary['split_or_chunked_plans']} others "
        "are within rounding |"
    )
    yield (
        f"| Are other random numbers announced? | {summary['of_these_said_to']} of "
        f"{summary['split_plans_that_draw_random_numbers']} plans that draw others |"
    )
    yield ""
    yield "Errors above 1 %:"
    yield ""
    yield "| job | error | why |"
    yield "|---|--:|---|"
    for row in rows:
        error = row["error_fraction"]
        if error is not None and abs(error) > 0.01:
            yield f"| {row['name']} | {percent(error)} | {row['named']} |"


def refused_lines() -> Iterator[str]:
    """Whole jobs that are refused, with the message."""
    result = load("job_zoo")
    yield "| refused job | message |"
    yield "|---|---|"
    for row in result["rows"]:
        if row["status"] == "refused":
            why = row["why"].replace("CertificateError", "EquivalenceError")  # its name when this was measured
            yield f"| {row['name']} | {_sentence(why)} |"


def walk_lines() -> Iterator[str]:
    """A newcomer's jobs, before and after."""
    result = load("job_zoo")
    yield f"| workload | at commit {BEFORE_COMMIT} | now |"
    yield "|---|---|---|"
    by_name = {row["name"]: row for row in result["rows"]}
    for workload, before, names in WALK:
        now = "; ".join(_now(by_name[name]) for name in names if name in by_name)
        yield f"| {workload} | {before} | {now} |"


def _now(row: dict[str, Any]) -> str:
    """What becomes of a job."""
    error, plan = row["error_fraction"], row["free"]
    said = row["status"] if error is None else percent(error)
    if row["status"] != "supported" and error is not None:
        said += f", splitting {row['status']}"
    return said if plan is None else f"{said}, plan {plan['true_bytes'] / plan['budget_bytes']:.0%} of budget"


def _sentence(message: str) -> str:
    """A message in one line, without what would end a table's cell."""
    line = " ".join(message.replace("|", "/").split())
    return line if len(line) <= 240 else f"{line[:239]}…"


def cpu_lines() -> Iterator[str]:
    """Peak memory on a CPU, a line per model."""
    result = load("cpu_truth")
    summary = result["summary"]
    yield (
        f"*{summary['rows']} steps: {summary['rows_equal_to_the_byte']} equal to the byte, "
        f"{summary['rows_within_1_percent']} within 1 %. {stamp(result)}*"
    )
    yield ""
    yield "| model | predicted, baseline | measured, baseline | largest error of six variants |"
    yield "|---|--:|--:|--:|"
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["model"] == name]
        plain = next(row for row in rows if row["variant"] == "plain")
        worst = max((row["error_fraction"] for row in rows), key=abs)
        yield (
            f"| {name} | {format_bytes(plain['predicted_peak_allocated_bytes'])} "
            f"| {format_bytes(plain['measured_peak_allocated_bytes'])} | {percent(worst)} |"
        )


def run_lines() -> Iterator[str]:
    """What `make demo` trains."""
    result = load("demo_runs")
    yield f"*{stamp(result)}*"
    yield ""
    yield "| | " + " | ".join(row["job"] for row in result["rows"]) + " |"
    yield "|---|" + "--:|" * len(result["rows"])
    lines = {
        "baseline: measured peak": lambda r: format_bytes(r["plain_measured_peak_allocated_bytes"]),
        "budget": lambda r: format_bytes(r["budget_bytes"]),
        "predicted peak": lambda r: format_bytes(r["predicted_peak_allocated_bytes"]),
        "measured peak": lambda r: format_bytes(r["measured_peak_allocated_bytes"]),
        "used of the budget": lambda r: f"{r['budget_used_fraction']:.1%}",
        "predicted step": lambda r: format_seconds(r["predicted_step_seconds"]),
        "measured step": lambda r: format_seconds(r["measured_step_seconds"]),
        "baseline: measured step": lambda r: format_seconds(r["plain_measured_step_seconds"]),
        "largest difference of the loss to the baseline": lambda r: loss_difference(r),
    }
    for label, cell in lines.items():
        yield f"| {label} | " + " | ".join(cell(row) for row in result["rows"]) + " |"


def speed_lines() -> Iterator[str]:
    """Time and memory of an estimate."""
    result = load("estimate_speed")
    yield f"*Median of {result['repeats']} processes, after imports. {stamp(result)}*"
    yield ""
    columns = (
        "model",
        "parameters",
        "micro-batch × tokens",
        "estimate",
        "further size",
        "MemTracker",
        "memory",
    )
    yield f"| {' | '.join(columns)} |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for row in result["rows"]:
        aims = result["targets"][row["model"]]
        size = f"{row['micro_batch_size']}" + (f" × {row['seq_len']}" if row["seq_len"] else "")
        yield (
            f"| {row['model']} | {row['parameters'] / 1e6:.0f} M | {size} "
            f"| {format_seconds(row['estimate_seconds'])} ({format_seconds(aims['estimate_seconds'])}) "
            f"| {format_seconds(row['further_micro_batch_seconds'])} "
            f"({format_seconds(aims['further_micro_batch_seconds'])}) "
            f"| {format_seconds(row['mem_tracker_seconds'])} | {format_bytes(row['peak_resident_bytes'])} |"
        )


def time_lines() -> Iterator[str]:
    """Step times on CPUs."""
    yield "| CPU | models | median error | largest error | calibrated in | run |"
    yield "|---|--:|--:|--:|--:|---|"
    for result in (load("step_time"), load("step_time_xeon"), load("step_time_unprepared")):
        summary = result["summary"]
        of = ""
        if held_out := summary.get("held_out"):
            of = (
                f" whole jobs as people write them; of these {held_out['rows']} held out: "
                f"{held_out['median_error_fraction']:.1%}"
            )
        yield (
            f"| {result['machine']['cpu']} | {summary['rows']}{of} | {summary['median_error_fraction']:.1%} "
            f"| {summary['largest_error_fraction']:.0%} | {format_seconds(summary['calibration_seconds'])} "
            f"| {stamp(result)} |"
        )


def allocator_lines() -> Iterator[str]:
    """Steps on a CPU with malloc as it comes and as brimful configures it."""
    result = load("host_allocator")
    yield f"*{stamp(result)}*"
    yield ""
    yield "| model | step, memory returned | kept | ratio | page faults a step | kept | resident |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for row in result["rows"]:
        returned, kept = row["returned"], row["kept"]
        yield (
            f"| {row['model']}, micro-batch {row['micro_batch_size']} "
            f"| {format_seconds(returned['step_seconds'])} | {format_seconds(kept['step_seconds'])} "
            f"| {row['step_time_ratio']:.2f} | {format_bytes(int(returned['fault_bytes_per_step']))} "
            f"| {format_bytes(int(kept['fault_bytes_per_step']))} | × {row['peak_resident_ratio']:.2f} |"
        )


def real_lines() -> Iterator[str]:
    """Plans and peers, all really run."""
    result = load("plan_measured")
    peers = [name for name in result["rows"][0]["ways"] if name not in ("ours", "compiled, all budget")]
    summary = result["summary"]
    yield (
        f"*Plans found: {summary['ours_feasible']} of {summary['cases']}; within the budget when measured: "
        f"{summary['ours_measured_within_budget']}; fastest when measured: {summary['ours_fastest_measured']}. "
        f"Median error of all step times: {summary['step_error_median']:.1%}. {stamp(result)}*"
    )
    yield ""
    yield f"| model | budget | plan | {' | '.join(peers)} |"
    yield f"|---|--:|--:|{'--:|' * len(peers)}"
    for row in result["rows"]:
        ours = row["ways"]["ours"]
        plan = "–"
        if ours is not None:
            plan = f"{format_seconds(ours['measured_step_seconds'])} ({percent(ours['step_error'])})"
        cells = " | ".join(_beside(row["ways"][peer], ours) for peer in peers)
        yield f"| {row['model']} | {row['budget_fraction']:.0%} | {plan} | {cells} |"


def _beside(way: dict[str, Any] | None, ours: dict[str, Any] | None) -> str:
    if way is None or "failed" in way:
        return "–"
    over = "" if way["measured_within_budget"] else " **over**"
    if ours is None:
        return f"{format_seconds(way['measured_step_seconds'])}{over}"
    return f"× {way['measured_step_seconds'] / ours['measured_step_seconds']:.2f}{over}"


def plan_lines() -> Iterator[str]:
    """Plans beside rules that people use."""
    result = load("plan_simulated")
    peers = list(result["rows"][0]["peers"])
    yield f"*{result['device']}; host memory: {format_bytes(result['host_bytes'])}. {stamp(result)}*"
    yield ""
    yield f"| model | budget | plan | with host memory | {' | '.join(peers)} |"
    yield f"|---|--:|--:|--:|{'--:|' * len(peers)}"
    for row in result["rows"]:
        ours = row["ours"]
        used = "" if ours is None else f" ({ours['peak_device_bytes'] / row['budget_bytes']:.0%})"
        cells = " | ".join(overhead(row["peers"][peer]) for peer in peers)
        name = f"{row['model']}, {row['precision']}, {row['global_batch_size']}"
        with_host = overhead(row["ours_with_host"])
        yield f"| {name} | {row['budget_fraction']:.0%} | {overhead(ours)}{used} | {with_host} | {cells} |"
    summary = result["summary"]
    beside = summary["with host memory"]
    yield ""
    yield f"| | within the budget | {' | '.join(f'over {peer}' for peer in peers)} |"
    yield f"|---|--:|{'--:|' * len(peers)}"
    for name, each in {"plan": summary, "plan with host memory": beside}.items():
        speedups = " | ".join(f"× {each[peer]['geometric_mean_speedup']:.2f}" for peer in peers)
        yield f"| {name} | {each['ours_within_budget']} of {each['cases']} | {speedups} |"


def planner_lines() -> Iterator[str]:
    """Plans beside torch's sac_milp."""
    result = load("plan_torch_planners")
    name = "sac_milp, largest micro-batch"
    found = result["summary"][name]
    not_run = result["not_run_for_lack_of_time"]
    yield (
        f"*{result['device']}. `sac_milp` finds {found['found_a_solution']} solutions, of which "
        f"{found['within_budget']} keep the budget. {stamp(result)}*"
        + (f" Not run, for lack of time: {', '.join(not_run)}." if not_run else "")
    )
    yield ""
    yield "| model | budget | plan | sac_milp | its peak, of the budget | plan for its peak |"
    yield "|---|--:|--:|--:|--:|--:|"
    for row in result["rows"]:
        way = row["peers"][name]
        start = f"| {row['model']} | {row['budget_fraction']:.0%} | {overhead(row['ours'])} "
        if "failed" in way:
            yield f"{start}| – | – | – |"
        else:
            takes = way["peak_device_bytes"] / row["budget_bytes"]
            ours = overhead(way["ours_at_its_peak"])
            yield f"{start}| {way['overhead']:+.1%} | {takes:.0%} | {ours} |"


def schedule_lines() -> Iterator[str]:
    """Plans beside published schedules."""
    result = load("plan_published")
    yield f"*{stamp(result)}*"
    yield ""
    yield "| model | schedule | of baseline | overhead | plan, same bytes | plan, same fraction | reached |"
    yield "|---|---|--:|--:|--:|--:|---|"
    for case in result["rows"]:
        for point in case["points"]:
            ours = [point["ours_at_the_same_bytes"], point["ours_at_the_same_fraction"]]
            cells = " | ".join("–" if each is None else f"{each['overhead']:+.1%}" for each in ours)
            is_reached = all(each and each["overhead"] <= point["published_overhead"] for each in ours)
            yield (
                f"| {case['case']} | {point['label']} | {point['published_fraction']:.0%} "
                f"| {point['published_overhead']:+.1%} | {cells} | {'yes' if is_reached else 'no'} |"
            )


def format_lines() -> Iterator[str]:
    """Both memory formats on a CPU."""
    result = load("memory_format")
    summary = result["summary"]
    yield (
        f"*Largest error of a peak: {percent(summary['largest_peak_error_fraction'])}. Median error of the "
        f"ratio of times: {summary['median_ratio_error_fraction']:.0%}, largest "
        f"{summary['largest_ratio_error_fraction']:.0%}; the faster format is predicted for "
        f"{summary['faster_format_is_predicted']} of {summary['rows']}. {stamp(result)}*"
    )
    yield ""
    yield "| model | peak, contiguous | peak, channels_last | predicted ratio of times | measured ratio |"
    yield "|---|--:|--:|--:|--:|"
    for row in result["rows"]:
        peaks = " | ".join(
            f"{format_bytes(row[each]['measured_peak_allocated_bytes'])} "
            f"({percent(row[each]['peak_error_fraction'])})"
            for each in ("contiguous", "channels_last")
        )
        ratios = f"{row['predicted_ratio']:.2f} | {row['measured_ratio']:.2f}"
        yield f"| {row['model']}, {row['micro_batch_size']} | {peaks} | {ratios} |"


def overhead(way: dict[str, Any] | None) -> str:
    if way is None:
        return "–"
    return f"{way['overhead']:+.1%}".replace("%", " %") + ("" if way["within_budget"] else " **over**")


def loss_difference(row: dict[str, Any]) -> str:
    difference = row["largest_loss_difference_to_plain"]
    if difference == 0:
        return f"none in {row['steps']} steps"
    fused = row["settings"]["optimizer_implementation"] == "fused"
    return f"{difference:.1g} in {row['steps']} steps" + (", with the fused optimizer" if fused else "")


def percent(fraction: float) -> str:
    return (
        "0" if fraction == 0 else "< 0.01 %" if abs(fraction) < 1e-4 else f"{fraction:+.2%}".replace("%", " %")
    )


def stamp(result: dict[str, Any]) -> str:
    machine = result["machine"]
    commit = result["commit"][:9] + "+" * result["commit"].endswith("+")  # + if files differed from it
    return (
        f"{machine['cpu']}, threads: {machine['threads']}, torch {machine['torch']}, commit {commit}; "
        f"`{result['command']}`"
    )


def rank_lines() -> Iterator[str]:
    """Memory of each rank, under DDP and FSDP2."""
    result = load("train_ranks")
    summary = result["summary"]
    yield (
        f"*Two processes over gloo. Largest memory error: {summary['largest_memory_error']:.2%} after gloo's "
        f"threads released their copies. Largest relative difference of the loss to one process: "
        f"{summary['largest_relative_loss_difference']:.1e}. {stamp(result)}*"
    )
    yield ""
    yield "| model | settings | predicted peak | error | error with gloo's copies |"
    yield "|---|---|--:|--:|--:|"
    for row in result["rows"]:
        yield (
            f"| {row['model']} | {row['settings']} | {format_bytes(row['predicted_peak_allocated_bytes'])} "
            f"| {percent(row['error_once_gloo_let_go'])} | {percent(row['error_as_it_runs'])} |"
        )


def zero_lines() -> Iterator[str]:
    """Memory of each rank, under DeepSpeed's ZeRO."""
    result = load("train_zero")
    low, high = result["summary"]["memory_errors_with_pauses"]
    yield (
        f"*{result['ranks']} processes over gloo. Errors from {percent(low)} to {percent(high)} after gloo's "
        "threads released their copies. Largest relative difference of the loss to one process: "
        f"{result['summary']['largest_relative_loss_difference']:.1e}. {stamp(result)}*"
    )
    yield ""
    yield "| model | settings | predicted peak | measured, released | measured |"
    yield "|---|---|--:|--:|--:|"
    for row in result["rows"]:
        predicted = row["predicted_peak_allocated_bytes"]
        released, measured = max(row["with_pauses_bytes"]), max(row["measured_peak_allocated_bytes"])
        yield (
            f"| {row['model']} | {row['settings']} | {format_bytes(predicted)} "
            f"| {format_bytes(released)} | {format_bytes(measured)} |"
        )


def trainer_lines() -> Iterator[str]:
    """What trainers add to a step."""
    result = load("train_overhead")
    yield f"*{stamp(result)}*"
    yield ""
    yield "| trainer | step | over a loop by hand | 95 % interval |"
    yield "|---|--:|--:|--:|"
    for row in result["rows"]:
        low, high = row["over_by_hand_95"]
        yield (
            f"| {row['trainer']} | {format_seconds(row['step_seconds'])} | {row['over_by_hand']:+.1%} "
            f"| {low:+.1%} to {high:+.1%} |"
        )


def framework_lines() -> Iterator[str]:
    """The same job in each framework, with and without brimful."""
    result = load("frameworks")
    rows, summary = result["rows"], result["summary"]
    divided = summary["largest_relative_loss_difference_divided"]
    steps = rows[0]["runs"][0]["steps"]
    yield (
        f"*A GPT-2 of four layers, {steps} steps. Losses and weights are bit-identical in "
        f"{summary['bitwise']} of {summary['bitwise_of']} runs with everything kept or recomputed. In four "
        f"micro-batches, losses differ by at most {divided:.0e}. {stamp(result)}*"
    )
    yield ""
    yield (
        "| framework | lines added, changed | largest error of the peak | step | overhead of a step: median, "
        "rounds | a loop against itself | out of memory survived |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        peak = max((run["peak_error_fraction"] for run in row["runs"]), key=abs)
        rounds = [each["processor"] for each in row["overhead_by_round"]]
        noise = [each["processor"] for each in row["noise_by_round"]]
        memory = row["out_of_memory"]
        yield (
            f"| {row['framework']} | {row['lines_added']}, {row['lines_changed']} | {percent(peak)} "
            f"| {format_seconds(row['step_seconds'])} | {row['overhead_fraction']:+.1%}, {min(rounds):+.1%} to "
            f"{max(rounds):+.1%} | {min(noise):+.1%} to {max(noise):+.1%} "
            f"| {memory['survived_the_same']} of {memory['points']} |"
        )


def own_loop_lines() -> Iterator[str]:
    """The scripts of one's own loop."""
    result = load("own_loops")
    yield f"*{stamp(result)}*"
    yield ""
    yield "| script | settings | largest difference of a loss | predicted peak | measured peak | error |"
    yield "|---|---|--:|--:|--:|--:|"
    for row in result["rows"]:
        yield (
            f"| {row['shows']} | {row['settings']} | {row['largest_loss_difference']:.0e} "
            f"| {format_bytes(row['predicted_peak_allocated_bytes'])} "
            f"| {format_bytes(row['measured_peak_allocated_bytes'])} | {percent(row['peak_error_fraction'])} |"
        )


def plan_time_lines() -> Iterator[str]:
    """How long planning takes."""
    result = load("plan_speed")
    yield f"*{stamp(result)}*"
    yield ""
    yield "| command | before | after | before / after | aim, wall clock |"
    yield "|---|--:|--:|--:|--:|"
    for row in result["rows"]:
        before, aim = (
            "" if row.get(name) is None else format_seconds(row[name])
            for name in ("before_cpu_seconds", "aim_wall_seconds")
        )
        faster = f"{row['before_over_after']:.1f}" if before else ""
        after = f"{format_seconds(row['after_cpu_seconds'])} ({format_seconds(row['after_wall_seconds'])})"
        yield f"| {row['name']} | {before} | {after} | {faster} | {aim} |"


def fault_lines() -> Iterator[str]:
    """Training under faults."""
    result = load("train_faults")
    memory, killed, damaged = result["out_of_memory"], result["killed"], result["damaged_saves"]
    same = sum(row["outcomes"].get("bit for bit the undisturbed run", 0) for row in memory["rows"])
    yield f"*{stamp(result)}*"
    yield ""
    yield "| fault | tried | outcome |"
    yield "|---|--:|---|"
    yield f"| out of memory at one op of a step | {memory['points']} | {same} bit-identical |"
    yield (
        f"| kill at a random moment, then resume | {killed['kills']} | at most "
        f"{killed['steps_to_take_again_most']} steps repeated; weights bit-identical: "
        f"{'yes' if killed['weights_bit_for_bit'] else 'no'} |"
    )
    refused = damaged["outcomes"]["refused, the one before used"]
    yield f"| save with a flipped bit or no end | {damaged['damages']} | {refused} refused, older save used |"
    for name, row in result["others"].items():
        same = "yes" if row["losses_bit_for_bit"] else "no"
        yield f"| {name} | 1 | saved; resumed losses bit-identical: {same} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "accuracy": accuracy_lines,
    "gpu_truth": gpu_lines,
    "published": published_lines,
    "litgpt": litgpt_lines,
    "cpu_zoo": zoo_lines,
    "cpu_truth": cpu_lines,
    "job_zoo": job_lines,
    "refused": refused_lines,
    "walk": walk_lines,
    "demo": run_lines,
    "step_time": time_lines,
    "host_allocator": allocator_lines,
    "gpu_steps": lambda: step_lines(load, stamp),
    "gpu_mechanisms": lambda: mechanism_lines(load, stamp),
    "gpu_plans": lambda: gpu_plan_lines(load, stamp),
    "gpu_time": lambda: gpu_time_lines(load, stamp),
    "gpu_time_peers": lambda: gpu_peer_lines(load),
    "gpu_classes": lambda: gpu_class_lines(load),
    "gpu_fractions": lambda: gpu_fraction_lines(load),
    "batch_verdicts": lambda: batch_verdict_lines(load, stamp),
    "plan_measured": real_lines,
    "plan_simulated": plan_lines,
    "plan_torch_planners": planner_lines,
    "plan_published": schedule_lines,
    "plan_bound": lambda: bound_lines(load, stamp),
    "plan_simplest": lambda: simplest_lines(load, stamp),
    "memory_format": format_lines,
    "plan_time": plan_time_lines,
    "estimate_speed": speed_lines,
    "ranks": rank_lines,
    "zero": zero_lines,
    "trainer": trainer_lines,
    "frameworks": framework_lines,
    "own_loops": own_loop_lines,
    "faults": fault_lines,
    "attack": attack_lines,
    "silent_errors": lambda: silent_error_lines(load, stamp),
    "public_scripts": lambda: public_script_lines(load, stamp),
}

if __name__ == "__main__":
    sys.exit(main())
