"""Rules that keep the tree readable and quick to compile: who includes whom, file lengths, forbidden text."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

from tests.sources import ROOT

CSRC = ROOT / "csrc"
LINE_CEILING, CSRC_CEILING = 600, 450

# What each part of csrc may include of ours. The first row whose pattern meets the beginning of the path
# counts.
INCLUDES = [
    ("params.h", ()),
    ("divisor.h", ()),
    ("host_device.h", ()),
    ("modifiers.h", ("divisor.h", "host_device.h", "params.h")),
    ("condensed.h", ("host_device.h", "modifiers.h")),
    ("mask_kinds.h", ("host_device.h", "modifiers.h")),
    ("heuristics.h", ("params.h",)),
    ("build_info.", ("build_info.h", "build_record.h")),
    ("launch.h", ("common/debug_delay.cuh", "dtype.cuh", "plan.h")),
    ("dtype.cuh", ("params.h",)),
    ("stream.h", ()),
    ("fp8.h", ("params.h",)),
    ("quantize_fp8.h", ("fp8.h",)),
    ("paths.h", ("params.h", "modifiers.h")),
    ("grid.h", ("params.h", "divisor.h", "heuristics.h", "paths.h")),
    ("kv_cache.h", ("divisor.h",)),
    ("dense_cache.h", ("kv_cache.h", "params.h")),
    ("append_kv.h", ("divisor.h", "kv_cache.h", "params.h")),
    ("kv_splits.h", ("divisor.h",)),
    ("short_tiles.h", ("divisor.h", "heuristics.h", "modifiers.h", "paths.h")),
    (r"plan\.h", ("fp8.h", "params.h", "modifiers.h", "paths.h", "short_tiles.h", "kv_cache.h", "kv_splits.h",
                  "sm90/bwd/tiles.h")),
    ("gqa_splits.h", ("plan.h",)),
    ("plan/", ("plan/", "plan.h", "bias_rows.h", "grid.h", "gqa_splits.h", "heuristics.h", "short_tiles.h",
               "dense_cache.h", "kv_splits.h", "paths.h",
               "sm90/bwd_split/tiles.h", "sm90/bwd_split/tiles_mod.h", "sm90/fwd_cached/tiles.h",
               "sm90/fwd_fp8/tiles.h", "sm90/fwd_latent/tiles.h")),
    ("path_choice.", ("path_choice.h", "plan.h", "build_info.h", "heuristics.h")),
    ("call.h", ("bias_rows.h", "fp8.h", "plan.h")),
    ("run.cpp", ("call.h", "dense_cache.h", "gqa_splits.h", "sm80/instances.h", "sm90/instances.h")),
    (r"api/sdpa_(masked|replaced)", ("api/sdpa.h", "api/sdpa_replaced.h")),
    ("api/sdpa.cpp", ("api/sdpa_replaced.h",)),
    ("api/append.cpp", ("append_kv.h", "api/api.h", "api/checks.h", "api/tangents.h", "api/tensors.h")),
    ("bias_rows.h", ("modifiers.h",)),
    ("api/fp8.cpp", ("api/api.h", "api/checks.h", "api/tensors.h", "passes/rounding_loss.h",
                     "quantize_fp8.h")),
    ("api/", ("api/api.h", "api/call_args.h", "api/checks.h", "api/operators.h", "api/plans.h",
             "api/prepared.h", "api/tangents.h", "api/tensors.h", "bias_rows.h", "build_info.h", "call.h",
             "condensed.h", "fp8.h", "path_choice.h", "short_tiles.h", "stream.h")),
    ("device.cu", ("launch.h", "paths.h", "stream.h")),
    ("ptx/", ("ptx/operand_lists", "ptx/sm90.cuh")),
    ("common/", ("common/", "ptx/", "grid.h", "kv_cache.h", "params.h", "modifiers.h", "heuristics.h")),
    (r"sm80/\w+/launch", ("sm80/", "passes/", "launch.h")),
    ("sm80/instances.h", ("call.h",)),
    ("sm80/", ("sm80/", "common/", "ptx/", "dtype.cuh", "params.h", "heuristics.h", "mask_kinds.h", "paths.h",
               "short_tiles.h", "kv_splits.h")),
    ("sm90/core/tensor_maps.cuh", ("launch.h", "params.h")),
    (r"sm90/\w+/launch", ("sm90/", "passes/", "launch.h")),
    ("sm90/instances.h", ("call.h",)),
    ("sm90/bwd/passes.cuh", ("sm90/", "passes/")),
    ("sm90/", ("sm90/", "common/", "ptx/", "dtype.cuh", "fp8.h", "grid.h", "kv_splits.h", "params.h",
               "mask_kinds.h", "modifiers.h", "heuristics.h")),
    ("passes/", ("passes/", "common/", "ptx/", "append_kv.h", "bias_rows.h", "condensed.h", "dtype.cuh",
                 "fp8.h", "params.h", "quantize_fp8.h", "modifiers.h", "heuristics.h")),
    ("inst/fp8_passes.cu", ("passes/", "launch.h")),
    ("inst/passes.cu", ("passes/", "gqa_splits.h", "launch.h", "paths.h")),
    ("inst/append_kv.cu", ("passes/", "append_kv.h", "dtype.cuh", "launch.h")),
    (r"inst/fwd(_cached|_fp8|_mixed|_packed(_quantized)?(_mod)?|_parts|_latent)?_sm90", ("sm90/",)),
    ("inst/fwd_mod_sm90", ("sm90/",)),
    ("inst/bwd_sm90", ("sm90/",)),
    ("inst/bwd_mod_sm90", ("sm90/",)),
    ("inst/bwd_bias_sm90", ("sm90/",)),
    ("inst/", ("sm80/",)),
]  # fmt: skip
TORCH_HEADER = re.compile(r"#\s*include\s*[<\"](torch|ATen|c10|caffe2|pybind11)/")
CUDA_HEADER = re.compile(r"#\s*include\s*[<\"](cuda|cooperative_groups|mma\.h|nv/)")


def source_files(*suffixes: str) -> list[Path]:
    """Files of the project, tracked or about to be, as git sees them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:  # an unpacked source archive
        folders = ("csrc", "flash_ext", "tests", "bench", "docs", ".ci")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    return sorted(
        path
        for path in paths
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts
    )


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def cpp_files() -> list[Path]:
    """Of the library; what tests/tools/emulation has is a program of the tests."""
    return [path for path in source_files(".h", ".cpp", ".cu", ".cuh") if path.is_relative_to(CSRC)]


def without_comments(text: str) -> str:
    """C++ text with comments blanked, line numbers kept."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match.group().count("\n")

    return re.sub(r"/\*.*?\*/|//[^\n]*", blank, text, flags=re.S)


def findings(files: list[Path], pattern: re.Pattern[str], code_only: bool = False) -> list[str]:
    found = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate((without_comments(text) if code_only else text).splitlines(), 1):
            if pattern.search(line):
                found.append(f"{relative(path)}:{number}: {line.strip()}")
    return found


# ---- C++ -------------------------------------------------------------------------------------------------


def test_includes_follow_the_layers():
    wrong = []
    for path in cpp_files():
        name = path.relative_to(CSRC).as_posix()
        allowed = next((targets for start, targets in INCLUDES if re.match(start, name)), None)
        assert allowed is not None, f"{name} belongs to no layer: add it to INCLUDES"
        for target in re.findall(r'#\s*include\s*"([^"]+)"', path.read_text()):
            included = (path.parent / target).resolve()
            inner = included.relative_to(CSRC).as_posix() if included.is_relative_to(CSRC) else target
            if not any(inner.startswith(prefix) for prefix in allowed):
                wrong.append(f"{name} includes {inner}")
    assert wrong == []


def test_torch_stays_in_the_op_layer():
    others = [path for path in cpp_files() if path.parent != CSRC / "api"]
    assert findings(others, TORCH_HEADER) == []


HEAVY_HEADER = re.compile(r"#\s*include\s*<(torch/|ATen/(core/dispatch|ATen\.h|autocast_mode|Functions\.h))")


def test_headers_of_the_binding_read_little_of_torch():
    """The dispatcher's headers take a second or two a file, and another torch compiles all of them again."""
    shared = [path for path in (CSRC / "api").glob("*.h") if path.name != "sdpa_replaced.h"]
    assert findings(shared, HEAVY_HEADER) == []


def test_host_headers_need_no_cuda():
    host = [path for path in cpp_files() if path.suffix in (".h", ".cpp") and path.name != "launch.h"]
    assert findings(host, CUDA_HEADER) == []


def test_launches_go_through_one_checked_helper():
    kernels = [path for path in cpp_files() if path.name != "launch.h"]
    assert findings(kernels, re.compile(r"<<<"), code_only=True) == []


# A declaration of a 32-bit integer whose value multiplies two sizes, such as `int n = seqlen_q * num_heads`.
SIZE = r"\w*(?:seqlen|total_|_stride|batch|num_heads|rows)\w*"
NARROW_PRODUCT = re.compile(
    rf"\b(?:int|int32_t|unsigned|uint32_t)\s+\w+\s*=(?![^;]*int64_t)[^;]*\b{SIZE}\)?\s*\*\s*\(?[\w.>-]*{SIZE}\b"
)


def test_no_32_bit_product_of_sizes():
    assert findings(cpp_files(), NARROW_PRODUCT, code_only=True) == []


def test_library_code_prints_nothing():
    """C++; ruff says so of Python."""
    host = re.compile(r"\bstd::c(out|err)\b|\bf?printf\s*\(|\bexit\s*\(|\babort\s*\(")
    assert findings(cpp_files(), host, code_only=True) == []


# ---- Python ----------------------------------------------------------------------------------------------


def test_the_ladder_stands_alone(monkeypatch):
    """What the kernels are judged by must not share code with them."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_ext", "examples")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flash_ext", None)
    importlib.import_module("examples.ladder.costs")


def test_every_package_is_shipped():
    folders = {path.parent for path in (ROOT / "flash_ext").rglob("*.py") if "__pycache__" not in path.parts}
    packages = re.search(r"^packages = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.M).group(1)
    assert set(ast.literal_eval(packages)) == {relative(folder).replace("/", ".") for folder in folders}


# ---- every file ------------------------------------------------------------------------------------------


def test_files_stay_short():
    """A rule of docs/CONTRIBUTING.md, which has these numbers; neither ruff nor clang-format counts lines."""
    rule = f"No file of code is longer than {LINE_CEILING} lines, none in `csrc/` longer than {CSRC_CEILING}."
    assert rule in (ROOT / "docs" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = source_files(".py", ".h", ".cpp", ".cu", ".cuh", ".sh", ".toml")
    long = {
        relative(path): count
        for path in code
        if (count := len(path.read_text(encoding="utf-8").splitlines()))
        > (CSRC_CEILING if path.is_relative_to(CSRC) else LINE_CEILING)
    }
    assert long == {}


def test_no_word_about_the_machine_it_was_written_on():
    """No path of one machine, no registry host: both would be wrong everywhere else."""
    places = re.compile(
        r"(?<![\w.])/(?:work|root|home|opt)/|pypi\.org|pythonhosted|download\.pytorch|"
        r"index-url"
    )
    files = source_files(".py", ".h", ".cpp", ".cu", ".cuh", ".sh", ".md", ".toml", ".in", "")
    assert findings([path for path in files if path != Path(__file__)], places) == []
