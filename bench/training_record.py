"""What a training run records and what its models cost: shapes, formulas, entries in rows. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from bench.shapes import Case, flops

KIND, SCHEMA = "training", 1


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer.

    Attributes:
        style: ``gpt2`` (LayerNorm, GELU, biases, learned positions) or ``llama`` (RMSNorm, SwiGLU, rotary).
        vocabulary: rows of the embedding, which is the head as well.
    """

    name: str
    style: str
    layers: int
    width: int
    heads: int
    heads_k: int
    head_dim: int
    mlp_width: int
    vocabulary: int


MODELS = {
    shape.name: shape
    for shape in (
        # Radford et al. 2019, the second of four sizes; 50257 words padded to a multiple of 128.
        ModelShape("gpt2-medium", "gpt2", 24, 1024, 16, 16, 64, 4096, 50304),
        # The published shape of Llama 3.2 1B.
        ModelShape("llama-1b", "llama", 16, 2048, 32, 8, 64, 8192, 128256),
    )
}
SMOKE_MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("gpt2-smoke", "gpt2", 2, 32, 2, 2, 16, 64, 96),
        ModelShape("llama-smoke", "llama", 2, 32, 4, 2, 8, 64, 96),
    )
}


def multiplying_params(shape: ModelShape) -> int:
    """Weights that every token is multiplied by: layers and head, without norms, biases and positions."""
    attention = shape.width * shape.head_dim * (2 * shape.heads + 2 * shape.heads_k)
    mlp = (3 if shape.style == "llama" else 2) * shape.width * shape.mlp_width
    return shape.layers * (attention + mlp) + shape.vocabulary * shape.width


def attention_case(shape: ModelShape, batch: int, seqlen: int) -> Case:
    """The attention problem of one layer, as :mod:`bench.shapes` counts it."""
    heads = (shape.heads, shape.heads_k, shape.head_dim, shape.head_dim)
    return Case(shape.name, batch, seqlen, seqlen, *heads, causal=True)


def model_flops(shape: ModelShape, batch: int, seqlen: int) -> float:
    """Floating-point operations of one training step, as usually published.

    6 N a token for the N of :func:`multiplying_params`: 2 forward, 4 backward. Attention matrix products with
    the causal square counted as half, the backward as twice the forward, so 6 layers * heads * head_dim *
    seqlen a token. What is computed again in the backward does not count, nor does anything elementwise.
    """
    attention = 3 * shape.layers * flops(attention_case(shape, batch, seqlen), "fwd")
    return 6.0 * multiplying_params(shape) * batch * seqlen + attention


@dataclass
class TrainingEntry:
    """One attention in one model at one length.

    Attributes:
        name: column name.
        ours: True for flash_ext itself.
        status: ``ok``, ``out of memory`` or ``error``.
        text: why not, for the last two.
        backend: which of its kernels SDPA took, where it chose by itself and says so.
        losses: of the first steps from the same weights on the same batch, in nats a token.
        grad_norms: norm of the first step's gradient of the projections ``q``, ``k`` and ``v``, all layers.
        median_ms, q1_ms, q3_ms: quartiles over the timed steps of all rounds.
        round_medians_ms: median of each round, in order.
        steps: how many steps stand behind the quartiles.
        tokens_per_s: tokens of a step over its median time.
        tflops, matmul_pct: model FLOPs over the median time, and their share of the matrix product measured
            in the same run.
        peak_bytes: highest allocation of a step, weights and optimiser included; None where it is not known.
        step_bytes: what of it comes and goes with a step: activations, gradients, workspace.
        alloc_retries: how often steps had to give cached memory back before they got theirs; such a launch is
            repeated and not counted.
    """

    name: str
    ours: bool = False
    status: str = "ok"
    text: str = ""
    backend: str = ""
    losses: list[float] = field(default_factory=list)
    grad_norms: dict[str, float] = field(default_factory=dict)
    median_ms: float | None = None
    q1_ms: float | None = None
    q3_ms: float | None = None
    round_medians_ms: list[float] = field(default_factory=list)
    steps: int = 0
    tokens_per_s: float | None = None
    tflops: float | None = None
    matmul_pct: float | None = None
    peak_bytes: int | None = None
    step_bytes: int | None = None
    alloc_retries: int = 0

    @property
    def timed(self) -> bool:
        """True when there is a median."""
        return self.status == "ok" and self.median_ms is not None

    @property
    def spread_pct(self) -> float:
        """Interquartile range as a share of the median, percent."""
        return 100.0 * (self.q3_ms - self.q1_ms) / self.median_ms


@dataclass
class TrainingRow:
    """One model at one length, with every attention that was tried in it.

    Attributes:
        flops: of one step, by :func:`model_flops`.
        clocks: median SM clock (MHz) and power (W) while the row ran, or None.
    """

    model: str
    seqlen: int
    batch: int
    dtype: str
    flops: float
    entries: list[TrainingEntry] = field(default_factory=list)
    clocks: tuple[float, float] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seqlen

    def entry(self, name: str) -> TrainingEntry | None:
        """The entry of that name, whatever its status."""
        return next((entry for entry in self.entries if entry.name == name), None)


@dataclass
class TrainingResults:
    """A whole run: where and how it was made, the machine's ceilings, and the rows."""

    metadata: dict
    ceilings: dict[str, float]
    rows: list[TrainingRow] = field(default_factory=list)

    @property
    def models(self) -> list[str]:
        """Names of the models in order of first appearance."""
        return list(dict.fromkeys(row.model for row in self.rows))

    def rows_of(self, model: str) -> list[TrainingRow]:
        """The rows of one model, shortest sequence first."""
        return sorted((row for row in self.rows if row.model == model), key=lambda row: row.seqlen)

    def names(self, ours: bool | None = None) -> list[str]:
        """Column names in order of first appearance."""
        entries = [entry for row in self.rows for entry in row.entries]
        return list(dict.fromkeys(e.name for e in entries if ours is None or e.ours == ours))

    def to_json(self) -> str:
        """The run as JSON, kind and schema number first."""
        return json.dumps({"kind": KIND, "schema": SCHEMA, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> TrainingResults:
        """Reads what :meth:`to_json` wrote.

        Raises:
            ValueError: the text is of another kind, or has another schema number.
        """
        data = json.loads(text)
        if (data.pop("kind", None), data.pop("schema", None)) != (KIND, SCHEMA):
            raise ValueError(f"not a training result of schema {SCHEMA}")
        rows = [
            TrainingRow(
                **{
                    **row,
                    "entries": [TrainingEntry(**entry) for entry in row["entries"]],
                    "clocks": tuple(row["clocks"]) if row["clocks"] else None,
                }
            )
            for row in data.pop("rows")
        ]
        return TrainingResults(rows=rows, **data)
