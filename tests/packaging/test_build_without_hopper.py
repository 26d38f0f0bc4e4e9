"""A build for other GPUs than Hopper: what it leaves out, and that a Hopper GPU then takes what is there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kept import compiled
from tests.sources import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
from build_backend import compile as kernels_build  # noqa: E402

pytestmark = pytest.mark.everywhere

LIMIT_SMALL, LIMIT_LARGE = 101376, 232448
PROGRAM = """
#include <cstdio>
#include "build_info.h"
#include "heuristics.h"
#include "path_choice.h"
#include "paths.h"
namespace flash_ext {
BuildInfo info = {};
const BuildInfo& build_info() { return info; }
DeviceInfo query_device(int index) {
  DeviceInfo info;
  info.cc_major = index, info.num_sms = 132, info.smem_per_block = index == 9 ? LIMIT_LARGE : 166912;
  return info;
}
}  // namespace flash_ext
int main(int, char** arguments) {
  flash_ext::info.archs = arguments[1];
  for (int major : {8, 9}) {
    const flash_ext::DeviceInfo d = flash_ext::device_info(major);
    const bool large = flash_ext::smem_class(d.cc_major, d.smem_per_block) == flash_ext::SmemClass::kLarge;
    std::printf("%d %d ", d.smem_per_block, large);
  }
}
"""
TABLE = """
#include "call.h"
namespace flash_ext {
inline constexpr int kSizes[] = {64, 128};
template <int D>
std::string launch_of(const FwdCall&, const Launch&) {
  return std::to_string(sizeof(char[D == 64 ? SIZE : 1]));
}
constexpr auto kTable = instances_of<kSizes>(
    []<int D>(Constant<D>) { return FwdInstance{D, D, launch_of<D>}; });
const FwdInstances kFwd = kTable;
}
int main() { return static_cast<int>(flash_ext::kFwd.size()); }
"""


def compile_program(folder: Path, text: str, *more: str) -> str:
    """Makes the folder's ``program``; returns what the compiler says of a text that it refuses."""
    (folder / "program.cpp").write_text(text)
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-std=c++20", "-w", f"-I{ROOT / 'csrc'}", str(folder / "program.cpp"), *more]
    done = compiled(command, folder / "program")
    return done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def found_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a build for some architectures finds on an Ampere GPU and on a Hopper GPU."""
    folder = tmp_path_factory.mktemp("device")
    text = PROGRAM.replace("LIMIT_LARGE", str(LIMIT_LARGE))
    # What asks for plans is not called and goes, and with it what it would call.
    path_choice = str(ROOT / "csrc" / "path_choice.cpp")
    assert compile_program(folder, text, path_choice, "-ffunction-sections", "-Wl,--gc-sections") == ""
    return lambda archs: subprocess.check_output([folder / "program", archs], text=True)


@pytest.mark.parametrize("archs, class_of_hopper", [("8.0 8.0+PTX 9.0a", 1), ("8.0 8.0+PTX", 0)])
def test_large_tiles_are_for_builds_that_have_them(found_by, archs, class_of_hopper):
    """Where they are missing a launch of one would trap; small ones run from PTX."""
    ampere, hopper = (166912, 0), (LIMIT_LARGE if class_of_hopper else LIMIT_SMALL, class_of_hopper)
    assert tuple(map(int, found_by(archs).split())) == (*ampere, *hopper)


def test_what_is_left_out_is_not_compiled(tmp_path):
    """Its table is empty; its launchers are not even looked at, or a wrong one would be an error."""
    right, wrong = TABLE.replace("SIZE", "1"), TABLE.replace("SIZE", "-1")
    for text, defines, entries in ((right, (), 2), (wrong, ("-DFLASH_EXT_LEFT_OUT",), 0)):
        assert compile_program(tmp_path, text, *defines) == ""
        assert subprocess.run([tmp_path / "program"], check=False).returncode == entries
    assert "error" in compile_program(tmp_path, wrong)


@pytest.mark.parametrize(
    "archs, left_out", [("8.0 8.0+PTX 9.0a", False), ("9.0a", False), ("8.0", True), ("8.6 12.0", True)]
)
def test_files_for_hopper_are_left_out_of_other_builds(archs, left_out):
    variant = kernels_build.Variant(tuple(archs.split()))
    for source in kernels_build.source_files():
        flags = variant.gencode_of(source)
        for_hopper = "_sm90" in source.stem or "_sm80_large" in source.stem
        assert (kernels_build.LEFT_OUT in flags) == (left_out and for_hopper), source
        assert [flag for flag in flags if flag.startswith("-gencode")], source
