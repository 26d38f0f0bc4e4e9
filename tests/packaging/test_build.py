"""Gates on the compiled module: what ptxas said of every kernel, its machine code, and what it links.

No GPU is needed. Kernels are known by what build/resources.json holds (csrc/build_backend writes it) and by
disassembling the module itself.
"""

from __future__ import annotations

import collections
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import flash_ext
from flash_ext._ops import library as ops
from tests.built import disassemblers, module_file
from tests.kept import kept
from tests.sources import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
from build_backend import ptxas_log  # noqa: E402

pytestmark = [pytest.mark.everywhere, pytest.mark.xdist_group("build")]  # one reads the machine code

HEAD_DIMS = (64, 96, 128, 192, 256)  # compiled sizes; every other head_dim runs in the next one up
DTYPES = ("__half", "__nv_bfloat16")
SMALL, LARGE = 0, 1  # shared-memory classes: 99 KB everywhere, 227 KB on sm_90
ARCHS = ("sm_80", "sm_90a")
# Shared memory a block may use, bytes, by compute capability.
SMEM_LIMITS = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
BY_CLASS = ("fwd_kernel", "fwd_mod_kernel", "bwd_kernel", "bwd_mod_kernel")  # compiled for both classes
PORTABLE_MOD_KINDS = 4  # of fwd_mod, in the large class: csrc/heuristics.h names them
PORTABLE_MOD_KIND_HEAD_DIMS = (128,)
ONE_CLASS = ("bwd_q_kernel", "bwd_q_mod_kernel")
ANY_HEAD_DIM = ("bwd_bias_kernel",)  # for both classes
HOPPER = ("fwd_sm90_kernel",)  # compiled for sm_90a alone
# 192 for head_dim_v of 192 and of 128; lower tiles, for whole keys and for parts of them; the lowest ones.
HOPPER_HEAD_DIMS = (*HEAD_DIMS, 192, *(2 * (64, 96, 128)), 64)
HOPPER_CACHED = ("fwd_cached_sm90_kernel",)
HOPPER_CACHED_HEAD_DIMS = (*HEAD_DIMS, 192)  # as above, without lower tiles
# Up to 128 once more for few rows, and both with modifiers too.
HOPPER_PACKED, HOPPER_PACKED_HEAD_DIMS = ("fwd_packed_sm90_kernel",), (*4 * (64, 128), 256)
# Those with modifiers for few rows alone.
HOPPER_QUANTIZED, HOPPER_QUANTIZED_HEAD_DIMS = ("fwd_packed_quantized_sm90_kernel",), 3 * (64, 128)
HOPPER_LATENT = ("fwd_latent_sm90_kernel",)
HOPPER_MOD = ("fwd_mod_sm90_kernel",)
HOPPER_MOD_HEAD_DIMS = (64, 128, 192, 256)
HOPPER_MOD_KINDS = (0, 2)  # scores hidden only, or all there is
HOPPER_MOD_OWN_KINDS = (1, 3)  # of head_dim 128: weights dropped, slopes or a softcap alone
# A bias alone: one that TMA brings, one whose rows begin anywhere, one in fp32.
HOPPER_MOD_BIAS_KINDS, HOPPER_MOD_BIAS_HEAD_DIMS = (4, 5, 6), (64, 128)
# In higher tiles: scores hidden, slopes, a softcap, weights dropped, a bias of 16 bits, a loose one, a mask.
HOPPER_MOD_TALL_KINDS, HOPPER_MOD_TALL_HEAD_DIMS = (7, 8, 9, 10, 11, 12, 14), (64, 128)
HOPPER_MOD_TALL_FLOAT_KINDS, HOPPER_MOD_TALL_FLOAT_HEAD_DIMS = (13,), (64,)  # a bias in fp32
# Once more with more keys a tile: scores hidden, slopes, a softcap, a bias; hidden, added, capped, dropped.
HOPPER_MOD_WIDE_KINDS, HOPPER_BWD_MOD_WIDE_KINDS, WIDE_TILES_HEAD_DIMS = (7, 8, 9, 11), (0, 1, 3, 4), (64,)
HOPPER_BWD_MOD = ("bwd_mod_sm90_kernel",)
HOPPER_BWD_MOD_HEAD_DIMS = (64, 128)
# Each has a kernel: hidden, added, added with a bias in fp32, capped, dropped, added and dropped.
SCORE_KINDS = (0, 1, 2, 3, 4, 5)
HOPPER_BWD_SPLIT = ("bwd_split_sm90_kernel",)  # of dK and dV, and of dQ
HOPPER_BWD_WIDE_MOD_HEAD_DIMS = (64, 128, 192, 256)  # up to 128 in a fixed order
WIDE_SCORE_KINDS = (0, 1, 3, 5)  # hidden, added, capped, dropped with or without what is added
PLAIN_SCORES = 6  # the kind of those kernels without modifiers
HOPPER_BWD_BIAS = ("bwd_bias_sm90_kernel",)
HOPPER_BWD_BIAS_HEAD_DIMS = (64, 128, 256)
HOPPER_BWD = ("bwd_sm90_kernel",)
# Added in any order, in a fixed one, stored by one warpgroup, added in any by CTAs that share blocks; 2, not
# at all, for few rows; 3, stored by two warpgroups, for few keys.
DQ_KINDS = (0, 1, 4, 5)
FEW_KEYS = (64, 96)  # head_dims
FEW_ROWS = (64, 128)  # head_dims; dQ then has the kernel of those above 128
HOPPER_BWD_PASSES = ("row_stats_and_zero_kernel", "dq_convert_kernel")
HOPPER_BWD_HEAD_DIMS = (64, 96, 128)
HOPPER_BWD_WIDE_PASSES = ("row_stats_kernel",)  # of head_dim_v
HOPPER_BWD_WIDE_HEAD_DIMS = (192, 192, 256)
WARPGROUPS = (
    *HOPPER, *HOPPER_CACHED, *HOPPER_PACKED, *HOPPER_QUANTIZED, *HOPPER_LATENT, *HOPPER_BWD,
    *HOPPER_BWD_SPLIT, *HOPPER_MOD, *HOPPER_BWD_MOD,
)  # fmt: skip
SPLIT = ("fwd_split_kernel", "fwd_split_mod_kernel")  # in both machine codes, for 16 and for 64 rows
SPLIT_HEAD_DIMS = (64, 128, 256)
STRETCHED = ("fwd_kernel",)  # once more, for very many keys
SHORT_FWD, SHORT_BWD = ("fwd_short_kernel",), ("bwd_short_kernel",)  # in both machine codes
SHORT_HEAD_DIMS = (32, 64, 80, 128, 256)
SHORT_TILES = {32: 4, 64: 4, 80: 4, 128: 4, 256: 3}  # of 16, 32, 64 and, up to head_dim 128, 80 rows
SHORT_BWD_TILES = SHORT_TILES | {128: 3}
# Of any head_dim.
MERGE = ("fwd_merge_kernel", "sum_heads_kernel", "append_kv_kernel", "append_bytes_kernel")
CACHED_MERGE, CACHED_MERGE_COLUMNS = ("fwd_merge_cached_kernel",), (2, 4)  # 128 times so many at most
# Over a paged cache.
CACHED = ("fwd_cached_kernel",)
CACHED_SPLIT = ("fwd_split_cached_kernel", *2 * ("fwd_split_cached_mod_kernel",))  # with trees, with masks
QUANTIZED, CACHE_TYPES = 2 * ("fwd_split_quantized_kernel",), ("1", "2")  # the same; e4m3, int8
# By enum Operands: q and k in e4m3, those of small numbers, q and k of 16 bits.
FP8_HEAD_DIMS = {1: (64, 96, 128, 192, 192, 256), 2: (96, 128, 192, 192, 256), 3: (64, 96, 128)}
FP8_NUMBERS = (8, 16, 32)  # lanes a row
PASSES = ("bwd_preprocess_kernel", "bwd_postprocess_kernel")
MASK_PASSES = (
    "pack_mask_kernel",
    "group_mask_kernel",
    "pack_blocks_kernel",
    "group_document_ids_kernel",
    "group_intervals_kernel",
    *(2 * ("align_bias_rows_kernel",)),  # elements of 2 and of 4 bytes
)


@pytest.fixture(scope="module")
def resources() -> dict:
    """The table of the build that the loaded module comes from."""
    path = ROOT / "build" / "resources.json"
    if not path.is_file():
        pytest.skip("no build/resources.json: the module was not built in this tree")
    table = json.loads(path.read_text())
    if table["variant"] != "release" or "9.0a" not in table["archs"] or "8.0" not in table["archs"]:
        pytest.skip(f"a {table['variant']} build for {' '.join(table['archs'])}: gates hold for releases")
    return table


@pytest.fixture(scope="module")
def machine_code() -> dict[tuple[str, str], collections.Counter]:
    """Opcodes, with their suffixes, of every kernel: {(arch, symbol): Counter}."""
    tools = disassemblers()
    if tools is None:
        pytest.skip("no cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [tools / "cuobjdump", "-xelf", "all", module_file()], cwd=folder, check=True, capture_output=True
        )
        cubins = [(path, arch) for arch in ARCHS for path in Path(folder).glob(f"*.{arch}.cubin")]
        with ThreadPoolExecutor() as pool:
            parts = list(pool.map(lambda item: opcodes_of(item[0], tools / "nvdisasm"), cubins))
    return {
        (arch, kernel): opcodes
        for (_, arch), part in zip(cubins, parts, strict=True)
        for kernel, opcodes in part.items()
    }


# Producers begin with it; consumers lie in front of them.
GIVES_REGISTERS, OF_CONSUMERS = "USETMAXREG.DEALLOC.CTAPOOL", "LDL or STL before that"


def opcodes_of(cubin: Path, nvdisasm: Path) -> dict[str, collections.Counter]:
    """Those of each kernel in a file. The disassembler takes 3 s for 2 MB, so they are kept."""
    opcode = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")

    def make() -> bytes:
        found: dict[str, collections.Counter] = {}
        with subprocess.Popen([nvdisasm, "-c", "-ndf", cubin], text=True, stdout=subprocess.PIPE) as listing:
            for line in listing.stdout:
                if line.startswith("//---") and ".text." in line:
                    opcodes = found[line.split(".text.")[1].split()[0]] = collections.Counter()
                elif match := opcode.match(line):
                    opcodes[match.group(1)] += 1
                    if match.group(1).startswith(("LDL", "STL")) and not opcodes[GIVES_REGISTERS]:
                        opcodes[OF_CONSUMERS] += 1
        assert listing.returncode == 0
        return json.dumps(found).encode()

    version = subprocess.run([nvdisasm, "--version"], check=True, capture_output=True).stdout
    kernels = json.loads(kept("opcodes 2", [version, cubin.read_bytes()], make))
    return {kernel: collections.Counter(opcodes) for kernel, opcodes in kernels.items()}


def kernel_id(name: str) -> tuple[str, str | None, int | None, int | None]:
    """(kernel, element type, head_dim, shared-memory class or kind of scores) of a demangled name; None is
    what it has not.

    The mask passes know neither types nor sizes. Some traits end with whether modifiers are compiled in,
    which the kernel's name says as well, and whether those that add to scores are.
    """
    kernel = re.search(r"(\w+_kernel)([<(])", name)
    assert kernel, f"unexpected kernel {name}"
    if kernel.group(2) == "(" or re.search(r"_kernel<unsigned \w+>", name):
        return kernel.group(1), None, None, None
    if quantized := re.search(r"QuantizedTraits<\(\w+(?:::\w+)*\)(\d), (\d+), \d+>", name):
        return kernel.group(1), quantized.group(1), int(quantized.group(2)), None
    config = re.search(
        r"(__half|__nv_bfloat16)(?:, (\d+))?(?:, \d+)*(?:, \(\w+(?:::\w+)*\)(\d+))?"
        r"(?:, \(\w+(?:::\w+)*\)\d)?(?:, (?:true|false))*>",
        name,
    )
    assert config, f"unexpected kernel {name}"
    head_dim, smem_class = (int(number) if number else None for number in config.groups()[1:3])
    return kernel.group(1), config.group(1), head_dim, smem_class


def static_smem(resources: dict, kernels: tuple[str, ...]) -> int:
    """Bytes of shared memory that a kernel declares itself, the most among those of these names."""
    return max(item["static_smem"] for item in resources["kernels"] if kernel_id(item["name"])[0] in kernels)


# ---- what ptxas said -------------------------------------------------------------------------------------


def test_no_kernel_uses_local_memory(resources):
    kernels = [ptxas_log.KernelResources(**item) for item in resources["kernels"]]
    assert [item for item in kernels if item.misuses_memory] == []


def test_no_compiler_warning(resources):
    """C7508 and C7510-C7519 would be among these; no other one is tolerated either."""
    assert resources["warnings"] == []


def test_every_kernel_of_the_dispatch_table_is_compiled_and_no_other(resources):
    """For both machine codes; what is missing would be a launch error, what is extra dead weight.

    Hopper has the large tiles of portable kernels, others the small ones. Backwards with modifiers have the
    passes of those without.
    """
    others = itertools.product(ONE_CLASS + PASSES, DTYPES, HEAD_DIMS, (None,))
    hopper_fwd = itertools.product(HOPPER, DTYPES, HOPPER_HEAD_DIMS, (None,))
    # Both modes of the backward: its deterministic kernels have the same name.
    hopper_bwd = [
        *itertools.product(HOPPER_BWD, DTYPES, HOPPER_BWD_HEAD_DIMS, DQ_KINDS),
        *itertools.product(HOPPER_BWD_PASSES, DTYPES, HOPPER_BWD_HEAD_DIMS, (None,)),
        *itertools.product(HOPPER_BWD, DTYPES, FEW_ROWS, (2,)),
        *itertools.product(HOPPER_BWD, DTYPES, FEW_KEYS, (3,)),
        *itertools.product(HOPPER_BWD_SPLIT, DTYPES, FEW_ROWS, (PLAIN_SCORES,)),
    ]
    hopper_wide = itertools.product(2 * HOPPER_BWD_SPLIT, DTYPES, HOPPER_BWD_WIDE_HEAD_DIMS, (PLAIN_SCORES,))
    hopper_wide_passes = itertools.product(
        HOPPER_BWD_WIDE_PASSES, DTYPES, HOPPER_BWD_WIDE_MOD_HEAD_DIMS, (None,)
    )
    hopper_wide_mod = itertools.product(
        2 * HOPPER_BWD_SPLIT, DTYPES, HOPPER_BWD_WIDE_MOD_HEAD_DIMS, WIDE_SCORE_KINDS
    )
    hopper_mod = [
        *itertools.product(HOPPER_MOD, DTYPES, HOPPER_MOD_HEAD_DIMS, HOPPER_MOD_KINDS),
        *itertools.product(HOPPER_MOD, DTYPES, (128,), HOPPER_MOD_OWN_KINDS),
        *itertools.product(HOPPER_MOD, DTYPES, HOPPER_MOD_BIAS_HEAD_DIMS, HOPPER_MOD_BIAS_KINDS),
        *itertools.product(HOPPER_MOD, DTYPES, HOPPER_MOD_TALL_HEAD_DIMS, HOPPER_MOD_TALL_KINDS),
        *itertools.product(HOPPER_MOD, DTYPES, HOPPER_MOD_TALL_FLOAT_HEAD_DIMS, HOPPER_MOD_TALL_FLOAT_KINDS),
        *itertools.product(HOPPER_MOD, DTYPES, WIDE_TILES_HEAD_DIMS, HOPPER_MOD_WIDE_KINDS),
    ]
    hopper_bwd_mod = [
        *itertools.product(HOPPER_BWD_MOD, DTYPES, HOPPER_BWD_MOD_HEAD_DIMS, SCORE_KINDS),
        *itertools.product(HOPPER_BWD_MOD, DTYPES, WIDE_TILES_HEAD_DIMS, HOPPER_BWD_MOD_WIDE_KINDS),
    ]
    # Once for a bias that TMA brings, once for others; once with the statistics of kernels behind it.
    hopper_bwd_bias = [
        *itertools.product(2 * HOPPER_BWD_BIAS, DTYPES, HOPPER_BWD_BIAS_HEAD_DIMS, (None,)),
        *itertools.product(HOPPER_BWD_BIAS, DTYPES, HOPPER_BWD_BIAS_HEAD_DIMS[-1:], (None,)),
    ]
    split = itertools.product(2 * (SPLIT + CACHED_SPLIT), DTYPES, SPLIT_HEAD_DIMS, (None,))
    quantized = itertools.product(2 * QUANTIZED, CACHE_TYPES, SPLIT_HEAD_DIMS, (None,))
    fp8_passes = [
        ("fp8_means_kernel", None, None, None),
        *itertools.product(("fp8_stats_kernel",), DTYPES, (None,), (None,)),
        *itertools.product(2 * ("fp8_numbers_kernel",), DTYPES, FP8_NUMBERS, (None,)),
    ]
    merge = [
        *itertools.product(MERGE, DTYPES, (None,), (None,)),
        *itertools.product(CACHED_MERGE, DTYPES, CACHED_MERGE_COLUMNS, (None,)),
    ]
    short = [
        kernel
        for names, tiles in ((SHORT_FWD, SHORT_TILES), (SHORT_BWD, SHORT_BWD_TILES))
        for head_dim in SHORT_HEAD_DIMS
        for kernel in itertools.product(tiles[head_dim] * names, DTYPES, (head_dim,), (None,))
    ]
    masks = itertools.product(MASK_PASSES, (None,), (None,), (None,))
    any_class = [*others, *split, *quantized, *short, *merge, *fp8_passes, *masks]
    of_hopper = [
        *hopper_fwd, *hopper_bwd, *hopper_wide, *hopper_wide_passes, *hopper_mod, *hopper_bwd_mod,
        *hopper_bwd_bias, *hopper_wide_mod,
        *[
            kernel
            for operands, dims in FP8_HEAD_DIMS.items()
            for kernel in itertools.product(("fwd_fp8_sm90_kernel",), DTYPES, dims, (operands,))
        ],
        *itertools.product(HOPPER_CACHED, DTYPES, HOPPER_CACHED_HEAD_DIMS, (None,)),
        *itertools.product(HOPPER_PACKED, DTYPES, HOPPER_PACKED_HEAD_DIMS, (None,)),
        *itertools.product(HOPPER_QUANTIZED, DTYPES, HOPPER_QUANTIZED_HEAD_DIMS, (None,)),
        *itertools.product(HOPPER_LATENT, DTYPES, (None,), (None,)),
    ]  # fmt: skip
    for arch in ARCHS:
        hopper = arch == "sm_90a"
        by_class = itertools.product(BY_CLASS, DTYPES, HEAD_DIMS, (LARGE if hopper else SMALL,))
        any_size = itertools.product(ANY_HEAD_DIM, DTYPES, (None,), (LARGE if hopper else SMALL,))
        more = (PORTABLE_MOD_KINDS - 1) * ("fwd_mod_kernel",)
        kinds = itertools.product(more, DTYPES, PORTABLE_MOD_KIND_HEAD_DIMS, (LARGE,))
        cached = itertools.product(CACHED, DTYPES, SPLIT_HEAD_DIMS, (LARGE if hopper else SMALL,))
        stretched = itertools.product(STRETCHED, DTYPES, HEAD_DIMS, (LARGE if hopper else SMALL,))
        own = (*kinds, *of_hopper) if hopper else ()
        expected = [*any_class, *by_class, *any_size, *stretched, *cached, *own]
        ours = [kernel_id(item["name"]) for item in resources["kernels"] if item["arch"] == arch]
        assert sorted(ours, key=str) == sorted(expected, key=str)


def test_documents_tell_how_many_kernels_a_build_has(resources):
    """What the time of a build depends on; who adds kernels writes down what a build then takes."""
    of = collections.Counter(item["arch"] for item in resources["kernels"])
    told = f"| {of.total()} kernels, {of['sm_80']} for 8.0 and {of['sm_90a']} for 9.0a |"
    assert told in (ROOT / "docs" / "design.md").read_text()


def test_a_build_from_nothing_stays_in_its_budget(resources):
    """Eight minutes on two cores, 4 GB for two compilers at once; CPU time: wall time knows more.

    The plain portable forward takes 23 s on the machine for which the budget stands, one file beside another;
    the same machine has been seen three times slower in all that it compiles. Two files tell that to 10 %.
    """
    cost = resources["full_build"]
    if cost is None and resources.get("from_cache"):
        pytest.skip("the cache had objects of it: FLASH_EXT_CACHE=off after removing build/ measures one")
    assert cost is not None, "the build folder is older than its log: remove build/ and build again"
    known = [resources["seconds"][f"inst/{name}.cu.o"] for name in ("fwd_sm80", "fwd_sm80_large")]
    slowness = max(1.0, sum(known) / 23)
    assert cost["cpu_seconds"] < 2 * 480 * slowness
    assert cost["peak_gib"] < 2


LOG_OF_ONE_KERNEL = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90a'
ptxas info    : Function properties for _Z1kPf
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 1.548 ms
"""


@pytest.mark.parametrize("stack, stores, loads", [(8, 0, 0), (0, 4, 0), (0, 0, 4)])
def test_gate_refuses_local_memory_by_name(stack, stores, loads):
    log = LOG_OF_ONE_KERNEL.format(stack=stack, stores=stores, loads=loads)
    (said,) = ptxas_log.violations(*ptxas_log.parse_log("a.cu", log))
    assert "_Z1kPf" in said and "sm_90a" in said


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",
        "ptxas warning : (C7508) setmaxnreg ignored to maintain minimum register requirements.",
        "ptxas info    : (C7519) Potential Performance Loss: ...",
    ],
)
def test_gate_refuses_lost_hopper_instructions(line):
    clean = LOG_OF_ONE_KERNEL.format(stack=0, stores=0, loads=0)
    assert ptxas_log.violations(*ptxas_log.parse_log("a.cu", clean)) == []
    assert ptxas_log.violations(*ptxas_log.parse_log("a.cu", clean + line)) == [line.strip()]


# ---- machine code ----------------------------------------------------------------------------------------


def test_machine_code_holds_what_the_table_lists(resources, machine_code):
    listed = {(item["arch"], item["symbol"]) for item in resources["kernels"]}
    assert set(machine_code) == listed


def test_no_local_loads_or_stores(resources, machine_code):
    """But by producers that have few registers, and six by consumers of a softcap beside them."""
    for item in (ptxas_log.KernelResources(**item) for item in resources["kernels"]):
        opcodes = machine_code[item.arch, item.symbol]
        if item.may_spill:
            caps = "bwd_mod" in item.name and "ScoreKind)3" in item.name
            assert opcodes[GIVES_REGISTERS] == 1 and opcodes[OF_CONSUMERS] <= (6 if caps else 0), item.name
        else:
            assert not [name for name in opcodes if name.split(".")[0] in ("LDL", "STL")], item.name


def test_matmul_kernels_use_tensor_cores_and_asynchronous_copies(resources, machine_code):
    """HMMA.16816 fed by LDGSTS and LDSM."""
    seen = 0
    for item in resources["kernels"]:
        of_others = SPLIT + SHORT_FWD + SHORT_BWD
        if kernel_id(item["name"])[0] not in BY_CLASS + ANY_HEAD_DIM + ONE_CLASS + of_others:
            continue
        names = " ".join(machine_code[item["arch"], item["symbol"]])
        assert re.search(r"HMMA\.16816\.F32", names), f"{item['name']} for {item['arch']}: no HMMA.16816.F32"
        for wanted in ("LDGSTS.", "LDSM."):
            assert wanted in names, f"{item['name']} for {item['arch']}: no {wanted}"
        seen += 1
    sizes = len(HEAD_DIMS) * len(BY_CLASS + ONE_CLASS + STRETCHED) + len(ANY_HEAD_DIM)
    sizes += 2 * len(SPLIT) * len(SPLIT_HEAD_DIMS) + sum(SHORT_TILES.values()) + sum(SHORT_BWD_TILES.values())
    kinds = (PORTABLE_MOD_KINDS - 1) * len(PORTABLE_MOD_KIND_HEAD_DIMS)
    assert seen == len(DTYPES) * (len(ARCHS) * sizes + kinds)


def test_hopper_kernels_use_warpgroup_products_and_bulk_copies(resources, machine_code):
    """Each product group is fenced once and waited for once: serialised ones would have a pair for
    each HGMMA. Producers hand registers to consumers."""
    seen = 0
    for item in resources["kernels"]:
        if kernel_id(item["name"])[0] not in WARPGROUPS:
            continue
        opcodes = machine_code[item["arch"], item["symbol"]]
        count = collections.Counter()
        for name, number in opcodes.items():
            count[name.split(".")[0]] += number
            count[name] += number
        kernel, _, head_dim, _ = kernel_id(item["name"])
        # Three products of at least four instructions each, where dQ of 64 columns is alone.
        products = 3 if kernel in HOPPER_BWD_SPLIT and head_dim == 64 else 4
        assert count["HGMMA"] >= products * 4 and count["UTMALDG"] > 0, item["name"]
        assert count["USETMAXREG"] >= 2, item["name"]
        groups = count["HGMMA"] // 4  # a group has at least four products
        assert 0 < count["WARPGROUP.ARRIVE"] <= groups, item["name"]
        assert 0 < count["WARPGROUP.DEPBAR.LE"] <= groups, item["name"]
        seen += 1
    plain = len(HOPPER) * len(HOPPER_HEAD_DIMS) + len(HOPPER_CACHED) * len(HOPPER_CACHED_HEAD_DIMS)
    plain += len(HOPPER_PACKED) * len(HOPPER_PACKED_HEAD_DIMS)
    plain += len(HOPPER_QUANTIZED) * len(HOPPER_QUANTIZED_HEAD_DIMS) + len(HOPPER_LATENT)
    wide = 2 * len(HOPPER_BWD_WIDE_HEAD_DIMS)
    narrow = len(DQ_KINDS) * len(HOPPER_BWD) * len(HOPPER_BWD_HEAD_DIMS) + 2 * len(FEW_ROWS)
    narrow += len(HOPPER_BWD) * len(FEW_KEYS)
    kinds = len(HOPPER_MOD_HEAD_DIMS) * len(HOPPER_MOD_KINDS) + len(HOPPER_MOD_OWN_KINDS)
    kinds += len(HOPPER_MOD_BIAS_HEAD_DIMS) * len(HOPPER_MOD_BIAS_KINDS)
    kinds += len(HOPPER_MOD_TALL_HEAD_DIMS) * len(HOPPER_MOD_TALL_KINDS)
    kinds += len(HOPPER_MOD_TALL_FLOAT_HEAD_DIMS) * len(HOPPER_MOD_TALL_FLOAT_KINDS)
    kinds += len(WIDE_TILES_HEAD_DIMS) * len(HOPPER_MOD_WIDE_KINDS)
    modified = len(HOPPER_MOD) * kinds
    modified += len(HOPPER_BWD_MOD) * len(HOPPER_BWD_MOD_HEAD_DIMS) * len(SCORE_KINDS)
    modified += len(HOPPER_BWD_MOD) * len(WIDE_TILES_HEAD_DIMS) * len(HOPPER_BWD_MOD_WIDE_KINDS)
    modified += 2 * len(HOPPER_BWD_WIDE_MOD_HEAD_DIMS) * len(WIDE_SCORE_KINDS)
    assert seen == len(DTYPES) * (plain + narrow + wide + modified)


# ---- plans against limits --------------------------------------------------------------------------------


@pytest.fixture
def device_switches(pretended_gpu: None) -> Callable[[int, int], None]:
    """Pretends to be a device; undone afterwards."""

    def pretend(compute_capability: int, smem: int) -> None:
        facts = {"compute_capability": compute_capability, "num_sms": 108, "smem_per_block": smem}
        for name, value in facts.items():
            ops._C.set_switch(name, value)

    return pretend


def plan(direction: str, head_dim: int, deterministic: bool = False, seqlen: int = 1024,
         modifiers: tuple[str, ...] = ()) -> dict:  # fmt: skip
    return ops._C.plan(direction, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=4, num_heads_k=4,
                       head_dim=head_dim, head_dim_v=head_dim, deterministic=deterministic,
                       modifiers=modifiers)  # fmt: skip


@pytest.mark.parametrize("compute_capability", SMEM_LIMITS)
def test_shared_memory_fits_every_device(device_switches, resources, compute_capability):
    """The plan of every head_dim, with what a kernel adds statically, is within the device's limit."""
    limit = SMEM_LIMITS[compute_capability]
    device_switches(compute_capability, limit)
    kernels = ("fwd_kernel", "bwd_kernel", "bwd_q_kernel", *HOPPER, *HOPPER_BWD, *HOPPER_BWD_SPLIT)
    static = static_smem(resources, kernels)
    for direction, head_dim, deterministic in itertools.product(("fwd", "bwd"), range(1, 257), (False, True)):
        chosen = plan(direction, head_dim, deterministic, seqlen=2048)  # not padded to 128 for few tiles
        hopper = compute_capability == 90 and head_dim % 8 == 0
        assert chosen["backend"] == ("sm90" if hopper else "sm80")
        assert 0 < chosen["smem_bytes"] + static <= limit, chosen
        size = int(re.search(r"hd(\d+)", chosen["kernel"]).group(1))
        assert size == min(item for item in HEAD_DIMS if item >= head_dim), chosen


@pytest.mark.parametrize("compute_capability", SMEM_LIMITS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shared_memory_with_modifiers_fits(device_switches, resources, compute_capability, head_dim):
    """The same for what a call with a modifier would launch."""
    limit = SMEM_LIMITS[compute_capability]
    device_switches(compute_capability, limit)
    for direction in ("fwd", "bwd"):
        launch = plan(direction, head_dim, seqlen=160, modifiers=("softcap",))
        wanted, kernel = f"{direction}_mod_sm80_hd{head_dim}", f"{direction}_mod_kernel"
        if compute_capability == 90:
            size = min(item for item in HOPPER_MOD_HEAD_DIMS if item >= head_dim)
            wanted, kernel = f"{direction}_mod_sm90_hd{size}", f"{direction}_mod_sm90_kernel"
            wanted += "_m192" if direction == "fwd" and size <= 128 else ""
            if direction == "bwd" and size > 128:
                kernel = "bwd_split_sm90_kernel"
        assert launch["kernel"] == wanted
        static = static_smem(resources, (kernel,))
        assert 0 < launch["smem_bytes"] + static <= limit, launch


def test_kernels_without_a_plan_declare_what_their_tiles_leave(resources):
    """bwd_q_mod and bwd_bias: csrc/heuristics.h asserts that they fit with this much of their own."""
    (most,) = re.findall(r"kModStatic = (\d+);", (ROOT / "csrc" / "heuristics.h").read_text())
    assert 0 < static_smem(resources, ("bwd_q_mod_kernel", "bwd_bias_kernel")) <= int(most)


@pytest.mark.parametrize("compute_capability, smem, reason",
                         [(75, 65536, "below 8.0"), (87, 49152, "shared memory")])  # fmt: skip
def test_devices_that_cannot_run_it_are_refused_in_words(device_switches, compute_capability, smem, reason):
    device_switches(compute_capability, smem)
    for direction in ("fwd", "bwd"):
        refused = plan(direction, 64)
        assert refused["backend"] is None
        assert reason in refused["reasons"]["sm80"]


# ---- linking ---------------------------------------------------------------------------------------------


def output_of(tool: str, flag: str) -> str:
    """What a tool of binutils says of the module."""
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool}: install binutils")
    return subprocess.run([tool, flag, str(module_file())], capture_output=True, text=True, check=True).stdout


def test_module_needs_no_cuda_library():
    """Neither a driver nor torch's CUDA libraries: the module loads with a CPU-only torch on any machine."""
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "-d"))
    assert "libtorch_cpu.so" in needed
    allowed = {"libcudart.so.13"}  # only where the toolkit has no static runtime
    assert {name for name in needed if re.search(r"cuda|cudnn|cublas", name)} <= allowed


def test_runtime_symbols_stay_inside():
    """A static CUDA runtime must neither export its symbols to torch's nor take torch's for its own."""
    symbols = output_of("nm", "-D").splitlines()
    assert any("PyInit__C" in line for line in symbols)
    assert [line for line in symbols if re.search(r" [TtWVB] _?_?cuda", line)] == []


def test_build_record_matches_the_package():
    built = ops._C.build_info
    assert built["version"] == flash_ext.__version__
    assert built["torch"] == torch.__version__
    assert "fast_math" not in built["flags"]  # exp, log and division keep their accuracy
    assert "-lineinfo" not in built["flags"]  # a tenth of a build's time, which only profilers want
