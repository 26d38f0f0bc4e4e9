"""The rows of the set ``models``: attention as models of the field call it, one row for each kind of call.

Plain data, no torch: :mod:`bench.shapes` makes cases of it, :mod:`bench.asks` the tensors of ``asks``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelRow:
    """One kind of call of one model.

    Attributes:
        name: of the row.
        model: whose call it is, in words.
        batch, seqlen: sequences and queries of each; in packed rows their product is the number of tokens.
        num_heads, head_dim: of the queries.
        seqlen_k, num_heads_k, head_dim_v: of the keys and values; 0 is as for the queries.
        causal, window: as in a case of the benchmark.
        documents: the tokens are packed documents, so many of them; 0 is a dense row.
        even: the documents have one length; else theirs are long-tailed.
        asks: what the row has beyond causal mask and window, names of ``bench.asks.ASKS``.
        inference: nothing of it is trained, so only the forward is timed.
    """

    name: str
    model: str
    batch: int
    seqlen: int
    num_heads: int
    head_dim: int
    seqlen_k: int = 0
    num_heads_k: int = 0
    head_dim_v: int = 0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    documents: int = 0
    even: bool = False
    asks: tuple[str, ...] = ()
    inference: bool = False


def _vision() -> list[ModelRow]:
    """Image encoders, text encoders beside them, and denoisers of images and videos."""
    swin = ("bias-grad",)
    return [
        ModelRow("vit-b16", "ViT-B/16, 224 pixels", 256, 197, 12, 64),
        ModelRow("vit-l14", "ViT-L/14, 336 pixels", 64, 577, 16, 64),
        ModelRow("clip-text", "CLIP ViT-L/14, text", 256, 77, 12, 64, causal=True),
        ModelRow("swin-windows", "Swin, windows of 7 x 7", 4096, 49, 4, 32, asks=swin),
        ModelRow("swin-shifted", "Swin, shifted windows", 4096, 49, 4, 32, asks=(*swin, "shifted-windows")),
        ModelRow("sdxl-self-4096", "SDXL, 1024 pixels", 4, 4096, 10, 64),
        ModelRow("sdxl-self-1024", "SDXL, 1024 pixels", 4, 1024, 20, 64),
        ModelRow("sdxl-cross-4096", "SDXL, 1024 pixels", 4, 4096, 10, 64, seqlen_k=77),
        ModelRow("sdxl-cross-1024", "SDXL, 1024 pixels", 4, 1024, 20, 64, seqlen_k=77),
        ModelRow("qwen2.5-vl-windows", "Qwen2.5-VL, windows", 4, 4096, 16, 80, documents=256, even=True),
        ModelRow("flux-4608", "Flux, 1024 pixels and 512 words", 1, 4608, 24, 128),
        ModelRow("video-32k", "HunyuanVideo", 1, 32768, 24, 128),
    ]


def _audio() -> list[ModelRow]:
    """Speech encoders and decoders, and encoders that see chunks only."""
    return [
        ModelRow("whisper-encoder", "Whisper large-v3", 16, 1500, 20, 64),
        ModelRow("whisper-decoder-self", "Whisper large-v3", 16, 448, 20, 64, causal=True),
        ModelRow("whisper-decoder-cross", "Whisper large-v3", 16, 448, 20, 64, seqlen_k=1500),
        # Packed chunks of 2 s, 100 frames each: 10 minutes of sound.
        ModelRow("qwen2.5-omni-chunks", "Qwen2.5-Omni, audio", 1, 30000, 20, 64, documents=300, even=True),
        ModelRow("conformer-chunks", "streaming Conformer", 16, 1536, 8, 64, asks=("left-chunks",)),
    ]


def _text_encoders() -> list[ModelRow]:
    """BERT and T5."""
    padding = ("key-padding",)
    t5 = {"batch": 16, "seqlen": 512, "num_heads": 16, "head_dim": 64}
    return [
        ModelRow("bert-large-512", "BERT-large", 32, 512, 16, 64, asks=(*padding, "dropout")),
        ModelRow("bert-large-512-no-dropout", "BERT-large", 32, 512, 16, 64, asks=padding),
        ModelRow("t5-large-encoder", "T5-large", **t5, asks=("relative-position-grad",)),
        ModelRow("t5-large-decoder", "T5-large", **t5, causal=True, asks=("relative-position-before-grad",)),
    ]


def _language_models() -> list[ModelRow]:
    """Training of decoders; windows count the keys before a row, so one less than the models do."""
    b16, b40, b64 = ({"num_heads": h, "num_heads_k": 8, "causal": True} for h in (16, 40, 64))
    b32 = {"num_heads": 32, "num_heads_k": 8, "head_dim": 128, "causal": True}
    packed = {"batch": 4, "seqlen": 8192, "documents": 64}
    one, gemma = {"batch": 1, "seqlen": 8192}, {"batch": 1, "seqlen": 8192, "head_dim": 256, **b16}
    oss = {**one, **b64, "head_dim": 64, "asks": ("sinks",)}
    return [
        ModelRow("gpt2-1k", "GPT-2", 16, 1024, 12, 64, causal=True, asks=("dropout",)),
        ModelRow("gpt2-1k-no-dropout", "GPT-2", 16, 1024, 12, 64, causal=True),
        ModelRow("llama3-8b-8k", "Llama 3 8B", batch=2, seqlen=8192, **b32),
        ModelRow("llama3-8b-documents", "Llama 3 8B", **packed, **b32),
        ModelRow("llama3-70b-8k", "Llama 3 70B", **one, **b64, head_dim=128),
        ModelRow("llama3-70b-documents", "Llama 3 70B", **packed, **b64, head_dim=128),
        ModelRow("qwen3-8b-512", "Qwen3 8B", batch=16, seqlen=512, **b32),
        ModelRow("qwen3-14b-8k", "Qwen3 14B", **one, **b40, head_dim=128),
        ModelRow("qwen3-14b-documents", "Qwen3 14B", **packed, **b40, head_dim=128),
        ModelRow("qwen3-30b-a3b-8k", "Qwen3 30B-A3B", **one, **{**b32, "num_heads_k": 4}),
        ModelRow("gemma2-9b-window", "Gemma 2 9B", **gemma, window=(4095, 0), asks=("softcap-50",)),
        ModelRow("gemma2-9b-full", "Gemma 2 9B", **gemma, asks=("softcap-50",)),
        ModelRow("gemma3-12b-window", "Gemma 3 12B", **gemma, window=(1023, 0)),
        ModelRow("gemma3-12b-full", "Gemma 3 12B", **gemma),
        ModelRow("gpt-oss-120b-window", "gpt-oss 120B", **oss, window=(127, 0)),
        ModelRow("gpt-oss-120b-full", "gpt-oss 120B", **oss),
        ModelRow("deepseek-v3-4k", "DeepSeek-V3", 1, 4096, 128, 192, head_dim_v=128, causal=True),
        ModelRow("mixtral-8x7b-32k", "Mixtral 8x7B", batch=1, seqlen=32768, **b32),
    ]


def _proteins() -> list[ModelRow]:
    """AlphaFold's triangle attention: a row of the pair representation is a sequence of the batch."""
    asks = ("bias-grad", "key-padding")
    return [
        ModelRow(f"alphafold-triangle-{s}", "AlphaFold, triangle attention", s, s, 4, 32, asks=asks)
        for s in (256, 384, 512, 768)
    ]


def _short_calls() -> list[ModelRow]:
    """A few new tokens over a cache of 8192 keys, and calls that are over before the device is full."""
    llama = {"seqlen_k": 8192, "num_heads": 32, "num_heads_k": 8, "head_dim": 128, "inference": True}
    oss = {"seqlen_k": 8192, "num_heads": 64, "num_heads_k": 8, "head_dim": 64, "inference": True}
    rows = [
        ModelRow(f"llama3-8b-1-token-b{batch}", "Llama 3 8B", batch=batch, seqlen=1, **llama)
        for batch in (1, 16, 64)
    ]
    rows += [
        ModelRow(f"llama3-8b-16-tokens-b{b}", "Llama 3 8B", batch=b, seqlen=16, causal=True, **llama)
        for b in (1, 16)
    ]
    sinks = ("sinks",)
    rows.append(ModelRow("gpt-oss-120b-1-token-b16", "gpt-oss 120B", batch=16, seqlen=1, **oss, asks=sinks))
    return rows + [ModelRow(f"tiny-s{s}", "one sequence", 1, s, 8, 64) for s in (64, 128, 256, 512)]


ROWS: tuple[ModelRow, ...] = (
    *_vision(),
    *_audio(),
    *_text_encoders(),
    *_language_models(),
    *_proteins(),
    *_short_calls(),
)
