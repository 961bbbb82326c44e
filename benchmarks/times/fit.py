"""Factors of kernel classes and fractions of GPUs' peaks, fitted to measured steps, and their cross-validation.

    python benchmarks/times/fit.py FILE.csv.gz [FILE.csv.gz …] [--write]

The files have the kernels of measured steps: `vision.py`, `forward.py` and others write them with `--kernels
FILE`. `kernel_fit.py` has the model. In the cross-validation, whole families of models are held out, and then
whole GPUs: these are predicted with the fractions of others of their generation and kind of memory. `--write`
writes `data/kernel_factors.csv` and `data/gpu_fractions.csv`.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

sys.path.insert(0, str(Path(__file__).parent.parent))
from brimful.cost.kernels.factors import memory_kind
from brimful.cost.uncertainty import DEVIATIONS, SPREADS, STEP_SPREAD
from brimful.devices import Device, find_device
from machine import keep
from times.archive import read_steps
from times.kernel_fit import ATTENTION, OFFSET_SOURCES, OLD_ATTENTION, Numbers, Table
from times.summary import by, summary_of

FOLDS = 4
VISIBLE = 0.03
"""A class counts as seen in a row from this part of its time on."""
LEAST_SPREAD = 0.05
UNSEEN_SPREAD = 0.5
"""Of a class that nothing measured shows. In the cross-validation, rows of a class that the rest does not show
are off by this much: `errors_of_unseen_classes` in the result, the root of the mean square over families."""
MOST_ERROR = 0.7
"""Errors beyond count as this: a row may have been disturbed."""
LEAST_ROWS, LEAST_FAMILIES = 10, FOLDS
"""A class that fewer rows or families show has at least `UNSEEN_SPREAD`."""
DOMINATING = 0.3
"""Part of a row's time from which on its error is taken for that of a class."""
ASSUMED = {"half": 0.9, "tf32": 0.85, "fp32": 0.85, "attention": ATTENTION}
"""Fractions of products in types that no measurement of a GPU shows."""
ASSUMED_ATTENTION = {"Ampere HBM": 0.5, "Hopper HBM": 0.3, "Blackwell HBM": 0.14}
"""The same of fused attention by architecture and memory. FlashAttention-2, forward and backward: 50 to 73 % of
an A100's peak at its best (arXiv 2307.08691), 35 % of an H100's (Shah et al., "FlashAttention-3", arXiv
2407.08608), 259 to 346 TFLOP/s on a B200 (Dao-AILab/flash-attention, issue 1589)."""
ASSUMED_CONVOLUTION = {"convolution_half": 1.0, "convolution_fp32": 1.0, "convolution_spread": 0.0}
"""Convolutions relative to products, where no probe showed more than the factors of their classes do."""
PROBED = {
    "Hopper HBM": {
        "fp32": 0.765,
        "convolution_half": 0.576,
        "convolution_fp32": 0.686,
        "convolution_spread": 0.4,
    }
}
"""What a calibration measured on GPUs of an architecture and memory, where no published time shows it: an H100
SXM (benchmarks/results/gpu_calibration.json, by `gpu/step_times.py`, "probed")."""
GPU_SPREAD = 0.05
"""Standard deviation of the logarithm of what all kernels of a GPU with measurements share. Assumed."""
DATA = Path(__file__).parents[2] / "src" / "brimful" / "data"


CONSTANTS = ("kernel_seconds", "cached_fraction", "place_operations")

NOT_FITTED = {
    "fused_moe": "its host waits for the GPU in every expert",
    "multi_token_attention": "its host waits for the GPU",
    "sparse_multi_token_attention": "its host waits for the GPU",
    "mobileone_s3": "measured after its branches were merged into one convolution",
}
"""Models and blocks whose time is not that of their kernels, and why."""


class Fold(NamedTuple):
    """What was predicted for rows that were held out."""

    parameters: Numbers
    held: NDArray[np.bool_]
    """(S,)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="kernels of measured steps")
    parser.add_argument("--write", action="store_true", help="write the tables in src/brimful/data")
    options = parser.parse_args()
    steps = [step for path in options.files for step in read_steps(path)]
    table = Table([step for step in steps if step.model not in NOT_FITTED])
    parameters = table.fit()
    folds = _folds(table, parameters)
    held_out = _held_out(table, folds)
    rows, modelled = _rows(table, held_out), modelled_steps(table)
    shares = table.shares(parameters)
    errors = np.log(held_out / table.measured)
    spreads = _class_spreads(table, shares, errors, modelled)
    factors = _factors(table, parameters, shares, spreads, folds)
    fractions = _fractions(table, parameters)
    gpus_held_out = _gpus_held_out(table, parameters)
    gpu_errors = _gpu_errors(table, parameters, gpus_held_out)
    other_gpu_spread = float(np.sqrt(np.mean(np.square(list(gpu_errors.values())))))
    uncertainty = Uncertainty(table, parameters, held_out, folds, other_gpu_spread)
    content: dict[str, Any] = {
        "steps": len(table.steps),
        "not_fitted": NOT_FITTED,
        "kernel_seconds": table.unpack(parameters).kernel_seconds,
        "cached_fraction": table.unpack(parameters).cached,
        "place_operations": table.unpack(parameters).place_operations,
        "factors": factors,
        "fractions": fractions,
        "offsets": dict(
            zip(map(" ".join, table.offsets), table.unpack(parameters).offsets.round(3), strict=True)
        ),
        "in_sample": summary_of(_rows(table, table.predict(parameters))),
        "families_held_out": summary_of(rows),
        "by_source": by(rows, "source"),
        "ratios_of_gpus": ratios([row for row in rows if row["source"] in OFFSET_SOURCES]),
        "gpus_held_out": by(_rows(table, gpus_held_out), "gpu"),
        "errors_of_gpus_held_out": gpu_errors,
        "errors_of_unseen_classes": _unseen_errors(table, shares, errors, folds),
        "other_gpu_spread": other_gpu_spread,
        "coverage_of_90_percent_intervals": uncertainty.coverage(),
        "pairs_of_layouts": len(uncertainty.pairs),
        "widening_of_differences": uncertainty.widening(),
        "by_gpu": by(rows, "gpu"),
        "by_variant": by(rows, "variant"),
        "by_family": by(rows, "family"),
    }
    for name, each in content.items():
        if name not in ("factors", "by_family", "not_fitted"):
            print(name, json.dumps(each, indent=1))
    files = " ".join(sorted(path.name for path in options.files))
    keep("times_fit.json", f"python benchmarks/times/fit.py {files}", content, "scipy")
    if options.write:
        _write("kernel_factors.csv", "kernel", factors)
        _write("gpu_fractions.csv", "gpus", _fraction_rows(fractions, other_gpu_spread))
        constants = {name: content[name] for name in CONSTANTS} | {"widening": uncertainty.widening()}
        _write("kernel_constants.csv", "name", {name: {"value": f"{x:.4g}"} for name, x in constants.items()})


def _folds(table: Table, start: Numbers) -> list[Fold]:
    """The parameters of each fold, fitted to other families than those it holds out."""
    families = sorted(set(table.families))
    np.random.default_rng(0).shuffle(families)
    held = [np.isin(table.families, families[fold::FOLDS]) for fold in range(FOLDS)]
    return [Fold(table.fit(~each, start), each) for each in held]


def _held_out(table: Table, folds: Sequence[Fold]) -> Numbers:
    """Each step predicted by parameters fitted to other families, (S,)."""
    predicted = np.zeros(len(table.steps))
    for fold in folds:
        predicted[fold.held] = table.predict(fold.parameters)[fold.held]
    return predicted


def _gpus_held_out(table: Table, start: Numbers) -> Numbers:
    """Each step predicted by parameters fitted to steps on other GPUs, (S,)."""
    predicted = np.zeros(len(table.steps))
    on = np.array([step.gpu for step in table.steps])
    for gpu in table.gpus:
        parameters = table.fit(on != gpu, start)
        others = {name: each for name, each in _fractions(table, parameters).items() if name != gpu}
        rows, device = _fraction_rows(others), find_device(gpu)
        kind = memory_kind(device)
        found = rows.get(f"{device.architecture} {kind}") or _default_fractions(kind)
        predicted[on == gpu] = table.predict(table.with_fractions(parameters, gpu, found))[on == gpu]
    return predicted


def _default_fractions(kind: str) -> dict[str, float]:
    """Fractions of a GPU of whose generation nothing was measured."""
    with (DATA / "gpu_fractions.csv").open(encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            if not (cells["gpus"] or cells["architecture"]) and cells["memory"] == kind:
                return {name: float(cells[name]) for name in ("bandwidth", *ASSUMED)}
    raise KeyError(kind)


def modelled_steps(table: Table) -> NDArray[np.bool_]:
    """Steps that contain nothing but what is modelled, (S,)."""
    return np.array([step.source not in (*OFFSET_SOURCES, *OLD_ATTENTION) for step in table.steps])


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Errors of the ratio of two GPUs on one model, the larger over the smaller, less 1."""
    groups: dict[tuple[str, bool], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["model"], "16" in row["variant"]].append(row)
    errors = []
    for one, other in chain.from_iterable(combinations(group, 2) for group in groups.values()):
        predicted, measured = (
            one[f"{kind}_seconds"] / other[f"{kind}_seconds"] for kind in ("predicted", "measured")
        )
        errors.append(max(predicted / measured, measured / predicted) - 1)
    if not errors:
        return {"pairs": 0}
    return {
        "pairs": len(errors),
        "median_error": round(float(np.median(errors)), 4),
        "p90_error": round(float(np.quantile(errors, 0.9)), 4),
    }


class Uncertainty:
    """How far held-out predictions are off, in standard deviations that other folds' errors claim."""

    def __init__(
        self, table: Table, parameters: Numbers, held_out: Numbers, folds: Sequence[Fold], gpu_spread: float
    ) -> None:
        self._table, self._held_out, self._folds = table, held_out, folds
        errors, modelled = np.log(held_out / table.measured), modelled_steps(table)
        host = _host_shares(table, held_out, folds)
        shares = table.shares(parameters) * (1 - host)[:, None]
        self._seconds = shares * held_out[:, None]
        self._spreads = np.zeros(shares.shape)
        for fold in folds:
            self._spreads[fold.held] = _class_spreads(table, shares, errors, modelled & ~fold.held)
        of_gpu = np.array([GPU_SPREAD if each else gpu_spread for each in _on_modelled_gpus(table)])
        variances = ((self._spreads * shares) ** 2).sum(1) + (SPREADS["host"] * host) ** 2 + of_gpu**2
        self.steps = abs(errors) / np.sqrt(variances)
        self.with_offsets = abs(errors + np.log(table.offset(parameters))) / np.sqrt(variances)
        self.pairs = _pairs(table)
        self.differences = np.array([self._difference(*pair) for pair in self.pairs])

    def _difference(self, one: int, other: int) -> float:
        more = self._seconds[one] - self._seconds[other]
        predicted = self._held_out[one] - self._held_out[other]
        measured = self._table.measured[one] - self._table.measured[other]
        variance = ((self._spreads[one] * more) ** 2).sum() + (GPU_SPREAD * predicted) ** 2
        variance += (STEP_SPREAD * self._held_out[one]) ** 2
        return float(abs(predicted - measured) / np.sqrt(variance))

    def widening(self, chosen: NDArray[np.bool_] | None = None) -> float:
        """The factor by which intervals of differences have to be wider to cover 90 % of the chosen pairs."""
        differences = self.differences if chosen is None else self.differences[chosen]
        return float(np.quantile(differences, 0.9) / DEVIATIONS)

    def coverage(self) -> dict[str, float]:
        """Fraction of measured times and differences within the interval that claims 90 %."""
        covered = self.steps <= DEVIATIONS
        sources = np.array([step.source for step in self._table.steps])
        found = {source: covered[sources == source].mean() for source in sorted(set(sources.tolist()))}
        found["all"] = covered.mean()
        found["gpus_with_the_factor_of_each_model"] = (
            self.with_offsets[sources == "gpus"] <= DEVIATIONS
        ).mean()
        inside = np.zeros(len(self.pairs), dtype=bool)
        for fold in self._folds:
            held = np.array([fold.held[one] for one, _ in self.pairs], dtype=bool)
            if held.any():
                inside[held] = self.differences[held] <= DEVIATIONS * self.widening(~held)
        found["differences_of_layouts"] = inside.mean()
        return {name: round(float(each), 3) for name, each in found.items()}


def _gpu_errors(table: Table, parameters: Numbers, predicted: Numbers) -> dict[str, float]:
    """Median logarithm of predicted / measured on each GPU that was held out, with the factor of each model of
    `OFFSET_SOURCES`."""
    errors = np.log(predicted * table.offset(parameters) / table.measured)
    on = np.array([step.gpu for step in table.steps])
    return {gpu: round(float(np.median(errors[on == gpu])), 3) for gpu in table.gpus}


def _pairs(table: Table) -> list[tuple[int, int]]:
    """Steps of one model and batch in two layouts."""
    found: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for index, step in enumerate(table.steps):
        if step.source == "vision":
            found[step.model, step.gpu, step.batch_size].append(index)
    return [(each[0], each[1]) for each in found.values() if len(each) == 2]


GROUPS = {
    "products": ("matmul", "batched_matmul", "attention", "pointwise", "convolution", "other_arithmetic"),
    "special": ("grouped", "depthwise", "stem", "matmul_unaligned", "batched_matmul_unaligned"),
}
"""Classes whose errors are alike, by the beginnings of their names; those that memory limits are the third."""


def _group(name: str) -> str:
    if any(name.startswith(beginning) for beginning in GROUPS["special"]) or "unaligned" in name:
        return "special"
    is_product = any(name.startswith(beginning) for beginning in GROUPS["products"])
    return "products" if is_product else "memory"


def _spreads(classes: Sequence[str], shares: Numbers, errors: Numbers) -> Numbers:
    """The standard deviation of each class's error, from those of steps: error² ≈ Σ (share · spread)² + rest².

    Classes of one group have the same; a single class would be confounded with those that occur beside it.
    """
    groups = sorted({_group(name) for name in classes})
    squares = np.stack(
        [(shares[:, [_group(name) == group for name in classes]] ** 2).sum(1) for group in groups], axis=1
    )
    bounded = np.minimum(abs(errors), MOST_ERROR) ** 2
    variances, _ = nnls(squares, bounded)
    of_group = dict(zip(groups, np.sqrt(variances), strict=True))
    return np.array([of_group[_group(name)] for name in classes])


def _class_spreads(table: Table, shares: Numbers, errors: Numbers, chosen: NDArray[np.bool_]) -> Numbers:
    """The standard deviation of each class's error as the chosen rows show it, (C,)."""
    spreads = np.maximum(_spreads(table.classes, shares[chosen], errors[chosen]), LEAST_SPREAD)
    return np.where(_are_seen(table, shares, chosen), spreads, np.maximum(spreads, UNSEEN_SPREAD))


def _are_seen(table: Table, shares: Numbers, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether enough of the chosen rows and families show each class, (C,)."""
    visible = (shares > VISIBLE) & chosen[:, None]
    families = np.array([np.unique(table.families[each]).size for each in visible.T])
    return (visible.sum(0) >= LEAST_ROWS) & (families >= LEAST_FAMILIES)


def _unseen_errors(table: Table, shares: Numbers, errors: Numbers, folds: Sequence[Fold]) -> dict[str, float]:
    """Median logarithm of predicted / measured of held-out families that a class dominates which the other
    folds do not show, and the root of their mean square."""
    modelled, found = modelled_steps(table), {}
    for fold in folds:
        unseen = ~_are_seen(table, shares, ~fold.held)
        for index in np.flatnonzero(unseen):
            rows = modelled & fold.held & (shares[:, index] > DOMINATING)
            families = {str(each) for each in table.families[rows]}
            medians = {each: np.median(errors[rows & (table.families == each)]) for each in sorted(families)}
            name = table.classes[index]
            found |= {f"{name} of {each}": round(float(error), 3) for each, error in medians.items()}
    return found | {"root_mean_square": round(float(np.sqrt(np.mean(np.square(list(found.values()))))), 3)}


def _host_shares(table: Table, held_out: Numbers, folds: Sequence[Fold]) -> Numbers:
    """The part of each held-out prediction in which the GPU waits for the host, (S,)."""
    work = np.zeros(len(table.steps))
    for fold in folds:
        work[fold.held] = table.work(fold.parameters)[fold.held]
    return 1 - work / held_out


def _on_modelled_gpus(table: Table) -> list[bool]:
    """Of each step, whether its GPU has steps without what is not modelled."""
    modelled = {step.gpu for step in table.steps if step.source not in OFFSET_SOURCES}
    return [step.gpu in modelled for step in table.steps]


def _factors(
    table: Table, parameters: Numbers, shares: Numbers, spreads: Numbers, folds: Sequence[Fold]
) -> dict[str, dict[str, float]]:
    """A row of `data/kernel_factors.csv` per class."""
    passes, slowdowns = table.unpack(parameters)[:2]
    found = {}
    for index, name in enumerate(table.classes):
        rows = int((shares[:, index] > VISIBLE).sum())
        found[name] = {
            "passes": round(float(passes[index]), 3),
            "slowdown": round(float(slowdowns[index]), 3),
            "spread": round(float(spreads[index]), 3),
            "rows": rows,
            "share_of_time": round(float(shares[:, index].mean()), 4),
            "passes_of_folds": sorted(
                round(float(table.unpack(fold.parameters)[0][index]), 2) for fold in folds
            ),
            "slowdowns_of_folds": sorted(
                round(float(table.unpack(fold.parameters)[1][index]), 2) for fold in folds
            ),
        }
    return found


def _fractions(table: Table, parameters: Numbers) -> dict[str, dict[str, float]]:
    """What each GPU reaches of its peaks."""
    bandwidth, arithmetic = table.unpack(parameters)[5:7]
    found = {
        gpu: {
            "bandwidth": round(float(each), 3),
            "steps": sum(step.gpu == gpu for step in table.steps),
            "modelled": sum(step.gpu == gpu and step.source not in OFFSET_SOURCES for step in table.steps),
        }
        for gpu, each in zip(table.gpus, bandwidth, strict=True)
    }
    for (gpu, name), each in zip(table.arithmetics, arithmetic, strict=True):
        found[gpu][name] = round(float(each), 3)
    return found


def _fraction_rows(fractions: dict[str, dict[str, float]], spread: float = 0.0) -> dict[str, dict[str, Any]]:
    """Rows of `data/gpu_fractions.csv`: one per GPU, and one per architecture and kind of memory."""
    groups: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    rows: dict[str, dict[str, Any]] = {}
    device_of: dict[tuple[str, str], Device] = {}
    for gpu, found in fractions.items():
        device = find_device(gpu)
        device_of[device.architecture, memory_kind(device)] = device
        groups[device.architecture, memory_kind(device)].append(found)
        own = GPU_SPREAD if found["modelled"] else round(spread, 3)
        rows[gpu] = {**_assumed(device), **found, "spread": own, "rows": found["steps"]}
        rows[gpu]["attention_spread"] = 0.0 if "attention" in found else UNSEEN_SPREAD
    for (architecture, memory), members in groups.items():
        means = {
            name: round(float(np.exp(np.mean([np.log(each[name]) for each in members if name in each]))), 3)
            for name in ("bandwidth", *ASSUMED)
            if any(name in each for each in members)
        }
        about = {"architecture": architecture, "memory": memory, "spread": round(spread, 3)}
        about["attention_spread"] = 0.0 if "attention" in means else UNSEEN_SPREAD
        count = sum(each["steps"] for each in members)
        rows[f"{architecture} {memory}"] = {
            **_assumed(device_of[architecture, memory]),
            **means,
            **about,
            "rows": count,
        }
    return rows


def _assumed(device: Device) -> dict[str, float]:
    """Fractions of a GPU that no measurement shows."""
    generation = f"{device.architecture} {memory_kind(device)}"
    attention = ASSUMED_ATTENTION.get(generation, ATTENTION)
    return ASSUMED | ASSUMED_CONVOLUTION | {"attention": attention} | PROBED.get(generation, {})


def _rows(table: Table, predicted: Numbers) -> list[dict[str, Any]]:
    return [
        step._asdict() | {"predicted_seconds": float(each)}
        for step, each in zip(table.steps, predicted, strict=True)
    ]


def _write(name: str, key: str, rows: dict[str, dict[str, Any]]) -> None:
    """Replace the rows of a table that were fitted; assumed ones stay."""
    path, source = DATA / name, "benchmarks/times/fit.py"
    with path.open(encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or ())
        table = {cells[key] or f"{cells['architecture']} {cells['memory']}": cells for cells in reader}
    kept = {each: cells for each, cells in table.items() if cells["source"] != source}
    for each, values in rows.items():
        fitted = {column: str(values[column]) for column in columns if column in values}
        own = "" if "architecture" in values else each
        known = {"unit": table[each]["unit"]} if "unit" in columns else {}
        origin = "assumed" if values.get("rows") == 0 else source
        kept[each] = {key: own, "source": origin, **known, **fitted}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept.values())


if __name__ == "__main__":
    main()
