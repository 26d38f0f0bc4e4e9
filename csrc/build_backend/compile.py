"""Compiles csrc/ into the extension module with one ninja graph, then gates the kernels.

ninja gives incremental and parallel builds (headers are tracked through depfiles), every nvcc run leaves its
output in a log beside the object, and after each build all logs are read again: a kernel that spills, uses a
stack frame or lost a Hopper instruction fails the build, also when nothing had to be recompiled. What ptxas
said of every kernel goes to build/resources.json, which tests read. What another build has compiled from the
same bytes is copied (cache.py).

Environment variables:
    FLASH_EXT_ARCHS, TORCH_CUDA_ARCH_LIST: architectures to compile for (archs.py), e.g. "native".
    FLASH_EXT_CACHE: the folder of compiled objects (default ~/.cache/flash_ext), or "off".
    FLASH_EXT_LINEINFO=1: line tables in the kernels, for profilers; they take a tenth of the compile time.
    FLASH_EXT_DEBUG=1: defines FLASH_EXT_DEBUG (device assertions); the gates then only report.
    FLASH_EXT_MUTANT=n: the sources hold planted bug n, a test of the tests: the gates only report, and the
        module names itself mutant<n>.
    MAX_JOBS: parallel compiler runs (default: by cores and available memory).
    CXX: the host compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from . import archs, cache, environment, progress, ptxas_log
from .pins import ROOT, toolkit_requirement
from .sources import content_hash
from .variant import CXX_FLAGS, LEFT_OUT, Tools, Variant

API = Path("api")  # below csrc/, the only folder that knows torch
# Kernels of an example, a library of their own: in the graph, built when it is asked for, in no package.
LADDER, LADDER_LIBRARY = Path("examples/ladder/kernels"), "ladder.so"
# In the build folder, for cache.py: its settings, and a script that starts it.
SETTINGS, CACHED = "cache.json", "cached.sh"
# The largest compiler run of ours needs about 1.3 GB; twice that leaves room for what else is running.
BYTES_PER_JOB = 2.5 * 2**30


class GateFailure(Exception):
    """A kernel compiled but must not be shipped."""


def source_files() -> list[Path]:
    """Everything that is compiled, relative to csrc/; what takes longest first, so that no core ends idle."""
    csrc = ROOT / "csrc"
    found = [path.relative_to(csrc) for path in csrc.rglob("*") if path.suffix in (".cpp", ".cu")]

    def order(path: Path) -> tuple:
        is_long = "_mod_" in path.name or "_short" in path.name
        return path.parent != Path("inst"), not is_long, "sm90" not in path.name, path

    return sorted(found, key=order)


def ladder_sources() -> list[Path]:
    """Everything of the ladder that is compiled, relative to the root."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / LADDER).glob("*.cu"))


def build_extension(version: str) -> Path:
    """Builds what is out of date and returns the module's file.

    Raises:
        BuildProblem: something is missing or does not match.
        GateFailure: a kernel spills, uses a stack frame, or lost a Hopper instruction.
        subprocess.CalledProcessError: the compiler refused; its words are on the screen.
    """
    return _build(version, "_C.so")


def build_ladder(version: str) -> Path:
    """Builds the kernels of examples/ladder and returns their library. Raises as :func:`build_extension`
    does.
    """
    return _build(version, LADDER_LIBRARY)


def _build(version: str, target: str) -> Path:
    tools, variant = Tools.find(), Variant.from_environment()
    archs.check_compiler(tools.toolkit, variant.archs)
    folder = _variant_folder(tools, variant)
    folder.mkdir(parents=True, exist_ok=True)
    with _one_build_at_a_time(folder):
        _probe_toolkit(tools, folder)
        _write_if_changed(folder / "generated" / "build_record.h", _build_record(tools, variant, version))
        _write_if_changed(folder / "build.ninja", ninja_file(tools, variant, folder))
        store = None if variant.holds_paths else _store()
        # Not in the graph: another interpreter in the same folder would compile all again.
        (folder / CACHED).write_text(_exec([sys.executable, "-I", "-S", cache.__file__, SETTINGS]))
        (folder / SETTINGS).write_text(json.dumps(_cache_settings(tools, folder, store)))
        _run_ninja(tools, variant, folder, store, target)
        if store:
            cache.trim(store)
        _gate(folder, variant, target)
    return folder / target


def _run_ninja(tools: Tools, variant: Variant, folder: Path, store: Path | None, target: str) -> None:
    """Runs the graph; what a build from nothing costs is kept beside it, for a test to hold to its budget."""
    from_nothing = not (folder / ".ninja_log").is_file()
    jobs, hits = parallel_jobs(), folder / cache.HITS
    before = _lines(hits)
    started = time.monotonic()
    command = [tools.ninja, "-C", str(folder), "-j", str(jobs), target]
    with progress.hint(folder, _planned(command, variant), jobs):
        # For each file a line with how many are done and the time.
        done = subprocess.run(command, check=False, env={"NINJA_STATUS": "[%f/%t, %e s] ", **os.environ})
    if done.returncode:
        # ninja has printed the failing command and the compiler's words already.
        raise subprocess.CalledProcessError(done.returncode, "ninja")
    wall, used = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
    copied = _lines(hits) - before
    found = f"; {copied} files were in {store}" if copied else ""
    print(
        f"compiled in {wall:.0f} s ({cpu:.0f} s of CPU time, largest process {peak:.2f} GiB){found}",
        flush=True,
    )
    if from_nothing and not copied and target != LADDER_LIBRARY:
        took = {"wall_seconds": round(wall, 1), "cpu_seconds": round(cpu, 1), "peak_gib": round(peak, 2)}
        (folder / "full_build.json").write_text(json.dumps(took))


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else 0


def _planned(command: list[str], variant: Variant) -> dict[str, float]:
    """What ninja would compile, with about how many seconds it takes on one core."""
    said = subprocess.run([*command, "-n", "-v"], capture_output=True, text=True, check=False).stdout
    files = {}
    for source in source_files():
        if f" -o {source}.o" in said:
            flags = variant.gencode_of(source)
            kinds = sum("code=sm_" in item for item in flags)
            seconds = 6.0 if source.suffix == ".cpp" else 3.0 if LEFT_OUT in flags else 20.0 * max(1, kinds)
            files[f"{source}.o"] = seconds
    return files


def _store() -> Path | None:
    store, why_not = cache.folder()
    if why_not:
        print(f"compiled objects are not kept: {why_not} (FLASH_EXT_CACHE names another folder)", flush=True)
    return store


def _cache_settings(tools: Tools, folder: Path, store: Path | None) -> dict:
    """For cache.py, which ninja starts: what identifies a compiler run beside its command and its files."""
    host = environment.words_of([tools.cxx, "--version"], [tools.cxx, "-dumpmachine"])
    home = tools.toolkit.home
    device = environment.words_of(*([str(home / "bin" / name), "--version"] for name in ("nvcc", "ptxas")))
    # It has no --version.
    device += "".join(f"cicc of {item.stat().st_size} bytes" for item in home.glob("nvvm*/bin/cicc"))
    binding = f"torch {tools.torch.version} for {sysconfig.get_config_var('SOABI')}"
    roots = {
        "SOURCES": ROOT,
        "BUILD": folder,
        "TOOLKIT": home,
        "TORCH": tools.torch.root,
        "PYTHON": tools.python_include,
    }
    return {
        "store": str(store) if store else None,
        "roots": {name: str(path) for name, path in roots.items()},
        "identity": {cache.KERNELS: host + device, "cxx": host, "binding": host + binding},
    }


def _variant_folder(tools: Tools, variant: Variant) -> Path:
    own = "" if variant.archs == tuple(archs.DEFAULT.split()) else "-" + "-".join(variant.archs)
    lines = "-lineinfo" if variant.lineinfo else ""
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    name = f"{variant.name}{lines}{own}-{python}-torch{tools.torch.version}"
    return ROOT / "build" / name.replace("+", "_")


# ---------------------------------------------------------------- the graph


def ninja_file(tools: Tools, variant: Variant, folder: Path) -> str:
    torch_include = tools.torch.root / "include"
    of_torch = [
        f"-isystem{item}"
        for item in (
            torch_include,
            torch_include / "torch" / "csrc" / "api" / "include",
            tools.python_include,
        )
    ]
    cxx = [
        tools.cxx,
        *CXX_FLAGS,
        *variant.defines,
        *shlex.split(os.environ.get("CXXFLAGS", "")),
        f"-I{folder / 'generated'}",
        # Messages name files, of which another build may have another copy.
        f"-ffile-prefix-map={ROOT}/=",
        f"-ffile-prefix-map={torch_include}/=",
    ]
    system = [f"-isystem{item}" for item in tools.toolkit.include_dirs]
    nvcc = [str(tools.toolkit.nvcc), "-ccbin", tools.cxx, *variant.common_nvcc_flags, *variant.defines]
    cached = ["sh", CACHED]
    files = "-MD -MF $out.d -c $in -o $out"
    cudart = tools.toolkit.cudart
    # A shared runtime is found beside torch's own, in site-packages, or where it was at build time.
    runtime_paths = (
        []
        if cudart.suffix == ".a"
        else ["-Wl,-rpath,$ORIGIN/../nvidia/cu13/lib", f"-Wl,-rpath,{cudart.parent}"]
    )
    link = [
        tools.cxx,
        "-shared",
        f"-L{tools.torch.root / 'lib'}",
        *runtime_paths,
        # Symbols of the static CUDA runtime stay inside: torch may have one of its own loaded.
        "-Wl,--exclude-libs,ALL",
        "-Wl,--as-needed",
    ]
    libraries = [
        "-ltorch",
        "-ltorch_cpu",
        "-ltorch_python",
        "-lc10",
        str(cudart),
        "-lpthread",
        "-ldl",
        "-lrt",
    ]
    lines = [
        "ninja_required_version = 1.5",
        # What no torch header reaches does not depend on torch.
        "rule cxx",
        f"  command = {_shell([*cached, 'cxx'])} $out -- {_shell([*cxx, *system])} {files}",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = c++ $name",
        "rule binding",
        f"  command = {_shell([*cached, 'binding'])} $out -- {_shell([*cxx, *of_torch, *system])} {files}",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = c++ $name",
        f"rule {cache.KERNELS}",
        f"  command = {_shell([*cached, cache.KERNELS])} $out -- {_shell(nvcc)} $gencode {files}",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = nvcc $name",
        "rule link",
        f"  command = {_shell(link)} $in -o $out {_shell(libraries)}",
        "  description = link $out",
        "rule link_alone",
        f"  command = {_shell(link)} $in -o $out {_shell([str(cudart), '-lpthread', '-ldl', '-lrt'])}",
        "  description = link $out",
    ]
    objects = []
    for source in source_files():
        rule = cache.KERNELS if source.suffix == ".cu" else "binding" if source.parent == API else "cxx"
        objects.append(f"{source}.o")
        lines += [f"build {_path(source)}.o: {rule} {_path(ROOT / 'csrc' / source)}", f"  name = {source}"]
        if rule == cache.KERNELS:
            lines.append(f"  gencode = {_shell(variant.gencode_of(source))}")
    lines += [f"build _C.so: link {' '.join(_path(Path(item)) for item in objects)}", "default _C.so"]
    ladder = ladder_sources()
    for source in ladder:
        lines += [f"build {_path(source)}.o: {cache.KERNELS} {_path(ROOT / source)}", f"  name = {source}"]
        lines.append(f"  gencode = {_shell(variant.gencode(variant.archs))}")
    if ladder:  # a wheel's sources may lack it
        lines.append(f"build {LADDER_LIBRARY}: link_alone {' '.join(f'{_path(item)}.o' for item in ladder)}")
    lines.append("")
    return "\n".join(lines)


def _shell(command: list[str]) -> str:
    return shlex.join(command).replace("$", "$$")


def _exec(command: list[str]) -> str:
    return f'exec {shlex.join(command)} "$@"\n'


def _path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def parallel_jobs() -> int:
    """MAX_JOBS, else as many as cores and free memory allow."""
    if asked := os.environ.get("MAX_JOBS"):
        if not asked.strip().isdecimal():
            raise environment.BuildProblem(
                "MAX_JOBS is no number",
                repr(asked),
                "how many compilers may run at once",
                "export MAX_JOBS=1",
            )
        return max(1, int(asked))
    cores = len(os.sched_getaffinity(0))
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    by_memory = int(int(match.group(1)) * 1024 / BYTES_PER_JOB) if match else cores
    return max(1, min(cores, by_memory))


@contextlib.contextmanager
def _one_build_at_a_time(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_if_changed(path: Path, text: str) -> None:
    """Leaves the file's time alone when nothing changed, so that nothing is rebuilt for it."""
    path.parent.mkdir(exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _probe_toolkit(tools: Tools, folder: Path) -> None:
    """Compiles an empty kernel once per toolkit: pieces of different releases only show when they meet."""
    stamp = folder / "probe.txt"
    signature = f"{tools.toolkit} {tools.cxx}"
    if stamp.is_file() and stamp.read_text() == signature:
        return
    source = folder / "probe.cu"
    source.write_text("__global__ void probe() {}\n")
    done = subprocess.run(
        [
            str(tools.toolkit.nvcc),
            "-ccbin",
            tools.cxx,
            "-std=c++20",
            "-arch=sm_80",
            "-c",
            str(source),
            "-o",
            os.devnull,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = " | ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
        raise environment.BuildProblem(
            "the CUDA toolkit does not work",
            f"{tools.toolkit.home} with {tools.cxx} compiles no empty kernel: {said}",
            "nvcc, nvvm, crt, cccl and cudart of one CUDA 13 release",
            f'python -m pip install "{toolkit_requirement()}"',
        )
    stamp.write_text(signature)


# ---------------------------------------------------------------- what is baked in


def _build_record(tools: Tools, variant: Variant, version: str) -> str:
    record = {
        "version": version,
        "git_sha": _git_sha(),
        "torch": tools.torch.version,
        "cuda": tools.toolkit.version,
        "archs": " ".join(variant.archs),
        "flags": " ".join(variant.nvcc_flags + variant.defines),
        "variant": variant.name,
        "sources": content_hash(ROOT / "csrc"),
    }
    lines = ["// Generated; see csrc/build_info.h.", "#pragma once"]
    lines += [f"#define FLASH_EXT_BUILD_{key.upper()} {json.dumps(value)}" for key, value in record.items()]
    lines += [f"#define FLASH_EXT_BUILD_JSON {json.dumps(json.dumps(record))}", ""]
    return "\n".join(lines)


def _git_sha() -> str:
    """The commit of the sources, empty outside a repository of our own (an unpacked source archive)."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return ""
    git = ["git", "-C", str(ROOT)]
    sha = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=False
    )
    return sha.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")


# ---------------------------------------------------------------- gates


def _gate(folder: Path, variant: Variant, target: str) -> None:
    is_ladder = target == LADDER_LIBRARY
    kernels: list[ptxas_log.KernelResources] = []
    warnings: list[str] = []
    for source in ladder_sources() if is_ladder else source_files():
        if source.suffix == ".cu":
            found, other = ptxas_log.parse_log(str(source), (folder / f"{source}.o.log").read_text())
            kernels += found
            warnings += other
    kernels = ptxas_log.demangle(kernels)
    cost = folder / "full_build.json"
    table = {
        "variant": variant.name,
        "archs": variant.archs,
        "seconds": _seconds(folder),
        "full_build": json.loads(cost.read_text()) if cost.is_file() else None,
        "from_cache": (folder / cache.HITS).is_file(),
        "warnings": warnings,
        "kernels": [dataclasses.asdict(item) for item in kernels],
    }
    name = "ladder_resources.json" if is_ladder else "resources.json"
    (ROOT / "build" / name).write_text(json.dumps(table, indent=1))
    if warnings:
        print("\n".join(["the compiler warned:", *warnings]), file=sys.stderr, flush=True)
    bad = ptxas_log.violations(kernels, warnings)
    if bad and variant.name == "release":
        raise GateFailure("\n  ".join(["kernels that must not be shipped:", *bad]))
    if bad:
        print("\n  ".join([f"tolerated in a {variant.name} build:", *bad]), file=sys.stderr, flush=True)


def _seconds(folder: Path) -> dict[str, float]:
    """Wall time of each object's latest compile, from ninja's own log."""
    times = {}
    log = folder / ".ninja_log"
    for line in log.read_text().splitlines()[1:] if log.is_file() else []:
        start, end, _, output, *_ = line.split("\t")
        times[output] = (int(end) - int(start)) / 1000
    return times
