"""The tables of README.md and docs/jobs.md, made from the JSON in benchmarks/results/.

python benchmarks/tables.py            # writes them
python benchmarks/tables.py --check    # exit status 1 if a file has others
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from brimful.quantities import format_bytes, format_seconds
from walk import BEFORE_COMMIT, WALK

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- made by benchmarks/tables.py -->", "<!-- end -->"


def main() -> int:
    """Write or check; the exit status."""
    files = {ROOT / "README.md": readme_sections(), ROOT / "docs" / "jobs.md": job_sections(load("job_zoo"))}
    stale = 0
    for path, sections in files.items():
        text = path.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        _, after = rest.split(END)
        lines = "\n".join(line for section in sections for line in (*section, "")).rstrip()
        fresh = f"{before}{BEGIN}\n{lines}\n{END}{after}"
        stale += fresh != text
        if "--check" not in sys.argv:
            path.write_text(fresh, encoding="utf-8")
    return int("--check" in sys.argv and stale > 0)


def readme_sections() -> Sequence[Iterator[str]]:
    """Tables of the README as lines of Markdown."""
    return (
        gpu_lines(load("gpu_truth")),
        published_lines(load("published")),
        zoo_lines(load("cpu_zoo")),
        job_lines(load("job_zoo")),
        cpu_lines(load("cpu_truth")),
        run_lines(load("demo_runs")),
        time_lines(load("step_time")),
        time_lines(load("step_time_xeon")),
        real_lines(load("plan_measured")),
        plan_lines(load("plan_simulated")),
        planner_lines(load("plan_torch_planners")),
        schedule_lines(load("plan_published")),
        speed_lines(load("estimate_speed")),
        attack_lines(load("attack"), load("attack_before")),
    )


def job_sections(result: dict[str, Any]) -> Sequence[Iterator[str]]:
    """Tables of the page about the zoo of jobs."""
    return (refused_lines(result), walk_lines(result))


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def gpu_lines(result: dict[str, Any]) -> Iterator[str]:
    """Public runs on GPUs, beside other estimators."""
    summary, rows = result["summary"], result["rows"]
    ours = summary["brimful"]
    yield (
        f"Memory of {ours['rows']} public training runs (xMem's: CNNs and transformers, fp32, on RTX 3060, "
        f"RTX 4060 and A100; reserved, without the bare context), predicted without a GPU, beside what other "
        f"estimators predicted for the same runs. {stamp(result)}"
    )
    yield ""
    yield "| | rows | median error | 90 % of errors up to | took more than predicted |"
    yield "|---|--:|--:|--:|--:|"
    for name, found in summary.items():
        yield (
            f"| {name} | {found['rows']} | {found['median_error_fraction']:.1%} "
            f"| {found['percentile_90_error_fraction']:.1%} | {found['share_measured_above_predicted']:.0%} |"
        )
    yield ""
    yield (
        f"Ours by kind: {ours['median_error_fraction_of_transformers']:.1%} for transformers, "
        f"{ours['median_error_fraction_of_CNNs']:.1%} for CNNs. Above the interval's upper end were "
        f"{ours['share_measured_above_interval']:.1%} of the runs (xMem: 8.9 % of runs capped at its estimate "
        f"failed); inside it {ours['share_measured_in_interval']:.0%}. Errors above 6 %:"
    )
    yield ""
    yield "| run | error | what is known of it |"
    yield "|---|--:|---|"
    for row in rows:
        if row["explanation"]:
            model = row["model"].rpartition("/")[2]
            run = f"{model}, {row['optimizer']}, batch {row['batch_size']}, {row['gpu']}"
            yield f"| {run} | {row['error_fraction']:+.1%} | {row['explanation']} |"


def published_lines(result: dict[str, Any]) -> Iterator[str]:
    """What articles published, predicted."""
    yield (
        "Figures that articles published of one technique after another, and what is predicted for them; what "
        f"is known to differ stands with each row in the JSON. {stamp(result)}"
    )
    yield ""
    yield "| article and row | published | predicted, with the context | error | interval |"
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


def attack_lines(result: dict[str, Any], before: dict[str, Any]) -> Iterator[str]:
    """Attacks by area, beside those on the code before."""
    total, seconds = result["total"], result["seconds"]
    yield (
        f"{total['tried']:,} attacks: kills, damaged and hostile files, failing memory and disks, signals, odd "
        f"arguments, jobs and data; repeated in {format_seconds(seconds)}. Succeeded: {kinds(total)}; before, "
        f"at commit {before['attacked_commit'][:9]}: {kinds(before['total'])}. The code before was "
        "attacked beside other work, by an attack that itself made 4 of those tracebacks (jobs that close "
        f"standard output) and has been mended since. {stamp(result)}"
    )
    yield ""
    yield "| area | tried | succeeded before | succeeded |"
    yield "|---|--:|---|---|"
    earlier = {row["area"]: row for row in before["areas"]}
    for row in result["areas"]:
        yield f"| {row['area']} | {row['tried']} | {kinds(earlier[row['area']])} | {kinds(row)} |"


def kinds(found: dict[str, Any]) -> str:
    """How many attacks succeeded, by what went wrong."""
    return ", ".join(f"{count} {kind}" for kind, count in found["failures"].items()) or "0"


def zoo_lines(result: dict[str, Any]) -> Iterator[str]:
    """The zoo on a CPU."""
    summary = result["summary"]
    yield (
        f"Peak allocated bytes of one step of {summary['rows']} architectures of {summary['families']} kinds "
        f"on a CPU, predicted against the profiler: median error {percent(summary['median_error_fraction'])}, "
        f"{summary['rows_within_1_percent']} within 1 %. {stamp(result)} The others:"
    )
    yield ""
    yield "| model | error | why |"
    yield "|---|--:|---|"
    for row in result["rows"]:
        if abs(row["error_fraction"]) > 0.01:
            why = "; ".join(row["uncertain_ops"]) or ", ".join(
                each["op"] for each in row["temporaries_at_peak"]
            )
            yield f"| {row['model']} | {percent(row['error_fraction'])} | {why} |"


def job_lines(result: dict[str, Any]) -> Iterator[str]:
    """Whole jobs on a CPU, and those whose prediction is off."""
    summary, rows = result["summary"], result["rows"]
    yield (
        f"{summary['rows']} whole jobs of {summary['kinds']} kinds, with their own losses, optimizers, loops "
        "and batches, each estimated, planned for 60 % of plain training's peak, applied and measured on a "
        "CPU, beside the profiler and beside a step written by hand: "
        f"{summary['supported']} supported, {summary['refused']} refused in words, {summary['warned']} warned "
        f"of, {summary['wrong']} wrong. Peak memory: median error {percent(summary['median_error_fraction'])}, "
        f"{summary['predicted_within_1_percent']} of {summary['predicted']} within 1 %. "
        f"{summary['plans_within_budget']} of {summary['plans']} plans within "
        f"their budgets, the most {summary['largest_part_of_budget']:.2%} of one; "
        f"{summary['pinned_plans_equal_to_the_last_bit']} of {summary['pinned_plans']} plans that do not split "
        f"the batch equal to the last bit, {summary['split_or_chunked_plans_within_rounding']} of "
        f"{summary['split_or_chunked_plans']} others within rounding; {summary['of_these_said_to']} of "
        f"{summary['split_plans_that_draw_random_numbers']} that draw other random numbers are said to. "
        f"[Which are refused, and what a newcomer's jobs met](docs/jobs.md). {stamp(result)}"
    )
    yield ""
    yield "| job | error | why |"
    yield "|---|--:|---|"
    for row in rows:
        error = row["error_fraction"]
        if error is not None and abs(error) > 0.01:
            yield f"| {row['name']} | {percent(error)} | {row['named']} |"


def refused_lines(result: dict[str, Any]) -> Iterator[str]:
    """Whole jobs that are refused, with what is said of them."""
    yield "| refused | message |"
    yield "|---|---|"
    for row in result["rows"]:
        if row["status"] == "refused":
            yield f"| {row['name']} | {_sentence(row['why'])} |"


def walk_lines(result: dict[str, Any]) -> Iterator[str]:
    """A newcomer's jobs, before and after."""
    yield f"A newcomer's jobs, at commit {BEFORE_COMMIT} and now; of the budget, the plan's true peak:"
    yield ""
    yield "| workload | before | now |"
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


def cpu_lines(result: dict[str, Any]) -> Iterator[str]:
    """Peak memory on a CPU, a line per model."""
    summary = result["summary"]
    yield (
        f"Peak allocated bytes on a CPU against the profiler's memory events: {summary['rows']} steps, "
        f"{summary['rows_equal_to_the_byte']} of them equal to the byte, "
        f"{summary['rows_within_1_percent']} within 1 %. {stamp(result)}"
    )
    yield ""
    yield "| model | predicted, plain | measured, plain | largest error of its six variants |"
    yield "|---|--:|--:|--:|"
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["model"] == name]
        plain = next(row for row in rows if row["variant"] == "plain")
        worst = max((row["error_fraction"] for row in rows), key=abs)
        yield (
            f"| {name} | {format_bytes(plain['predicted_peak_allocated_bytes'])} "
            f"| {format_bytes(plain['measured_peak_allocated_bytes'])} | {percent(worst)} |"
        )


def run_lines(result: dict[str, Any]) -> Iterator[str]:
    """What `make demo` trains."""
    yield f"`make demo`, trained inside a budget, beside plain training of the same batch. {stamp(result)}"
    yield ""
    yield "| | " + " | ".join(row["job"] for row in result["rows"]) + " |"
    yield "|---|" + "--:|" * len(result["rows"])
    lines = {
        "plain training: measured peak": lambda r: format_bytes(r["plain_measured_peak_allocated_bytes"]),
        "budget": lambda r: format_bytes(r["budget_bytes"]),
        "predicted peak": lambda r: format_bytes(r["predicted_peak_allocated_bytes"]),
        "measured peak": lambda r: format_bytes(r["measured_peak_allocated_bytes"]),
        "of the budget": lambda r: f"{r['budget_used_fraction']:.1%}",
        "predicted step": lambda r: format_seconds(r["predicted_step_seconds"]),
        "measured step": lambda r: format_seconds(r["measured_step_seconds"]),
        "plain training: measured step": lambda r: format_seconds(r["plain_measured_step_seconds"]),
        "largest difference of the loss to plain training": lambda r: loss_difference(r),
    }
    for label, cell in lines.items():
        yield f"| {label} | " + " | ".join(cell(row) for row in result["rows"]) + " |"


def speed_lines(result: dict[str, Any]) -> Iterator[str]:
    """Time and memory of an estimate."""
    yield (
        f"One estimate after imports, median of {result['repeats']} processes; a further micro-batch size from "
        f"the two captures of an estimator; and two steps under torch's own MemTracker, which tells allocated "
        f"bytes only. In brackets: the aim, on 2 cores. Process memory includes torch's. {stamp(result)}"
    )
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


def time_lines(result: dict[str, Any]) -> Iterator[str]:
    """Step times on a CPU."""
    told = result["summary"]
    yield (
        f"Step times of {told['rows']} small models on this CPU, calibrated just before "
        f"({format_seconds(told['calibration_seconds'])}): predicted within "
        f"{told['median_error_fraction']:.1%} in the median, {told['largest_error_fraction']:.0%} at most. "
        f"{stamp(result)}"
    )


def real_lines(result: dict[str, Any]) -> Iterator[str]:
    """Plans and peers, all really run."""
    peers = [name for name in result["rows"][0]["ways"] if name not in ("ours", "compiled, all budget")]
    summary = result["summary"]
    yield (
        "Plans beside what else one can do, all really run on this CPU, one after another: measured step time "
        "over that of the plan, in brackets how far the prediction of the plan was off. **over**: its measured "
        "peak is over the budget; –: nothing found or nothing fits (where even optimizer state does not, no "
        f"plan is either). {stamp(result)}"
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
    yield ""
    yield (
        f"Plans found: {summary['ours_feasible']} of {summary['cases']}, all "
        f"{summary['ours_measured_within_budget']} measured within the budget; the fastest measured in "
        f"{summary['ours_fastest_measured']}. Step times of all ways are predicted within "
        f"{summary['step_error_median']:.1%} in the median."
    )


def _beside(way: dict[str, Any] | None, ours: dict[str, Any] | None) -> str:
    if way is None or "failed" in way:
        return "–"
    over = "" if way["measured_within_budget"] else " **over**"
    if ours is None:
        return f"{format_seconds(way['measured_step_seconds'])}{over}"
    return f"× {way['measured_step_seconds'] / ours['measured_step_seconds']:.2f}{over}"


def plan_lines(result: dict[str, Any]) -> Iterator[str]:
    """Plans beside rules that people use."""
    peers = list(result["rows"][0]["peers"])
    yield (
        f"Plans beside one rule for all blocks and the largest micro-batch that fits, on {result['device']}: "
        "time over plain training's, which does not fit; all predicted, each with a capture of the real thing. "
        "In brackets what is used of the budget; **over** is over it; –: the rule says nothing of such a "
        "model, or no plan fits. The second plan may use the host's memory too "
        f"({format_bytes(result['host_bytes'])}), which no GPU has shown. {stamp(result)}"
    )
    yield ""
    yield f"| model | budget | plan | with the host | {' | '.join(peers)} |"
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
    means, means_with_host = (
        ", ".join(f"{peer} {each[peer]['geometric_mean_speedup']:.2f}" for peer in peers)
        for each in (summary, beside)
    )
    yield ""
    yield (
        f"Within the budget: {summary['ours_within_budget']} of {summary['cases']} plans. Geometric mean of "
        f"the speed over each rule, where it is within the budget: {means}. With the host's memory: "
        f"{beside['ours_within_budget']} of {beside['cases']}; {means_with_host}."
    )


def planner_lines(result: dict[str, Any]) -> Iterator[str]:
    """Plans beside torch's sac_milp."""
    name = "sac_milp, largest micro-batch"
    found = result["summary"][name]
    left_out = result["not_run_for_lack_of_time"]
    yield (
        f"Plans beside torch's `sac_milp` with the largest micro-batch at which it finds a solution, on "
        f"{result['device']}, same prices: {found['within_budget']} of its {found['found_a_solution']} "
        "solutions keep the budget, by captures with them applied. So beside each stands our plan for the "
        f"bytes that it takes; –: nothing found. {stamp(result)}"
        + (f" Not run, for lack of time: {', '.join(left_out)}." if left_out else "")
    )
    yield ""
    yield "| model | budget | plan | sac_milp | takes of the budget | plan for what it takes |"
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


def schedule_lines(result: dict[str, Any]) -> Iterator[str]:
    """Plans beside published schedules."""
    yield (
        "Plans beside schedules that MONeT and DTR published and measured; ours are predicted for their GPU, "
        "all in allocated bytes and in time over plain training's, whole batches. What is known to differ "
        f"stands with each case in the JSON. –: no plan allocates so little. {stamp(result)}"
    )
    yield ""
    yield "| model | schedule | memory of plain | its time | plan, same bytes | same fraction | reached |"
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


def overhead(told: dict[str, Any] | None) -> str:
    if told is None:
        return "–"
    return f"{told['overhead']:+.1%}".replace("%", " %") + ("" if told["within_budget"] else " **over**")


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
        f"({machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"commit {commit}; `{result['command']}`)"
    )


if __name__ == "__main__":
    sys.exit(main())
