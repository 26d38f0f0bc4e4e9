"""The documents against the code: links, names, numbers, signatures, and every Python example in them.

The tile tables of docs/kernels.md are computed (tests/tile_tables.py). After a change of a tile,

    python -m tests.docs.test_docs

writes them anew.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import operator
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flash_ext
from bench.record import stored_text
from flash_ext._ops.library import _C
from tests.sources import ROOT
from tests.tile_tables import tile_tables, with_tile_tables

sys.path.insert(0, str(ROOT / "csrc"))

README = ROOT / "README.md"
KERNELS = ROOT / "docs" / "kernels.md"
MASKS = ROOT / "docs" / "masks.md"
REFERENCE = ROOT / "docs" / "reference.md"
# Their examples need other libraries: tests/docs/test_integrations.py runs them.
INTEGRATIONS = sorted((ROOT / "docs" / "integrations").glob("*.md"))
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.md"), *INTEGRATIONS]
)
SITE = sorted((ROOT / "docs").rglob("*.md"))
# Shared memory a block may use, bytes, by compute capability.
SMEM_OF = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.relative_to(ROOT).as_posix())


on_every_document = each(DOCUMENTS)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def without_code(text: str) -> str:
    """Markdown without its fenced blocks, where brackets and backticks mean something else."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def all_blocks(path: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return re.findall(r"^```(.*)\n((?:.*\n)*?)```$", text_of(path), re.M)


def code_blocks(path: Path, language: str) -> list[str]:
    return [block for kind, block in all_blocks(path) if re.fullmatch(language, kind)]


def section(path: Path, heading: str) -> str:
    """The text below a heading, up to the next one of the same level."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^\1 |\Z)", text_of(path), re.M | re.S)
    assert found, f"{path.name} has no section {heading!r}"
    return found.group(2)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows(text: str) -> list[list[str]]:
    """Body rows of the first table in ``text``."""
    table = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert table, "no table"
    return [cells(line) for line in table.group().splitlines()[2:]]


def rows_of_tables(path: Path) -> list[list[str]]:
    """All rows of all tables of a document."""
    return [cells(line) for line in text_of(path).splitlines() if line.startswith("|")]


# ---- links, names -------------------------------------------------------------------------------


@on_every_document
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(path))):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), f"{target} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", without_code(text_of(file)), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{target}: no such heading"


@on_every_document
def test_named_files_exist(path: Path) -> None:
    for name in re.findall(r"`((?:csrc|flash_ext|tests|bench|docs|\.ci)/[^`\s:]+)[^`]*`", text_of(path)):
        assert "<" in name or list(ROOT.glob(name.rstrip("/"))), f"{name} does not exist"


@on_every_document
def test_grouped_heads_are_explained_where_they_first_stand(path: Path) -> None:
    first = re.search(r"grouped heads(.*)", text_of(path), re.I)
    assert first is None or first[1].startswith((" (", " | h is"))


@on_every_document
def test_named_commands_exist(path: Path) -> None:
    text = text_of(path)
    for module in set(re.findall(r"python3? -m ((?:flash_ext|bench|tests)\.[\w.]*\w)", text)):
        assert importlib.util.find_spec(module), f"python -m {module}: no such module"
    targets = set(re.findall(r"^(\w+):", text_of(ROOT / "Makefile"), re.M))
    code = "\n".join(re.findall(r"`([^`\n]+)`", text) + code_blocks(path, "(?:sh)?"))
    for target in re.findall(r"^(?:.* )?make (?!-)(\w+)", code, re.M):
        assert target in targets, f"make {target}: no such target"


# ---- code ----------------------------------------------------------------------------------------------


@pytest.mark.everywhere
@pytest.mark.caching  # one captures a graph
@each([path for path in DOCUMENTS if code_blocks(path, "python") and path not in INTEGRATIONS])
def test_examples_run(path: Path) -> None:
    """All Python blocks of a document, in order, in one namespace."""
    names: dict[str, object] = {}
    for number, block in enumerate(code_blocks(path, "python"), 1):
        exec(compile(block, f"{path.name}, block {number}", "exec"), names)  # noqa: S102


def test_reference_lists_what_the_package_shows() -> None:
    """Its signatures and its table of modules together are ``dir(flash_ext)``."""
    public = [name for name in dir(flash_ext) if not name.startswith("_")]
    here, serving, fp8 = code_blocks(REFERENCE, "py")
    check_signatures(here, flash_ext, {name for name in public if callable(getattr(flash_ext, name))})
    engines = {name for name in flash_ext.serving.__all__ if name.startswith(("flash_", "get_"))}
    check_signatures(serving, flash_ext.serving, set(flash_ext.serving.__all__) - engines)
    check_signatures(fp8, flash_ext.fp8, set(flash_ext.fp8.__all__))
    modules = {name for name in public if isinstance(getattr(flash_ext, name), ModuleType)}
    assert {row[0].strip("`") for row in rows(text_of(REFERENCE))} == modules


@each([README, *SITE])
def test_every_code_block_runs(path: Path) -> None:
    """A block is Python, signatures, or lines of the README's script; others hold formulas and drawings."""
    blocks = all_blocks(path)
    assert 2 * len(blocks) == len(re.findall(r"^ *(?:```|~~~)", text_of(path), re.M))
    kinds = {"python", "py", "", *(["sh"] if path == README else [])}
    assert {kind for kind, _ in blocks} <= kinds
    commands = re.compile(r"^\s*(?:\$ |pip |python|make )", re.M)
    bare = [block for kind, block in blocks if not kind]
    assert not [block for block in bare if commands.search(block) or is_program(block)]


STATEMENTS = (ast.Import, ast.ImportFrom, ast.Attribute, ast.keyword, ast.With, ast.For, ast.FunctionDef)


def is_program(block: str) -> bool:
    """Python that does something. Formulas assign, and call functions by position alone."""
    try:
        body = ast.parse(textwrap.dedent(block)).body
    except SyntaxError:
        return bool(re.search(r"^\s*(?:import|from) ", block, re.M))
    calls = [node for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return bool(calls) or any(isinstance(node, STATEMENTS) for tree in body for node in ast.walk(tree))


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        ("from flash_ext import masks\n...", True),
        ("step()", True),
        ("out = attention(q, k, v, mask=mask)", True),
        ("    y = x.square()", True),
        ("with graph:\n    y = x", True),
        ("import torch\n$ not Python", True),
        ("bytes = 8 * rows + (0 if deterministic else 4 * rows)", False),
        ("s = softcap * tanh(s / softcap)", False),
        ("s = scale * q . k        scale", False),
        (" ring:  K0  K1  V0", False),
    ],
)
def test_python_is_told_from_formulas(block: str, wanted: bool) -> None:
    assert is_program(block) == wanted


def test_signatures_of_masks_are_those_of_the_values() -> None:
    (block,) = code_blocks(MASKS, "py")
    check_signatures(block, flash_ext.masks, set(flash_ext.masks.__all__))


def check_signatures(block: str, module: ModuleType, public: set[str]) -> None:
    """A ``py`` block of a document against the functions and classes of a module."""
    body = ast.parse(block).body
    assert {node.name for node in body} == public
    written = {}
    for node in body:
        if not isinstance(node, ast.ClassDef):
            written[node.name] = node
            continue
        cls = getattr(module, node.name)
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        if issubclass(cls, tuple):
            assert tuple(item.target.id for item in fields) == cls._fields
            defaults = {item.target.id: ast.literal_eval(item.value) for item in fields if item.value}
            assert defaults == cls._field_defaults
            continue
        # What a private class between two public ones says belongs to the lower one.
        parts = [part for part in cls.__mro__ if part is cls or part.__name__[0] == "_"]
        own = {name: item for part in reversed(parts) for name, item in vars(part).items()}
        methods = {name for name, item in own.items() if name[0] != "_" and is_method(item)}
        functions = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        assert {item.name for item in functions} == methods | {"__init__"} & own.keys(), node.name
        above = [part.__name__ for part in cls.__mro__[1:] if part.__name__ in public]
        assert [base.id for base in node.bases] == above[:1], node.name
        written |= {f"{node.name}.{item.name}": item for item in functions}
    for name, node in written.items():
        parameters = inspect.signature(operator.attrgetter(name)(module)).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        assert [arg.arg for arg in node.args.args if arg.arg not in ("self", "cls")] == positional, name
        assert [arg.arg for arg in node.args.kwonlyargs] == keywords, name
        written_defaults = [item for item in node.args.defaults + node.args.kw_defaults if item]
        defaults = [eval(ast.unparse(item), {"torch": torch}) for item in written_defaults]  # noqa: S307
        assert defaults == [p.default for p in parameters if p.default is not p.empty], name


def is_method(item: object) -> bool:
    return inspect.isfunction(item) or isinstance(item, (classmethod, staticmethod))


# ---- what is supported ---------------------------------------------------------------------------------


@pytest.fixture
def pretend() -> Iterator[object]:
    """Makes plans for another GPU; undone afterwards."""
    names = ("compute_capability", "num_sms", "smem_per_block")
    before = {name: _C.get_switch(name) for name in names}

    def set_device(compute_capability: int) -> None:
        for name, value in zip(names, (compute_capability, 108, SMEM_OF[compute_capability])):
            _C.set_switch(name, value)

    yield set_device
    for name, value in before.items():
        _C.set_switch(name, value)


def plan(direction: str, head_dim: int, deterministic: bool = False, **more: int | str | list[str]) -> dict:
    usual = {"seqlen_q": 1024, "seqlen_k": 1024, "num_heads": 4, "num_heads_k": 4, "head_dim_v": head_dim}
    return _C.plan(direction, head_dim=head_dim, deterministic=deterministic, **(usual | more))


def test_readme_devices_are_served_as_said(pretend) -> None:
    table = rows(section(README, "Support"))
    for capability, _, backend, types, _ in table:
        for number in re.findall(r"\d+\.\d", capability):
            pretend(round(float(number) * 10))
            chosen = plan("fwd", 128)["backend"]
            assert (f"`{chosen}`" if chosen else "none") == backend, number
            assert types == ("fp16, bf16" if chosen else "")
    assert sorted({row[2] for row in table}) == ["`cpu`", "`sm80`", "`sm90`", "none"]


def keywords_of_attention() -> set[str]:
    parameters = inspect.signature(flash_ext.attention).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_masks_page_names_every_option() -> None:
    """And no option that is not there."""
    table = rows(section(MASKS, "Every keyword"))
    named = {name for row in table for name in re.findall(r"`(\w+)[=`]", row[0])}
    no_masks = {"scale", "generator", "return_aux", "layout", "deterministic", "backend"}
    assert named == keywords_of_attention() - no_masks


def test_masks_page_names_every_value() -> None:
    """With the arguments that the tables give it."""
    public = {name: getattr(flash_ext.masks, name) for name in flash_ext.masks.__all__}
    bases = (flash_ext.masks.Mask, flash_ext.masks.Bias)
    kinds: dict[str, set[str]] = {"Every mask": set(), "Every bias": set()}
    for name, value in public.items():
        if isinstance(value, type) and issubclass(value, bases) and value not in bases:
            kinds["Every bias" if issubclass(value, flash_ext.masks.Bias) else "Every mask"].add(name)
    for heading, wanted in kinds.items():
        table = rows(section(MASKS, heading))
        calls = [re.fullmatch(r"`(\w+)\((.*)\)`", row[0]) for row in table]
        assert all(calls) and {call.group(1) for call in calls if call} == wanted, heading
    builders = re.findall(r"^\| `(\w+)(?:\.\w+)?\(", section(MASKS, "Every mask"), re.M)
    assert {name for name, value in public.items() if not isinstance(value, type)} <= set(builders)


# ---- numbers -------------------------------------------------------------------------------------------


def test_pauses_are_those_of_the_stored_run() -> None:
    path = newest("race_delays.txt")
    last = text_of(path).splitlines()[-1]
    found = re.fullmatch(r"sm90: (\d+) of (\d+) cases differ under the pauses of (\d+) seeds", last)
    assert found, last
    differ, cases, seeds = found.groups()
    row = [f"pauses, {seeds} seeds", f"{cases} cases", f"{differ} that differ", "", *place_of(path)]
    assert row in rows_of_tables(ROOT / "docs" / "testing.md")


def test_planted_bugs_are_those_of_the_stored_run() -> None:
    path = newest("kill-matrix.json.gz")
    outcomes = json.loads(stored_text(path))
    alive = [str(outcome["number"]) for outcome in outcomes if outcome["status"] != "killed"]
    counts = [str(len(outcomes)), str(len(outcomes) - len(alive)), ", ".join(alive)]
    assert ["planted bugs", *counts, *place_of(path)] in rows_of_tables(ROOT / "docs" / "testing.md")


def newest(name: str) -> Path:
    """Of the stored files of that name."""
    return max((ROOT / "bench" / "results").glob(f"*/{name}"))


def place_of(path: Path) -> list[str]:
    """GPU, commit and date of a stored file."""
    date, gpu, commit = re.fullmatch(r"(.{10})-(\w+)-(\w+)", path.parent.name).groups()
    return [gpu.upper(), commit, date]


def test_memory_formula(pretend) -> None:
    """The formula of docs/design.md gives the bytes that the backward asks for."""
    (formula,) = re.findall(r"^workspace_bytes = (.+)$", text_of(ROOT / "docs" / "design.md"), re.M)
    for head_dim, padded in ((1, 64), (64, 64), (72, 96), (128, 128), (130, 192), (256, 256)):
        for deterministic in (False, True):
            for cc in (80, 90):
                pretend(cc)
                asked = plan("bwd", head_dim, deterministic, batch=3, num_heads=8)
                wide = asked["backend"] == "sm90" and padded > 128
                tile = asked["block_m"] if wide else 1
                known = {
                    "rows": 3 * 8 * tile * -(-1024 // tile),
                    "padded_head_dim": padded,
                    "deterministic": asked["backend"] == "sm80" and deterministic or wide,
                }
                more = 0
                if asked["kernel"].endswith("_det"):  # turns, and the counter of items
                    more = 4 * known["rows"] // asked["block_m"] + 16
                assert eval(formula, known) + more == sum(asked["workspace"].values())  # noqa: S307


def test_tile_tables_are_those_of_the_headers() -> None:
    text = text_of(KERNELS)
    assert with_tile_tables(text, tile_tables()) == text, "run python -m tests.docs.test_docs"


if __name__ == "__main__":
    KERNELS.write_text(with_tile_tables(text_of(KERNELS), tile_tables()), encoding="utf-8")
