"""What the tables of `tables.md` show beside the fields of results: records by name of the table."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from brimful.utils.quantities import format_bytes, format_seconds
from walk import BEFORE_COMMIT, WALK

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
Record = Mapping[str, Any]


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def stamp(result: Record) -> str:
    """Machine, versions, commit and command of a result."""
    machine = result["machine"]
    commit = result["commit"][:9] + "+" * result["commit"].endswith("+")  # + if files differed from it
    return (
        f"{machine['cpu']}, threads: {machine['threads']}, torch {machine['torch']}, commit {commit}; "
        f"`{result['command']}`"
    )


def percent(fraction: float) -> str:
    """Signed, with two decimals."""
    if 0 < abs(fraction) < 1e-4:
        return "< 0.01 %"
    return f"{fraction:+.2%}".replace("%", " %") if fraction else "0"


def joined(cells: Iterable[str]) -> str:
    """Cells of columns that only the result knows."""
    return " | ".join(cells)


def accuracy(_result: Record) -> Record:
    """Summaries of all kinds of comparisons."""
    names = ("gpu_truth", "litgpt", "cpu_zoo", "job_zoo", "plan_measured")
    names += ("step_time", "step_time_xeon", "step_time_unprepared")
    found = {name: load(name)["summary"] for name in names}
    plans = found["plan_measured"]
    without_plan = plans["cases"] - plans["ours_feasible"]
    return found | {"h100": h100(), "times_fit": load("times_fit"), "without_plan": without_plan}


def h100() -> Record:
    """Errors of the recorded steps: of memory, and median, largest and covered ones of time."""
    steps, times = load("gpu_record")["configurations"], load("gpu_times")["rows"]
    recorded = [abs(step["error_fractions"]["step_seconds"]) for step in steps]
    of_time = {"recorded": (statistics.median(recorded), max(recorded))}
    for kind in ("uncalibrated", "calibrated"):
        errors = [abs(row[kind]["error_fraction"]) for row in times]
        covered = sum(row[kind]["is_covered"] for row in times)
        of_time[kind] = (statistics.median(errors), max(errors), covered)
    return load("gpu_predicted")["summary"] | of_time | {"steps": len(steps)}


def gpu_steps(_result: Record) -> Record:
    found = h100()
    quantities = {
        "peak allocated": "peak_allocated_bytes",
        "peak reserved": "peak_reserved_bytes",
        "with the CUDA context": "peak_device_bytes",
    }
    rows = (
        {"what": what, "before": found["before"][key], "now": found["now"][key]}
        for what, key in quantities.items()
    )
    return {"h100": found, "rows": rows}


def gpu_mechanisms(result: Record) -> Record:
    """Mechanisms whose memory was measured."""
    rows = []
    for row in result["rows"]:
        if "mechanism" in row and "measured_peak_allocated_bytes" in row:
            difference = row["largest_relative_difference_of_losses"]
            gib = row["measured_peak_allocated_bytes"] / GIB
            rows.append(row | {"gib": gib, "difference": f"{difference:.1e}" if difference else "none"})
    return {"rows": rows}


def gpu_plans(result: Record) -> Record:
    """Plans beside ways by hand, each in the memory of a smaller GPU."""
    ways = ("ours", "recompute everything", "every second block", "torchtitan selective", "attention only")
    ways += ("plain",)
    rows = (
        row
        | {"gib": row["budget_bytes"] / GIB, "cells": joined(_gpu_way(row["ways"].get(way)) for way in ways)}
        for row in result["rows"]
    )
    not_measured = ", ".join(each.partition(":")[0] for each in result["skipped"])
    return {"ways": joined(ways), "marks": "--:|" * len(ways), "rows": rows, "not_measured": not_measured}


def _gpu_way(found: Record | None) -> str:
    if found is None:
        return "–"
    if "measured_step_seconds" in found:
        size = found["measured_peak_reserved_bytes"] / GIB
        return f"{found['measured_step_seconds'] * 1e3:.0f} ms, {size:.1f} GiB"
    return "out of memory" if "out_of_memory" in found else "no setting"


def gpu_truth(result: Record) -> Record:
    """All estimators, and the runs whose error has an explanation."""
    estimators = ({"name": name, **found} for name, found in result["summary"].items())
    rows = (row | {"short": row["model"].rpartition("/")[2]} for row in result["rows"] if row["explanation"])
    return {"estimators": estimators, "rows": rows}


def published(result: Record) -> Record:
    """Rows of articles; one that ran out of memory has a verdict in the place of an error."""
    rows = []
    for row in result["rows"]:
        size = row["published_device_bytes"]
        error = row["predicted_verdict"] if size is None else f"{row['error_fraction']:+.1%}"
        if not row["variant"]:
            rows.append(row | {"published": "OOM" if size is None else format_bytes(size), "error": error})
    return {"rows": rows}


def guides(result: Record) -> Record:
    """Studies with published figures: how many, and the median error of those of memory and of speed."""
    rows = []
    for study in result["studies"]:
        found = result["summary"][study["name"]]
        if found["peak"]["rows"] or found["speed"]["rows"]:
            errors = {
                f"{which}_error": "–" if found[which]["median"] is None else f"{found[which]['median']:.1%}"
                for which in ("peak", "speed")
            }
            unknown = [note for note in study["notes"] if "small scale" not in note]
            rows.append(found | errors | {"name": study["name"], "unknown": " ".join(unknown[:1]) or "–"})
    return {"rows": rows}


def published_names(result: Record) -> Record:
    """Models by name beside public figures; where memory ran out, verdicts in the place of errors."""
    rows = []
    for row in result["rows"]:
        size, other = row["published_bytes"], row["as_published"]
        errors = [
            each["predicted_verdict"] if size is None else f"{each['error_fraction']:+.1%}"
            for each in (row, other)
        ]
        trained = "all" if row["lora"] is None else "LoRA" if row["quantize"] is None else "QLoRA"
        computed = {
            "short": row["name"].rpartition("/")[2],
            "trained": trained + ", prepared by peft" * row["prepared"],
            "published": "OOM" if size is None else f"{size / 1e9:.2f} GB",
            "predicted": f"{row['predicted_bytes'] / 1e9:.2f} GB",
            "error": errors[0],
            "error_as_published": errors[1],
        }
        rows.append(row | computed)
    return {"rows": rows}


def permissions(result: Record) -> Record:
    """Suggestions of plans for a GPU, each gain beside that of its own capture."""
    rows = [
        {
            "job": job["job"],
            "plan": job["settings"],
            "gains": "; ".join(
                f"`{each['flag']}` {each['predicted_gain']:.1%} ({each['gain_of_own_capture']:.1%})"
                for each in job["suggestions"]
            ),
            "share": job["suggesting_seconds"] / job["planning_seconds_without"],
        }
        for job in result["rows"]
    ]
    return {"rows": rows}


def permissions_cpu(result: Record) -> Record:
    """Suggestions of plans for a CPU, predicted beside measured."""
    rows = [{"job": job["job"], **each} for job in result["on_cpu"] for each in job["suggestions"]]
    return {"rows": rows}


def generation(result: Record) -> Record:
    """Generations on a CPU, with the largest differences in bytes."""
    rows = [
        row | {"beams": "greedy" if row["num_beams"] == 1 else f"{row['num_beams']} beams"}
        for row in result["rows"]
    ]

    def largest(what: str) -> int:
        return max(abs(row[f"predicted_{what}_bytes"] - row[f"measured_{what}_bytes"]) for row in rows)

    summary = {"cases": len(rows), "largest": largest("peak"), "largest_of_last": largest("last_step")}
    return {"rows": rows, "summary": summary}


def planted(result: Record) -> Record:
    """Planted faults, with what names them."""
    rows = [
        {
            "script": row["script"],
            "fault": row["fault"],
            "found_as": ", ".join(f"`{check}`" for check in row["checks"] if check in named) or "no",
        }
        for row in result["rows"]
        if row["fault"]
        for named in [{each["check"] for each in row["findings"]} if row["found"] else set()]
    ]
    return {"rows": rows}


def public_runs(result: Record) -> Record:
    """Watched public scripts, with the checks that found something."""
    rows = [
        row
        | {
            "results": "equal" if row["results_equal"] else "differ",
            "found": ", ".join(f"`{each['check']}`" for each in row["findings"]) or "none",
        }
        for row in result["rows"]
        if row["runs"]
    ]
    return {"rows": rows}


def cpu_zoo(result: Record) -> Record:
    """Architectures that are more than 1 % off."""
    rows = []
    for row in result["rows"]:
        if abs(row["error_fraction"]) > 0.01:
            temporaries = ", ".join(each["op"] for each in row["temporaries_at_peak"])
            rows.append(row | {"why": "; ".join(row["uncertain_ops"]) or temporaries})
    return {"rows": rows}


def cpu_truth(result: Record) -> Record:
    """The baseline of each model, with the largest error of its variants."""
    plain = (row for row in result["rows"] if row["variant"] == "plain")
    errors: dict[str, list[float]] = {}
    for row in result["rows"]:
        errors.setdefault(row["model"], []).append(row["error_fraction"])
    return {"rows": (row | {"worst": max(errors[row["model"]], key=abs)} for row in plain)}


def job_zoo(result: Record) -> Record:
    """Whole jobs that are more than 1 % off."""
    return {"off": (row for row in result["rows"] if abs(row["error_fraction"] or 0) > 0.01)}


def refused(result: Record) -> Record:
    rows = (row for row in result["rows"] if row["status"] == "refused")
    return {"refused": (row | {"message": _sentence(row["why"])} for row in rows)}


def _sentence(message: str) -> str:
    """A message in one line, without what would end a table's cell."""
    message = message.replace("CertificateError", "EquivalenceError")  # its name when this was measured
    line = " ".join(message.replace("|", "/").split())
    return line if len(line) <= 240 else f"{line[:239]}…"


def walk(result: Record) -> Record:
    """A newcomer's jobs, before and after."""
    by_name = {row["name"]: row for row in result["rows"]}
    rows = (
        {"workload": workload, "before": before, "now": "; ".join(_now(by_name[name]) for name in names)}
        for workload, before, names in WALK
    )
    return {"before_commit": BEFORE_COMMIT, "walk": rows}


def _now(row: Record) -> str:
    """What becomes of a job."""
    error, plan = row["error_fraction"], row["free"]
    said = row["status"] if error is None else percent(error)
    if row["status"] != "supported" and error is not None:
        said += f", splitting {row['status']}"
    return said if plan is None else f"{said}, plan {plan['true_bytes'] / plan['budget_bytes']:.0%} of budget"


def demo(result: Record) -> Record:
    return {"rows": [row | {"difference": _loss_difference(row)} for row in result["rows"]]}


def _loss_difference(row: Record) -> str:
    difference = row["largest_loss_difference_to_plain"]
    if difference == 0:
        return f"none in {row['steps']} steps"
    fused = row["settings"]["optimizer_implementation"] == "fused"
    return f"{difference:.1g} in {row['steps']} steps" + (", with the fused optimizer" if fused else "")


def step_time(_result: Record) -> Record:
    """Step times on CPUs, a row for each run."""
    rows = []
    for name in ("step_time", "step_time_xeon", "step_time_unprepared"):
        result = load(name)
        models = str(result["summary"]["rows"])
        if held_out := result["summary"].get("held_out"):
            models += (
                f" whole jobs as people write them; of these {held_out['rows']} held out: "
                f"{held_out['median_error_fraction']:.1%}"
            )
        rows.append(result | {"models": models, "stamp": stamp(result)})
    return {"rows": rows}


SOURCES = {
    "vision": "training steps of vision models in two layouts, RTX 3090",
    "forward": "forward passes of vision models, RTX 4090, RTX 5090, RTX PRO 6000",
    "ops": "single blocks, A100, H100, B200, RTX 3090, RTX 4090",
    "llm": "steps of language models under FSDP, 8 A100 or 8 H100",
    "gpus": "steps of ResNet-50, BERT and Transformer-XL, six GPUs",
}
"""What each source of measurements has."""


def gpu_time(fit: Record) -> Record:
    """Errors of families that were held out, by source, and how often intervals have the measured time."""
    covered = fit["coverage_of_90_percent_intervals"]
    return {
        "sources": (
            fit["by_source"][source] | {"about": about, "covered": covered[source]}
            for source, about in SOURCES.items()
        )
    }


def gpu_classes(fit: Record) -> Record:
    """The factors of kernel classes, most time first."""
    rows = []
    for name, row in sorted(fit["factors"].items(), key=lambda each: -each[1]["share_of_time"]):
        is_computing = row["slowdown"] != 1.0
        folds = row["slowdowns_of_folds" if is_computing else "passes_of_folds"]
        slowdown = f"{row['slowdown']:.2f}" if is_computing else "–"
        rows.append(row | {"name": name, "slowdown": slowdown, "least": folds[0], "most": folds[-1]})
    return {"classes": rows}


def gpu_fractions(fit: Record) -> Record:
    """What GPUs reach of their peaks."""
    unknown = dict.fromkeys(("bandwidth", "half", "tf32", "attention"))
    return {
        "gpus": (
            unknown | row | {"gpu": gpu, "held_out": fit["gpus_held_out"][gpu]}
            for gpu, row in fit["fractions"].items()
        )
    }


def plan_measured(result: Record) -> Record:
    """Plans and peers, all really run."""
    peers = [name for name in result["rows"][0]["ways"] if name not in ("ours", "compiled, all budget")]
    rows = []
    for row in result["rows"]:
        ours, plan = row["ways"]["ours"], "–"
        if ours is not None:
            plan = f"{format_seconds(ours['measured_step_seconds'])} ({percent(ours['step_error'])})"
        rows.append(row | {"plan": plan, "cells": joined(_beside(row["ways"][peer], ours) for peer in peers)})
    return {"peers": joined(peers), "marks": "--:|" * len(peers), "rows": rows}


def _beside(way: Record | None, ours: Record | None) -> str:
    if way is None or "failed" in way:
        return "–"
    over = "" if way["measured_within_budget"] else " **over**"
    if ours is None:
        return f"{format_seconds(way['measured_step_seconds'])}{over}"
    return f"× {way['measured_step_seconds'] / ours['measured_step_seconds']:.2f}{over}"


def plan_simulated(result: Record) -> Record:
    """Plans beside rules that people use."""
    peers = list(result["rows"][0]["peers"])
    rows = []
    for row in result["rows"]:
        ours = row["ours"]
        used = "" if ours is None else f" ({ours['peak_device_bytes'] / row['budget_bytes']:.0%})"
        cells = joined(_overhead(row["peers"][peer]) for peer in peers)
        plans = {"plan": _overhead(ours) + used, "with_host": _overhead(row["ours_with_host"])}
        rows.append(row | plans | {"cells": cells})
    summaries = {"plan": result["summary"], "plan with host memory": result["summary"]["with host memory"]}
    speedups = (
        found
        | {"name": name, "cells": joined(f"× {found[peer]['geometric_mean_speedup']:.2f}" for peer in peers)}
        for name, found in summaries.items()
    )
    heads = {"peers": joined(peers), "over_peers": joined(f"over {peer}" for peer in peers)}
    return heads | {"marks": "--:|" * len(peers), "rows": rows, "speedups": speedups}


def _overhead(way: Record | None) -> str:
    if way is None:
        return "–"
    return f"{way['overhead']:+.1%}".replace("%", " %") + ("" if way["within_budget"] else " **over**")


def plan_published(result: Record) -> Record:
    """Published schedules beside plans."""
    points = []
    for case in result["rows"]:
        for point in case["points"]:
            plans = {name: point[f"ours_at_the_{name}"] for name in ("same_bytes", "same_fraction")}
            ours = {name: plan and plan["overhead"] for name, plan in plans.items()}
            is_reached = all(each is not None and each <= point["published_overhead"] for each in ours.values())
            points.append(point | ours | {"case": case["case"], "is_reached": is_reached})
    return {"points": points}


def plan_time(result: Record) -> Record:
    """How long planning takes."""
    rows = []
    for row in result["rows"]:
        before, aim = (
            "" if row.get(name) is None else format_seconds(row[name])
            for name in ("before_cpu_seconds", "aim_wall_seconds")
        )
        faster = f"{row['before_over_after']:.1f}" if before else ""
        rows.append(row | {"before": before, "faster": faster, "aim": aim})
    return {"rows": rows}


def estimate_speed(result: Record) -> Record:
    """Time and memory of an estimate."""
    rows = []
    for row in result["rows"]:
        size = f"{row['micro_batch_size']}" + (f" × {row['seq_len']}" if row["seq_len"] else "")
        aims = result["targets"][row["model"]]
        rows.append(row | {"size": size, "aims": aims, "millions": row["parameters"] / 1e6})
    return {"rows": rows}


def zero(result: Record) -> Record:
    """Memory of the rank that takes most, under DeepSpeed's ZeRO."""
    return {
        "rows": (
            row
            | {
                "released": max(row["with_pauses_bytes"]),
                "measured": max(row["measured_peak_allocated_bytes"]),
            }
            for row in result["rows"]
        )
    }


def faults(result: Record) -> Record:
    """Training under faults."""
    outcomes = (row["outcomes"] for row in result["out_of_memory"]["rows"])
    same = sum(each.get("bit for bit the undisturbed run", 0) for each in outcomes)
    return {"same": same, "named": ({"name": name, **row} for name, row in result["others"].items())}


def attack(result: Record) -> Record:
    """Attacks by area, beside those on the code before."""
    before = load("attack_before")
    earlier = {row["area"]: row["failures"] for row in before["areas"]}
    areas = (row | {"earlier": earlier.get(row["area"])} for row in result["areas"])
    return {"before": before["attacked_commit"][:9], "earlier": before["total"], "areas": areas}


def silent_errors(result: Record) -> Record:
    """Programs by kind, on the code before and on the present one."""
    before = load("silent_errors_before")
    total, earlier = (Counter(row["verdict"] for row in each["rows"]) for each in (result, before))
    kinds = (
        {
            "kind": kind,
            "programs": sum(found.values()),
            "was": _verdicts(before["kinds"].get(kind, {})),
            "now": _verdicts(found),
        }
        for kind, found in result["kinds"].items()
    )
    return {
        "total": total.total(),
        "now": _verdicts(total),
        "earlier": earlier.total(),
        "before": before["src_commit"][:9],
        "was": _verdicts(earlier),
        "kinds": kinds,
    }


def _verdicts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(found.items())) or "–"


def public_scripts(result: Record) -> Record:
    """Public training scripts, with the part of the budget that their plan takes."""
    return {"verdicts": _verdicts(result["summary"]["verdicts"]), "rows": _scripts(result["rows"])}


def _scripts(rows: Iterable[Record]) -> Iterator[Record]:
    for row in rows:
        plan = row["plan"]
        computed: Record = dict.fromkeys(("budget_bytes", "of_budget", "planning"))
        if plan is not None:
            of_budget = plan["true_bytes"] / plan["budget_bytes"]
            planning = f"{plan['planning_seconds']:.1f} s"
            computed = {"budget_bytes": plan["budget_bytes"], "of_budget": of_budget, "planning": planning}
        yield {**row, **computed}


COMPUTED: dict[str, Callable[[Record], Record]] = {
    each.__name__: each
    for each in (
        *(accuracy, gpu_steps, gpu_mechanisms, gpu_plans, gpu_truth, published, cpu_zoo, cpu_truth, job_zoo),
        *(guides, published_names, generation, permissions, permissions_cpu, planted, public_runs),
        *(refused, walk, demo, step_time, gpu_time, gpu_classes, gpu_fractions, plan_measured, plan_simulated),
        *(plan_published, plan_time, estimate_speed, zero, faults, attack, silent_errors, public_scripts),
    )
}
"""By name of the table; the others show what is in the result alone."""
