"""What a training run leaves behind: JSON, tables, a plot, and its three answers in measured sentences.

``python -m bench.training_report RESULTS.json`` rebuilds the files beside it, or in ``--out``, and prints the
answers. The JSON may be compressed (``.json.gz``). No torch here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.record import stored_text
from bench.report import write_json
from bench.training_plots import length_label, plot_training
from bench.training_record import TrainingEntry, TrainingResults, TrainingRow

BASELINE = "materialised"
# Dao et al. 2022: GPT-2 trains so many times as fast at length 1024, against implementations of that year.
CLAIMED_SPEED_UP = {"gpt2-medium": 3.0}
# Relative. Right attentions differ by rounding: 6e-5 and 1.3e-3 in bf16 over 6 layers of width 256.
LOSS_TOLERANCE = 1e-3
# After a step, weights in bf16 have rounded apart: cuDNN against itself, chosen by SDPA and forced, 8e-4.
LATER_LOSS_TOLERANCE = 5e-3
GRAD_TOLERANCE = 0.02


# ---- answers ---------------------------------------------------------------------------------------------


def answers(results: TrainingResults) -> list[str]:
    """What the run says about speed-up, memory and utilisation, and whether all entrants trained alike."""
    lines = []
    for ours in results.names(ours=True):
        for model in results.models:
            rows = results.rows_of(model)
            for other in results.names():
                if other != ours:
                    lines += speed_up(model, rows, ours, other)
            lines += memory(model, rows, ours)
            lines += utilisation(results, model, rows, ours)
    return lines + [agreement(results)]


def speed_up(model: str, rows: list[TrainingRow], ours: str, other: str) -> list[str]:
    """Time of a step with another attention over that with ours, at each length where both ran."""
    both = [row for row in rows if _timed(row, ours) and _timed(row, other)]
    ratios = {row.seqlen: row.entry(other).median_ms / row.entry(ours).median_ms for row in both}
    parts = []
    if ratios:
        listed = ", ".join(f"{ratio:.2f} at {length_label(seqlen)}" for seqlen, ratio in ratios.items())
        parts.append(f"compared with {other}, a step with {ours} is so many times as fast: {listed}")
    if ratios and other == BASELINE and model in CLAIMED_SPEED_UP:
        claim = CLAIMED_SPEED_UP[model]
        reached = [seqlen for seqlen, ratio in ratios.items() if ratio >= claim]
        verdict = f"is reached at {_lengths(reached)}" if reached else "is not reached"
        parts.append(f"the factor {claim:g} of the articles {verdict}")
    parts += _failures(rows, other)
    return [f"Speed, {model}: {'; '.join(parts)}."] if parts else []


def _failures(rows: list[TrainingRow], name: str) -> list[str]:
    """Where an entrant did not run, in words."""
    parts = []
    for status, words in (("out of memory", "runs out of memory"), ("error", "fails")):
        at = [row.seqlen for row in rows if row.entry(name) is not None and row.entry(name).status == status]
        if at:
            parts.append(f"{name} {words} at {_lengths(at)}")
    return parts


def memory(model: str, rows: list[TrainingRow], ours: str) -> list[str]:
    """How the peak of a step grows with the length while its number of tokens stays."""
    lines = []
    for name in (ours, BASELINE):
        peaks = [(row, row.entry(name).peak_bytes) for row in rows if _timed(row, name)]
        peaks = [(row, peak) for row, peak in peaks if peak]
        same = [(row, peak) for row, peak in peaks if row.tokens == peaks[0][0].tokens]
        if len(same) < 2:
            continue
        (first, low), (last, high) = same[0], same[-1]
        spread = max(peak for _, peak in same) / min(peak for _, peak in same)
        growth = f"{high / low:.2f} times, for {last.seqlen / first.seqlen:.0f} times the length"
        line = (
            f"Memory, {model}: with {name} a step of {first.tokens} tokens peaks at {low / 2**30:.1f} GiB at "
            f"{length_label(first.seqlen)} and {high / 2**30:.1f} at {length_label(last.seqlen)}, {growth}"
        )
        if name == ours:
            line += f"; highest over lowest of all lengths {spread:.2f} (memory linear in the length: 1)"
        lines.append(line + ".")
    return lines


def utilisation(results: TrainingResults, model: str, rows: list[TrainingRow], ours: str) -> list[str]:
    """Model TFLOP/s of whole steps, as shares of a matrix product and of what the device is sold with."""
    done = [(row, row.entry(ours)) for row in rows if _timed(row, ours)]
    missing = "; ".join(_failures(rows, ours))
    if not done:
        return [f"Utilisation, {model}: {missing}."] if missing else []
    rates = [entry.tflops for _, entry in done]
    product, sold = results.ceilings["matmul_tflops"], results.metadata.get("datasheet_tflops")
    line = (
        f"Utilisation, {model}: {ours} trains at {_range(rates, '{:.4g}')} model TFLOP/s, "
        f"{_range([100 * rate / product for rate in rates], '{:.3g}')} % of the matrix product of this run "
        f"({product:.4g} TFLOP/s)"
    )
    if sold:
        shares = _range([100 * rate / sold for rate in rates], "{:.3g}")
        line += f" and {shares} % of the {sold:.4g} TFLOP/s of the data sheet"
    where = ", ".join(f"{entry.tflops:.4g} at {length_label(row.seqlen)}" for row, entry in done)
    return [f"{line}: {where}{'; ' if missing else ''}{missing}."]


def agreement(results: TrainingResults) -> str:
    """Largest differences between entrants that started from the same weights, against what bf16 explains."""
    first = _largest(results, lambda entry: entry.losses[:1])
    later = _largest(results, lambda entry: entry.losses[1:])
    grads = _largest(results, lambda entry: entry.grad_norms.values())
    if first is None or later is None or grads is None:
        return "Sanity: fewer than two entrants ran in any row, so there is nothing to compare."
    bounds = ((first, LOSS_TOLERANCE), (later, LATER_LOSS_TOLERANCE), (grads, GRAD_TOLERANCE))
    fine = all(found[0] <= bound for found, bound in bounds)
    return (
        f"Sanity: losses of the first step differ by {100 * first[0]:.2g} % at most ({first[1]}), of those "
        f"after it by {100 * later[0]:.2g} % ({later[1]}), norms of the first gradients of q, k and v by "
        f"{100 * grads[0]:.2g} % ({grads[1]}): {'within' if fine else 'NOT WITHIN'} "
        f"{', '.join(f'{100 * bound:g}' for _, bound in bounds)} %."
    )


def _largest(
    results: TrainingResults, numbers: Callable[[TrainingEntry], Iterable[float]]
) -> tuple[float, str] | None:
    """Largest relative spread of a number over the entrants of a row, and the row. A NaN is the largest."""
    found = []
    for row in results.rows:
        columns = [list(numbers(entry)) for entry in row.entries if entry.status == "ok"]
        if len(columns) < 2:
            continue
        for values in zip(*columns, strict=True):
            mean = sum(values) / len(values)
            spread = (max(values) - min(values)) / abs(mean) if mean else 0.0
            infinite = any(value != value for value in values)
            found.append((float("inf") if infinite else spread, f"{row.model} at {length_label(row.seqlen)}"))
    return max(found, default=None)


def _timed(row: TrainingRow, name: str) -> bool:
    entry = row.entry(name)
    return entry is not None and entry.timed


def _range(numbers: list[float], form: str) -> str:
    low, high = form.format(min(numbers)), form.format(max(numbers))
    return low if low == high else f"{low} to {high}"


def _lengths(seqlens: list[int]) -> str:
    labels = [length_label(seqlen) for seqlen in seqlens]
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


# ---- files -----------------------------------------------------------------------------------------------


def markdown(results: TrainingResults) -> str:
    """Metadata, the answers, four tables per model, and every failure in full."""
    lines = ["# flash_ext, training steps", ""]
    lines += [f"- {key}: {value}" for key, value in results.metadata.items()]
    lines += [f"- {key}: {value:.4g}" for key, value in results.ceilings.items()]
    lines += ["", "## Answers", "", *(f"- {line}" for line in answers(results))]
    tables: tuple[tuple[str, Callable[[TrainingEntry], str]], ...] = (
        ("tokens a second (spread)", _tokens_cell),
        ("model TFLOP/s (share of the matrix product)", _tflops_cell),
        ("peak memory, GiB (of it gone after the step)", _memory_cell),
        ("losses of the first steps; norms of the first gradients of q, k, v", _losses_cell),
    )
    for model in results.models:
        rows = results.rows_of(model)
        for title, cell in tables:
            lines += ["", f"## {model}, {title}", "", *_table(rows, results.names(), cell)]
    notes = [
        f"- {row.model} at {row.seqlen}, {entry.name} ({entry.status}): {' '.join(entry.text.split())}"
        for row in results.rows
        for entry in row.entries
        if entry.status != "ok"
    ]
    if notes:
        lines += ["", "## What did not run", "", *notes]
    return "\n".join(lines) + "\n"


def _table(rows: list[TrainingRow], names: list[str], cell: Callable[[TrainingEntry], str]) -> list[str]:
    head = ["seqlen", "batch", *names]
    body = [
        [str(row.seqlen), str(row.batch), *(_cell(row.entry(name), cell) for name in names)] for row in rows
    ]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def _cell(entry: TrainingEntry | None, cell: Callable[[TrainingEntry], str]) -> str:
    if entry is None:
        return ""
    return cell(entry) if entry.timed else "not timed" if entry.status == "ok" else entry.status


def _tokens_cell(entry: TrainingEntry) -> str:
    backend = f", {entry.backend.lower()}" if entry.backend else ""
    return f"{entry.tokens_per_s:.0f} (±{entry.spread_pct / 2:.1f}%{backend})"


def _tflops_cell(entry: TrainingEntry) -> str:
    return f"{entry.tflops:.4g} ({entry.matmul_pct:.0f}%)"


def _memory_cell(entry: TrainingEntry) -> str:
    if entry.peak_bytes is None:
        return "unknown"
    return f"{entry.peak_bytes / 2**30:.1f} ({entry.step_bytes / 2**30:.1f})"


def _losses_cell(entry: TrainingEntry) -> str:
    losses = " ".join(f"{loss:.4f}" for loss in entry.losses)
    return f"{losses}; {' '.join(f'{norm:.4g}' for norm in entry.grad_norms.values())}"


def describe(entry: TrainingEntry) -> str:
    """What the program prints of an entry once its row is done."""
    return _cell(entry, lambda e: f"{e.tokens_per_s:.0f} tok/s {e.tflops:.3g} TF {_memory_cell(e)} GiB")


def write_all(results: TrainingResults, folder: Path) -> list[Path]:
    """Writes ``training.json``, ``training.md`` and ``training.png``; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "training.json", folder / "training.md"]
    write_json(results, paths[0])
    paths[1].write_text(markdown(results))
    return paths + plot_training(results, folder / "training.png")


def main(argv: list[str] | None = None) -> int:
    """Rebuilds the files of a run from its JSON and prints its answers."""
    parser = argparse.ArgumentParser(prog="python -m bench.training_report", description=main.__doc__)
    parser.add_argument("results", type=Path, help="training.json of a run, or a .json.gz")
    parser.add_argument("--out", type=Path, default=None, help="where to write; default beside the results")
    options = parser.parse_args(argv)
    results = TrainingResults.from_json(stored_text(options.results))
    for path in write_all(results, options.out or options.results.parent):
        print(path)
    print("\n".join(answers(results)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
