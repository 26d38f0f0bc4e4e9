"""Trains a small language model with flash_ext and with PyTorch's attention side by side, another one with a
mask, ALiBi and dropout, and shows what comes of it: ``python -m examples.train``.

The text is Python's own standard library. Everything printed is measured in the run that prints it; it takes
less than two minutes on two CPU cores or on a GPU. ``--help`` names the options.
"""

from __future__ import annotations

import argparse
import copy
import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flash_ext import __version__

from .masked import run_masked
from .measure import (
    Schedule,
    attention_memory,
    count_accesses,
    distance_from_float64,
    held_out_loss,
    quickest_thread_count,
    step_memory,
    train_side_by_side,
)
from .model import (
    Attention,
    ModelSize,
    Transformer,
    flash_ext_attention,
    generate,
    materialised_attention,
    pytorch_attention,
)
from .report import MATERIALISED, OURS, PYTORCH, Progress, Results, as_text, draw
from .text import Pack, Text, draw_pack, pack_tokens, read_text, standard_library

ATTENTIONS: dict[str, Attention] = {
    OURS: flash_ext_attention,
    PYTORCH: pytorch_attention,
    MATERIALISED: materialised_attention,
}
TRAINED = (OURS, PYTORCH)
PROMPT = "def "
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Preset:
    """How much of everything; lengths in bytes of text, which are rows of attention.

    Attributes:
        total, longest: size of a pack, and of a document in it at most.
        held_out_packs: how many packs the final loss is taken over.
        checked: size of the pack that is compared with float64.
        masked_schedule, masked_total: of the masked model's training.
        memory_seqlens, access_seqlens: lengths at which memory and accesses are measured.
        access_head_dim, sram: head size and elements of fast memory for counting accesses. 48k elements are
            96 KiB of float16, what a block of threads gets on many GPUs.
        sample: length of the generated text.
    """

    size: ModelSize
    schedule: Schedule
    total: int
    longest: int
    held_out_packs: int
    checked: int
    masked_schedule: Schedule
    masked_total: int
    memory_seqlens: tuple[int, ...]
    access_seqlens: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    access_head_dim: int = 64
    sram: int = 48 * 1024
    sample: int = 400


# On two idle cores a step takes about 0.07 s with either attention, and the whole demo three quarters of a
# minute; the masked model takes at most ten seconds of it. Most of a step is the rest of the model.
CPU = Preset(
    size=ModelSize(width=128, num_layers=2, num_heads=4, num_heads_k=2, head_dim=32),
    schedule=Schedule(steps=240, seconds=60.0, learning_rate=2.5e-3),
    total=1024,
    longest=512,
    held_out_packs=8,
    checked=1024,
    masked_schedule=Schedule(steps=60, seconds=10.0, learning_rate=2.5e-3),
    masked_total=256,
    memory_seqlens=(256, 512, 1024, 2048),
)
GPU = Preset(
    size=ModelSize(width=512, num_layers=6, num_heads=8, num_heads_k=2, head_dim=64),
    schedule=Schedule(steps=600, seconds=60.0, learning_rate=1e-3),
    total=8192,
    longest=2048,
    held_out_packs=8,
    checked=2048,
    masked_schedule=Schedule(steps=150, seconds=10.0, learning_rate=1e-3),
    masked_total=2048,
    memory_seqlens=(1024, 2048, 4096, 8192, 16384),
)


def default_device() -> torch.device:
    """The GPU if there is one that flash_ext has kernels for, else the CPU."""
    usable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return torch.device("cuda" if usable else "cpu")


def run(preset: Preset, device: torch.device, text: Text, seed: int, progress: Progress) -> Results:
    """Trains, measures and generates."""
    torch.manual_seed(seed)
    initial = Transformer(preset.size).to(device)
    models = {name: (copy.deepcopy(initial), ATTENTIONS[name]) for name in TRAINED}
    drawn, kept_back = random.Random(seed), random.Random(seed + 1)

    def held_out_pack(total: int) -> Pack:
        return draw_pack(text.held_out, total, preset.longest, kept_back).to(device)

    judged = [held_out_pack(preset.total) for _ in range(preset.held_out_packs)]
    checked = held_out_pack(preset.checked)
    if device.type == "cpu":
        progress.stage("Choosing how many threads to use ...")
        torch.set_num_threads(quickest_thread_count(initial, judged[0], flash_ext_attention))
    heading = describe(preset, device, text, initial)

    progress.stage(f"Training with {OURS} and with PyTorch's attention in turn ...")
    curves = train_side_by_side(
        models,
        lambda: draw_pack(text.training, preset.total, preset.longest, drawn).to(device),
        preset.schedule,
        progress.show,
    )
    held_out = {name: held_out_loss(*models[name], judged) for name in TRAINED}
    model, _ = models[OURS]

    progress.stage("Comparing with float64 ...")
    distances = distance_from_float64(model, checked, {name: ATTENTIONS[name] for name in TRAINED})

    progress.stage("Training with a mask, ALiBi and dropout ...")
    masked = run_masked(
        preset.size, preset.masked_schedule, text, preset.masked_total, preset.masked_total // 2,
        (OURS, MATERIALISED), device, seed,
    )  # fmt: skip

    progress.stage("Measuring memory ...")
    of_step = {name: step_memory(model, judged[0], ATTENTIONS[name]) for name in ATTENTIONS}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    of_attention: dict[int, dict[str, int | None]] = {}
    for n in preset.memory_seqlens:
        document = pack_tokens(bytearray(n), bytearray(n), [0, n]).to(device)
        of_attention[n] = {
            name: attention_memory(preset.size, document, ATTENTIONS[name], dtype) for name in ATTENTIONS
        }

    progress.stage("Counting memory accesses ...")
    accesses = count_accesses(list(preset.access_seqlens), preset.access_head_dim, preset.sram)

    progress.stage("Generating text ...")
    sample = generate(model, PROMPT, preset.sample, TEMPERATURE, seed)

    return Results(
        heading=heading,
        planned_steps=preset.schedule.steps,
        total=preset.total,
        curves=curves,
        held_out=held_out,
        distances=distances,
        masked=masked,
        step_memory=of_step,
        attention_memory=of_attention,
        accesses=accesses,
        sram=preset.sram,
        access_head_dim=preset.access_head_dim,
        sample=sample,
        on_gpu=device.type == "cuda",
    )


def describe(preset: Preset, device: torch.device, text: Text, model: Transformer) -> list[str]:
    """What runs where, on what text."""
    size = preset.size
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, bfloat16"
    else:
        number = torch.get_num_threads()
        where = f"CPU, {number} thread{'s' if number > 1 else ''}, float32"
    parameters = sum(p.numel() for p in model.parameters())
    return [
        f"flash_ext {__version__}, torch {torch.__version__}, {where}",
        f"{text.num_bytes / 1e6:.1f} MB of Python from {text.num_files} files in {len(text.training)} "
        f"documents; packs of {preset.total} bytes, documents up to {preset.longest}",
        f"{size.num_layers} layers of width {size.width}, {size.num_heads} query heads over "
        f"{size.num_heads_k} key heads of {size.head_dim}, {parameters / 1e6:.2f} M parameters",
    ]


def main(arguments: list[str] | None = None) -> None:
    """Entry of ``python -m examples.train``."""
    parser = argparse.ArgumentParser(prog="python -m examples.train", description=__doc__)
    parser.add_argument("--device", type=torch.device, help="cpu or cuda (default: the GPU if there is one)")
    parser.add_argument("--steps", type=int, help="training steps (default: 240 on a CPU, 600 on a GPU)")
    parser.add_argument("--seconds", type=float, help="time for training at most (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, packs and sample (default: 0)")
    parser.add_argument("--text", type=Path, help="folder of Python files (default: the standard library's)")
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"), help="the picture (out/demo.png)")
    args = parser.parse_args(arguments)
    for option in ("steps", "seconds"):
        value = getattr(args, option)
        if value is not None and value <= 0:
            parser.error(f"--{option} must be positive, got {value}")

    device = args.device or default_device()
    preset = GPU if device.type == "cuda" else CPU
    given = {"steps": args.steps, "seconds": args.seconds}
    changes = {name: value for name, value in given.items() if value is not None}
    preset = replace(preset, schedule=replace(preset.schedule, **changes))
    text = read_text(args.text or standard_library())

    with Progress() as progress:
        results = run(preset, device, text, args.seed, progress)
    print("\n".join(["", *results.heading, "", as_text(results), ""]))
    picture = draw(results, args.out)
    if picture is None:
        print("No picture: matplotlib is not installed (pip install matplotlib).")
    else:
        print(f"Picture: {picture.resolve()}")


if __name__ == "__main__":
    main()
