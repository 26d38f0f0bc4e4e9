"""Rules that keep the tree readable and quick to compile: who includes whom, file lengths, forbidden text."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
LINE_CEILING = 600

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
    ("paths.h", ("params.h", "modifiers.h")),
    ("grid.h", ("params.h", "divisor.h", "heuristics.h", "paths.h")),
    ("kv_splits.h", ("divisor.h", "heuristics.h", "paths.h")),
    ("short_tiles.h", ("divisor.h", "heuristics.h", "modifiers.h", "paths.h")),
    (r"plan\.h", ("params.h", "modifiers.h", "paths.h", "short_tiles.h", "kv_splits.h", "sm90/bwd/tiles.h")),
    ("gqa_splits.h", ("plan.h",)),
    ("plan/", ("plan/", "plan.h", "grid.h", "gqa_splits.h", "heuristics.h", "short_tiles.h", "kv_splits.h",
               "sm90/bwd_split/tiles.h", "sm90/bwd_split/tiles_mod.h")),
    ("path_choice.", ("path_choice.h", "plan.h", "build_info.h", "heuristics.h")),
    ("call.h", ("plan.h",)),
    ("run.cpp", ("call.h", "gqa_splits.h", "sm80/instances.h", "sm90/instances.h")),
    (r"api/sdpa_(masked|replaced)", ("api/sdpa.h", "api/sdpa_replaced.h")),
    ("api/sdpa.cpp", ("api/sdpa_replaced.h",)),
    ("api/", ("api/api.h", "api/call_args.h", "api/prepared.h", "api/tensors.h", "call.h", "condensed.h",
             "path_choice.h", "build_info.h", "short_tiles.h", "stream.h")),
    ("device.cu", ("launch.h", "paths.h", "stream.h")),
    ("ptx/", ()),
    ("common/", ("common/", "ptx/", "grid.h", "params.h", "modifiers.h", "heuristics.h")),
    (r"sm80/\w+/launch", ("sm80/", "passes/", "launch.h")),
    ("sm80/instances.h", ("call.h",)),
    ("sm80/", ("sm80/", "common/", "ptx/", "params.h", "heuristics.h", "mask_kinds.h", "paths.h",
               "short_tiles.h", "kv_splits.h")),
    ("sm90/core/tensor_maps.cuh", ("launch.h", "params.h")),
    (r"sm90/\w+/launch", ("sm90/", "passes/", "launch.h")),
    ("sm90/instances.h", ("call.h",)),
    ("sm90/bwd/passes.cuh", ("sm90/", "passes/")),
    ("sm90/", ("sm90/", "common/", "ptx/", "grid.h", "params.h", "mask_kinds.h", "modifiers.h",
               "heuristics.h")),
    ("passes/", ("passes/", "common/", "ptx/", "condensed.h", "params.h", "modifiers.h", "heuristics.h")),
    ("inst/passes.cu", ("passes/", "gqa_splits.h", "launch.h", "paths.h")),
    ("inst/fwd_sm90", ("sm90/",)),
    ("inst/fwd_mod_sm90", ("sm90/",)),
    ("inst/bwd_sm90", ("sm90/",)),
    ("inst/bwd_mod_sm90", ("sm90/",)),
    ("inst/bwd_bias_sm90", ("sm90/",)),
    ("inst/", ("sm80/",)),
]
TORCH_HEADER = re.compile(r"#\s*include\s*[<\"](torch|ATen|c10|caffe2|pybind11)/")
CUDA_HEADER = re.compile(r"#\s*include\s*[<\"](cuda|cooperative_groups|mma\.h|nv/)")

# Python modules from the ground up: each may import those of earlier rows only.
PYTHON_LAYERS = [
    {"_ops.extension", "_ops.spec", "_ops.words", "_cpu.philox", "_masks"},
    {"_ops.modifiers", "masks"},
    {"_merge", "_ops.dtensor", "_ops.prepared"},
    {"_ops.arguments"},
    {"_cpu.condensed"},
    {"_cpu.tiles"},
    {"_ops.library"},
    {"_log", "_count", "_ops.plan"},
    {"_ops.library_mod", "_batch_invariance"},
    {"_ops.functorch", "_ops.calls"},
    {"_ops.dispatch"},
    {"_attention"},
    {"_pair", "_sdpa", "_sdpa_override", "_explain"},
    {"nn", "distributed"},
    {"__init__"},
    {"info"},
]
# Programs are run with `python -m` and may print, the library never does.
PROGRAMS = {"info"}


def source_files(*suffixes: str) -> list[Path]:
    """Files of the project, tracked or about to be, as git sees them."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:  # an unpacked source archive
        folders = ("csrc", "flash_ext", "tests", "bench", "docs", ".ci")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    return sorted(path for path in paths
                  if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts)


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


def included_by(path: Path, seen: set[Path]) -> set[Path]:
    """All headers of ours that a file includes, itself or by another one."""
    for target in re.findall(r'#\s*include\s*"([^"]+)"', path.read_text(encoding="utf-8")):
        header = (path.parent / target).resolve()
        if header.is_file() and header not in seen:
            seen.add(header)
            included_by(header, seen)
    return seen


def test_headers_include_the_instructions_they_call():
    """Else it depends on the order of includes, in some builds only, whether a file compiles."""
    wrong = []
    for path in (path for path in cpp_files() if path.suffix == ".cuh" and path.parent != CSRC / "ptx"):
        called = set(re.findall(r"\bptx::(\w+)", without_comments(path.read_text(encoding="utf-8"))))
        known = [header.read_text(encoding="utf-8") for header in included_by(path, set())
                 if header.parent == CSRC / "ptx"]
        wrong += [f"{relative(path)}: ptx::{name}" for name in sorted(called)
                  if not any(re.search(rf"\b{name}\b", text) for text in known)]
    assert wrong == []


# A kernel with several headers, for its wider heads.
OF_SEVERAL_HEADERS = {"bwd_sm90.cu": [f"../sm90/bwd{which}/launch.cuh" for which in ("", "_split")]}


def test_every_instantiation_is_one_kernel_header():
    """A file has one kernel, some of its head_dims and a class of tiles; mask passes launch themselves."""
    name = (r"fwd_split.cu|(fwd|bwd)_short.cu|(fwd|bwd)(_mod|_bias)?_(sm80(_large)?|sm90)"
            r"(_hd\d+(_v\d+)?|_upto\d+|_above\d+|_det)?\.cu")
    inst = sorted((CSRC / "inst").glob("*.cu"))
    of_kernels = [path for path in inst if re.fullmatch(name, path.name)]
    assert of_kernels, "no instantiations found"
    assert [path.name for path in inst if path not in of_kernels] == ["passes.cu"]
    for path in of_kernels:
        includes = re.findall(r'#\s*include\s*"([^"]+)"', path.read_text())
        expected = OF_SEVERAL_HEADERS.get(path.name)
        assert includes == expected if expected else len(includes) == 1, f"{path.name} includes {includes}"


def test_torch_stays_in_the_op_layer():
    others = [path for path in cpp_files() if path.parent != CSRC / "api"]
    assert findings(others, TORCH_HEADER) == []


def test_host_headers_need_no_cuda():
    host = [path for path in cpp_files() if path.suffix in (".h", ".cpp") and path.name != "launch.h"]
    assert findings(host, CUDA_HEADER) == []


def test_op_layer_uses_no_cuda_library_of_torch():
    """Only then does the module link and load with a CPU-only torch."""
    assert findings(cpp_files(), re.compile(r"c10/cuda|ATen/cuda|c10::cuda|at::cuda")) == []


def test_launches_go_through_one_checked_helper():
    kernels = [path for path in cpp_files() if path.name != "launch.h"]
    assert findings(kernels, re.compile(r"<<<"), code_only=True) == []


def test_operators_come_to_their_device_by_one_guard():
    """torch's own leaves a thread that is new to CUDA without a context, which calls of the driver want."""
    guards = re.compile(r"\b(?:Optional)?DeviceGuard\s+\w+\(")
    assert findings(cpp_files(), guards, code_only=True) == []
    entries = re.compile(r"\bconst ProfilerRange range\(.*\);\n  const OnDevice on_device\(q\);")
    ranges = re.compile(r"\bconst ProfilerRange range\(")
    text = (CSRC / "api/ops.cpp").read_text()
    assert len(entries.findall(text)) == len(ranges.findall(text)) == 2


# A declaration of a 32-bit integer whose value multiplies two sizes, such as `int n = seqlen_q * num_heads`.
SIZE = r"\w*(?:seqlen|total_|_stride|batch|num_heads|rows)\w*"
NARROW_PRODUCT = re.compile(
    rf"\b(?:int|int32_t|unsigned|uint32_t)\s+\w+\s*=(?![^;]*int64_t)[^;]*\b{SIZE}\)?\s*\*\s*\(?[\w.>-]*{SIZE}\b")


def test_no_32_bit_product_of_sizes():
    assert findings(cpp_files(), NARROW_PRODUCT, code_only=True) == []


@pytest.mark.parametrize("line, caught", [
    ("int n = p.seqlen_q * p.num_heads;", True),
    ("const int32_t rows = batch * seqlen_q;", True),
    ("int64_t n = int64_t(p.seqlen_q) * p.num_heads;", False),
    ("int m = ceil_div(seqlen_q, kBlockM);", False),
    ("int n = row * kBlockN;", False),
])
def test_the_product_rule_itself(line: str, caught: bool):
    assert bool(NARROW_PRODUCT.search(line)) == caught


def test_library_code_prints_nothing():
    host = re.compile(r"\bstd::c(out|err)\b|\bf?printf\s*\(|\bexit\s*\(|\babort\s*\(")
    assert findings(cpp_files(), host, code_only=True) == []
    for path in source_files(".py"):
        if relative(path).startswith("flash_ext/") and path.stem not in PROGRAMS:
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
                     and isinstance(node.func, ast.Name) and node.func.id in ("print", "exit")]
            assert not calls, f"{relative(path)}:{calls[0].lineno} prints or exits"


# ---- Python ----------------------------------------------------------------------------------------------

PACKAGE = ROOT / "flash_ext"


def package_imports(path: Path) -> set[str]:
    """Modules of flash_ext that a module imports, at any depth of its code, such as `_ops.spec`."""
    own = path.relative_to(ROOT).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            base = [*own[: len(own) - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        for first, *rest in (name for name in names if name):
            if first == "flash_ext":
                while rest and not PACKAGE.joinpath(*rest).with_suffix(".py").exists() and rest != ["_C"]:
                    rest = rest[:-1]
                found.add("_masks" if rest[:1] == ["_masks"] else ".".join(rest) or "__init__")
    return found


def test_python_modules_import_downwards():
    rank = {name: number for number, row in enumerate(PYTHON_LAYERS) for name in row}
    wrong = []
    of_others = {PACKAGE / "compat", PACKAGE / "integrations"}
    for path in (path for path in PACKAGE.rglob("*.py") if not of_others & {*path.parents}):
        own = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if own.startswith("_masks."):
            assert package_imports(path) <= {"_masks"}, f"{own} imports more than the values of masks"
            continue
        if own.endswith(".__init__"):
            assert package_imports(path) == set(), f"{own} imports"
            continue
        assert own in rank, f"{own} belongs to no layer: add it to PYTHON_LAYERS"
        for name in package_imports(path):
            if name == "_C":
                if own != "_ops.library":
                    wrong.append(f"{own} imports _C itself; _ops.library does that")
            elif name != own and name in rank and rank[name] >= rank[own]:
                # The version, which has no module of its own.
                if (own, name) != ("_ops.library", "__init__"):
                    wrong.append(f"{own} imports {name}")
    assert wrong == []


# Parts of flash_ext/masks.py and what they stand on. Methods of a value may reach up when they are called.
MASK_LAYERS = [
    {"value"},
    {"atoms", "biases", "dense"},
    {"tiles"},
    {"block_mask", "relative_position"},
    {"normal", "block_algebra", "builders", "convert"},
    {"lower"},
    {"describe"},
]


def test_parts_of_masks_import_downwards():
    rank = {name: number for number, row in enumerate(MASK_LAYERS) for name in row}
    folder = ROOT / "flash_ext"
    files = [*(folder / "_masks").glob("[a-z]*.py")]
    assert {path.stem for path in files} == set(rank)
    wrong = []
    for path in files:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                name = (node.module or "").removeprefix("_masks.")
                if rank.get(name, -1) >= rank[path.stem]:
                    wrong.append(f"{path.stem} imports {name}")
    assert wrong == []


def test_every_package_is_shipped():
    folders = {path.parent for path in (ROOT / "flash_ext").rglob("*.py") if "__pycache__" not in path.parts}
    packages = re.search(r"^packages = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.M).group(1)
    assert set(ast.literal_eval(packages)) == {relative(folder).replace("/", ".") for folder in folders}


@pytest.mark.parametrize("folder", ["compat", "integrations"])
def test_packages_for_other_libraries_use_public_names_only(folder: str):
    """What they need, everybody may need: it belongs into the public interface. But they log and count."""
    exported = re.search(r"__all__ = \[(.*?)\]", (ROOT / "flash_ext/__init__.py").read_text(), re.S).group(1)
    wrong = []
    for path in (ROOT / "flash_ext" / folder).rglob("*.py"):
        depth = len(path.relative_to(ROOT / "flash_ext").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level >= depth:
                wrong += [f"{relative(path)} imports {node.module or ''} {alias.name}" for alias in node.names
                          if (node.module or f'"{alias.name}"' not in exported)
                          and node.module not in ("_log", "_count", "masks")]
    assert wrong == []


def imported_names(path: Path) -> set[str]:
    """Every name of ours that a module imports, such as `flash_ext._ops.spec.AttnSpec`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("flash_ext", "tests", "bench", "examples")}


def test_the_oracle_and_the_ladder_stand_alone():
    """What the kernels are judged by must not share code with them."""
    of_calls = {"flash_ext._ops.spec.AttnSpec", "flash_ext._ops.modifiers.Modifiers"}
    assert imported_names(ROOT / "tests/reference.py") == {*of_calls, "tests.philox"}
    assert imported_names(ROOT / "tests/philox.py") == set()
    assert package_imports(ROOT / "examples/ladder.py") == set()


# ---- every file ------------------------------------------------------------------------------------------

def test_files_stay_short():
    code = source_files(".py", ".h", ".cpp", ".cu", ".cuh", ".sh", ".toml")
    long = {relative(path): count for path in code
            if (count := len(path.read_text(encoding="utf-8").splitlines())) > LINE_CEILING}
    assert long == {}


def test_no_drawer_for_everything():
    names = re.compile(r"^(utils?|helpers?|misc|common)\.\w+$")
    code = source_files(".py", ".h", ".cpp", ".cu", ".cuh")
    assert [relative(path) for path in code if names.match(path.name)] == []


def test_no_dead_code_markers():
    markers = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b|#if 0\b")
    files = source_files(".py", ".h", ".cpp", ".cu", ".cuh", ".sh", ".md")
    assert findings([path for path in files if path != Path(__file__)], markers) == []


def test_no_word_about_the_machine_it_was_written_on():
    """No path of one machine, no registry host: both would be wrong everywhere else."""
    places = re.compile(r"(?<![\w.])/(?:work|root|home|opt)/|pypi\.org|pythonhosted|download\.pytorch|"
                        r"index-url")
    files = source_files(".py", ".h", ".cpp", ".cu", ".cuh", ".sh", ".md", ".toml", ".in", "")
    assert findings([path for path in files if path != Path(__file__)], places) == []
