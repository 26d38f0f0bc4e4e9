"""What the source articles claim, by whom, and what was measured here: ``python -m examples.claims``.

The table is made of stored results (``bench/results``). ``--measure`` adds a run of this machine: of the
ladder (``python -m examples.ladder``) and of the encoders, memory and contexts that only this example
measures. On a CPU that is a small form of everything, to show that it runs. The pictures need matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from bench import machine
from bench.timing import make_timer
from examples.ladder.__main__ import main as run_ladder
from examples.ladder.__main__ import write

from . import measure
from .claims import breakdown, moved, speeds, table
from .evidence import RESULTS, Evidence, read, stored
from .pictures import draw


def run_here(device: torch.device, folder: Path, commit: str | None) -> list[Path]:
    """Measures both kinds of results and stores them below ``folder``."""
    ladder, claims = folder / "ladder.json.gz", folder / "claims.json.gz"
    more = ["--commit", commit] if commit else []
    run_ladder(["--device", device.type, "--out", str(ladder), *more])
    rows = measure.all_rows(device, make_timer(device))
    write(claims, {"kind": "claims", "metadata": machine.collect(device, commit), "rows": rows})
    return [ladder, claims]


TABLES = {"breakdown": breakdown, "moved": moved, "speeds": speeds}  # of docs/articles.md, beside the claims
HEAD = ["claimed", "by whom", "measured here", "on what"]


def as_text(lines: Iterable[Sequence[str]], head: Sequence[str] = HEAD) -> str:
    """As a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def in_document(document: str, text: str, name: str = "claims") -> str:
    """The document with this table between the marks of that name."""
    mark, end = f"<!-- {name}: written by python -m examples.claims --docs -->\n", "<!-- -->\n"
    before, _, rest = document.partition(mark)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError("the document has no place for the table")
    return f"{before}{mark}{text}\n{end}{after}"


def main(arguments: list[str] | None = None) -> Evidence:
    """Entry; returns what the table was made of."""
    parser = argparse.ArgumentParser(prog="python -m examples.claims", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of stored runs (default bench/results)"
    )
    parser.add_argument("--measure", action="store_true", help="measure here first, into --out")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default=None, help="default: the GPU if there is one"
    )
    parser.add_argument("--commit", default=None, help="commit to record where there is no git to ask")
    parser.add_argument("--docs", action="store_true", help="write the tables of docs/articles.md, too")
    parser.add_argument("--out", type=Path, default=Path("out/claims"), help="folder (default %(default)s)")
    options = parser.parse_args(arguments)

    evidence = stored(options.results)
    if options.measure:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        for path in run_here(device, options.out, options.commit):
            evidence.files[path.name.split(".")[0]] = read(path)
    text = as_text(table(evidence))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "claims.md").write_text(text + "\n", encoding="utf-8")
    if options.docs:
        page = RESULTS.parents[1] / "docs" / "articles.md"
        written = in_document(page.read_text(encoding="utf-8"), text)
        for name, make in TABLES.items():
            head, lines = make(evidence)
            written = in_document(written, as_text(lines, head), name)
        page.write_text(written, encoding="utf-8")
    print(text)
    pictures = draw(evidence, options.out)
    print(f"\n{options.out / 'claims.md'}", *pictures, sep="\n")
    if not pictures:
        print("No pictures: matplotlib is not installed, or nothing is stored.")
    return evidence


if __name__ == "__main__":
    main()
