"""Counts what compute-sanitizer found, by kind, kernel and place in the source:
``python -m tests.tools.sanitizer_summary LOG``. Exit status 1: the tool printed less than it found.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

FINDING = re.compile(
    r"=========\s+(Uninitialized \S+ memory read of size \d+|(?:Error|Warning): .*hazard"
    r"|.*[Rr]ace reported between .*)"
)
PLACE = re.compile(r"=========\s+(?:at |and )?(?:\w+ access (?:by .* )?at )?(.*flash_ext.*)")
OVERFLOW = "Error buffer overflow"
LOCATION = re.compile(r"\+(0x[0-9a-f]+)(?: in (\S+))?")


def kernel_of(text: str) -> str:
    """Name and template arguments, without namespaces and parameters."""
    text = re.sub(r"flash_ext::|sm\d\d::|\bvoid ", "", text.split("(const")[0])
    return re.sub(r"\([^<>]*\)\+.*", "", text).split("+0x")[0].strip()


def summary(lines: list[str]) -> Counter[tuple[str, str, str]]:
    """(finding, kernel, place) to how often, of the lines of a log."""
    found: Counter[tuple[str, str, str]] = Counter()
    kind = ""
    for line in lines:
        if match := FINDING.match(line):
            kind = re.sub(r" at .*", "", match.group(1))
        elif kind and (match := PLACE.match(line)):
            where = LOCATION.search(line)
            place = (where.group(2) or where.group(1)) if where else "?"
            found[kind, kernel_of(match.group(1)), place] += 1
            kind = ""
    return found


def overflows(lines: list[str]) -> Counter[str]:
    """Kernels to how many of their launches had more findings than the tool kept."""
    found: Counter[str] = Counter()
    kernel = ""
    for line in lines:
        if match := PLACE.match(line):
            kernel = kernel_of(match.group(1)).split("<")[0]
        elif OVERFLOW in line and kernel:
            found[kernel] += 1
    return found


def main() -> int:
    lines = Path(sys.argv[1]).read_text(errors="replace").splitlines()
    found = summary(lines)
    for (kind, kernel, place), count in found.most_common():
        print(f"{count:8d}  {kind}  {kernel}  {place}")
    cases = sum(line.startswith("case ") for line in lines)
    print(f"{sum(found.values())} findings of {len(found)} kinds; {cases} cases")
    said = ("ERROR SUMMARY", "RACECHECK SUMMARY", "Error:")
    print("\n".join([line for line in lines if any(word in line for word in said)][-5:]))
    for kernel, count in overflows(lines).most_common():
        print(f"of {count} launches of {kernel} more than the tool kept")
    missing = [line for line in lines if "errors were not printed" in line]
    if missing:
        print(f"NOT COMPLETE: {missing[-1]}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
