"""Which kernels a call runs: the tables of csrc/plan/, what prints them, and the launches that follow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_ext
from flash_ext import planned
from flash_ext.ops import _C
from tests.harness import Target, check_done_launches, on_short_paths

ROOT = Path(__file__).parents[1]
SHAPE = {"seqlen_q": 4096, "seqlen_k": 4096, "num_heads": 16, "num_heads_k": 16, "head_dim": 128}
SHAPE["head_dim_v"] = 128

# Calls for every row of the tables, in words of `planned.plan`.
H200 = "gpu=9.0/132"
CALLS = {
    "sm90": {
        "sm80.fwd.short": "fwd seqlen=49",
        "sm80.fwd.split_kv": "fwd seqlen=1/8192 heads=32/8",
        "sm90.fwd.m128": "fwd seqlen=512 batch=4 heads=16",
        "sm90.fwd.m192": "fwd batch=4",
        "sm90.fwd.m128_wide": "fwd head_dim=256",
        "sm80.fwd_mod.short": "fwd seqlen=49 bias",
        "sm90.fwd_mod.m192.slopes": "fwd batch=4 alibi",
        "sm90.fwd_mod.m192.cap": "fwd batch=4 softcap",
        "sm90.fwd_mod.m192.drop": "fwd batch=4 dropout",
        "sm90.fwd_mod.m192.hide": "fwd batch=4 key_padding",
        "sm90.fwd_mod.m128.exponents": "fwd seqlen=512 alibi",
        "sm90.fwd_mod.m128.bias": "fwd bias",
        "sm90.fwd_mod.m128.drop": "fwd seqlen=512 dropout",
        "sm90.fwd_mod.m128.hide": "fwd batch=4 mask",
        "sm90.fwd_mod.m128.all": "fwd bias dropout",
        "sm80.bwd.short": "bwd seqlen=49",
        "sm90.bwd.split": "bwd head_dim=256",
        "sm90.bwd.whole_keys": "bwd seqlen=128 head_dim=64",
        "sm90.bwd.split_short": "bwd seqlen=512 batch=32 causal",
        "sm90.bwd.dq_ordered": "bwd deterministic",
        "sm90.bwd.dq_pool": "bwd seqlen=1024 batch=16",
        "sm90.bwd.dq_atomic": "bwd seqlen=16384",
        "sm80.bwd_mod.short": "bwd seqlen=49 bias_gradient",
        "sm90.bwd_mod.fused": "bwd key_padding",
        "sm90.bwd_mod.split": "bwd key_padding head_dim=256",
        "sm80.bwd_mod": "bwd softcap dropout head_dim=64",
    },
    "sm80": {
        "sm80.fwd": "fwd",
        "sm80.fwd_mod": "fwd bias",
        "sm80.bwd": "bwd",
    },
}
# Rows that words cannot reach: calls that want the gradient of a bias alone, portable kernels on Hopper.
BEYOND_WORDS = {"bwd_mod.other_gradients", "sm80.bwd_mod.persistent"}


@pytest.fixture
def plans(pretended_gpu) -> None:
    _C.set_switch("short_kernels", None)


def of(path: str, call: str) -> dict:
    gpu = "gpu=9.0/132" if path == "sm90" else "gpu=8.0/108"
    return planned.plan(f"{call} {gpu}")


@pytest.mark.parametrize(("path", "row"), [(path, row) for path in CALLS for row in CALLS[path]])
def test_a_call_for_every_row(plans, path: str, row: str) -> None:
    found = of(path, CALLS[path][row])
    assert found["row"] == row
    assert found["launches"] and found["kernel"]
    assert sum(found["workspace"].values()) == found["workspace_bytes"]


def test_no_row_is_left_out() -> None:
    named = {row for calls in CALLS.values() for row in calls} | BEYOND_WORDS
    assert named == {row for _, row, _ in _C.plan_rows()}


def test_every_row_with_a_preference_has_its_evidence_in_the_page() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    table = page.split("## Evidence", 1)[1].split("\n## ", 1)[0]
    ids = re.findall(r"^\| ([a-z0-9-]+) \|", table, re.MULTILINE)
    assert sorted(set(ids) - {"id"}) == sorted({evidence for _, _, evidence in _C.plan_rows() if evidence})
    headings = {
        re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-")
        for line in re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    }
    for anchor in re.findall(r"\]\(#([^)]*)\)", table):
        assert anchor in headings


def test_a_row_may_be_asked_for(plans) -> None:
    usual = _C.plan("bwd", **SHAPE)
    other = _C.plan("bwd", **SHAPE, row="sm90.bwd.dq_ordered")
    assert other["row"] == "sm90.bwd.dq_ordered" != usual["row"]
    assert other["kernel"].endswith("_det")
    with pytest.raises(ValueError, match=r"has no row 'sm90\.fwd\.m192' for this call"):
        _C.plan("bwd", **SHAPE, row="sm90.fwd.m192")


def test_deterministic_backwards_never_add_in_any_order(plans) -> None:
    for head_dim in (64, 96, 128, 192, 256):
        for gpu in ("9.0/132", "8.0/108"):
            found = planned.plan(f"bwd deterministic head_dim={head_dim} gpu={gpu}")
            assert found["row"] != "sm90.bwd.dq_atomic"
            assert "dq_accum" not in found["workspace"] or found["row"] == "sm90.bwd.dq_ordered"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("fwd warp", "unknown modifier 'warp'"),
        ("fwd colour=4", "unknown colour="),
        ("fwd heads=0/1", "num_heads a multiple"),
        ("fwd heads=5/2", "num_heads a multiple"),
        ("fwd batch=-1", "at least 0"),
        ("fwd bwd", "either fwd or bwd"),
    ],
)
def test_words_that_are_refused(plans, call: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned.plan(f"{call} {H200}")


def test_another_gpu_is_no_switch_of_the_process() -> None:
    before = _C.get_switch("num_sms")
    assert planned.plan("bwd gpu=8.0/108")["path"] == "sm80"
    assert planned.plan(f"bwd {H200}")["path"] == "sm90"
    assert _C.get_switch("num_sms") == before
    with pytest.raises(ValueError, match="gpu= takes"):
        planned.plan("bwd gpu=9.0")


def test_plans_in_words(plans) -> None:
    packed = planned.plan(f"fwd packed batch=4 seqlen=512 {H200}")
    rows = SHAPE | {"seqlen_q": 2048, "seqlen_k": 2048}
    assert packed["launches"] == _C.plan("fwd", batch=4, packed=True, **rows)["launches"]
    assert planned.plan(f"fwd head_dim=36/64 {H200}")["path"] == "sm80", "rows of 72 bytes"
    assert planned.plan(f"bwd sinks {H200}")["row"] == planned.plan(f"bwd {H200}")["row"]


@pytest.mark.parametrize("row", ["sm90.fwd_mod.m192.drop", "sm90.fwd_mod.m192.slopes", "sm90.bwd.dq_pool"])
def test_rows_that_cannot_are_refused(plans, row: str) -> None:
    direction = "bwd" if "bwd" in row else "fwd"
    modifiers = ["bias", "dropout", "alibi"] if direction == "fwd" else []
    with pytest.raises(ValueError, match="has no row"):
        _C.plan(direction, **SHAPE | {"seqlen_q": 300, "seqlen_k": 300}, modifiers=modifiers, row=row)


def run_info(call: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "flash_ext.info", "--plan", call]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_printed() -> None:
    call = f"bwd batch=4 seqlen=4096 heads=32/8 head_dim=128 causal alibi {H200}"
    done = run_info(call)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"call        {call}"
    assert "row         sm90.bwd_mod.fused, evidence fused-bwd-mod" in lines
    assert any(line.startswith("launch      bwd_mod_sm90_hd128: tile 64 x 128") for line in lines)
    assert lines[-1].startswith("workspace   ") and lines[-1].endswith(" bytes in all")
    wrong = run_info("fwd warp gpu=9.0/132")
    assert wrong.returncode == 2 and "unknown modifier 'warp'" in wrong.stderr


@on_short_paths
def test_what_runs_is_what_the_plan_says(target: Target) -> None:
    """Launch by launch, of calls for all rows."""
    with target.active():
        for call in CALLS[target.path].values():
            words, numbers = call.split(), dict(w.split("=") for w in call.split() if "=" in w)
            if set(words) & {"mask", "bias_gradient"}:
                continue  # the gauntlet has them
            seqlen, head_dim = numbers.get("seqlen", "1024").split("/"), int(numbers.get("head_dim", 128))
            heads = [int(n) for n in numbers.get("heads", "4").split("/")]
            rows, keys = int(seqlen[0]), int(seqlen[-1])
            make = dict(device="cuda", dtype=torch.bfloat16)
            q = torch.randn(2, rows, heads[0], head_dim, **make).requires_grad_()
            k, v = (torch.randn(2, keys, heads[-1], head_dim, **make).requires_grad_() for _ in range(2))
            options: dict = {"causal": "causal" in words, "deterministic": "deterministic" in words}
            if "alibi" in words:
                options["alibi_slopes"] = torch.rand(heads[0], device="cuda")
            if "softcap" in words:
                options["softcap"] = 30.0
            if "dropout" in words:
                options["dropout_p"] = 0.1
            if "key_padding" in words:
                options["key_padding_mask"] = torch.ones(2, keys, device="cuda", dtype=torch.bool)
            if "bias" in words:
                options["attn_mask"] = torch.randn(1, heads[0], rows, keys, **make)
            out = flash_ext.attention(q, k, v, path=target.path, **options)
            check_done_launches(_C.last_launch())
            if "bwd" in words:
                out.sum().backward()
                check_done_launches(_C.last_launch())
