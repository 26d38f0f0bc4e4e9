"""Clocks, cache flushing, interleaved rounds, and the machine's own ceilings."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Call = Callable[[], object]

# The host queues launches behind a pause, so that a slow Python call never shows up between two events. It
# lasts as long as the host takes for all of them, within these bounds.
HEAD_START_S = (0.001, 0.02)
CYCLES_PER_S = 2e9
WARM_UP_LAUNCHES = 3
MIN_LAUNCHES_PER_ROUND = 3
MAX_LAUNCHES_PER_ROUND = 40
# A call of so many seconds is launched once a round, and no more often than so in all.
LONG_CALL_S = 0.05
LAUNCHES_OF_LONG_CALL = 3


@dataclass
class Samples:
    """Launch times of one entry, in ms, and what its calls cost the host, in us.

    Attributes:
        rounds: one list of launch times per round.
        call_us: host time to enqueue one launch, one mean per round; empty on CPU, where it is the launch.
    """

    rounds: list[list[float]] = field(default_factory=list)
    call_us: list[float] = field(default_factory=list)

    @property
    def all(self) -> list[float]:
        """Every launch time of every round."""
        return [ms for launches in self.rounds for ms in launches]

    def quartiles(self) -> tuple[float, float, float]:
        """First quartile, median and third quartile over all launches of all rounds, ms."""
        times = self.all
        if len(times) == 1:
            return times[0], times[0], times[0]
        q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive")
        return q1, median, q3

    def round_medians(self) -> list[float]:
        """Median launch time of each round, ms: their spread shows drift that quartiles hide."""
        return [statistics.median(launches) for launches in self.rounds]


class CudaTimer:
    """Times launches by one pair of events each, with the L2 cache overwritten before every one.

    Args:
        device: the CUDA device of the tensors that will be timed.
        between: work that is queued before each launch and not timed. Other kernels leave no instructions of
            the timed one in the caches, as the layers of a model do.
    """

    def __init__(self, device: torch.device, between: Call | None = None) -> None:
        self.device = device
        self.between = between
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush_buffer = torch.empty(max(2 * l2_bytes, 64 << 20), dtype=torch.int8, device=device)
        self._host_s: weakref.WeakKeyDictionary[Call, float] = weakref.WeakKeyDictionary()

    def launch(self, call: Call, count: int) -> tuple[list[float], float]:
        """Runs ``call`` ``count`` times; returns their device times (ms) and one's host time (us)."""
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
        ]
        torch.cuda._sleep(head_start_cycles(count, self._host_s.get(call, 0.0)))
        host_s = 0.0
        for before, after in events:
            if self.between is not None:
                self.between()
            self.flush_buffer.zero_()
            before.record()
            started = time.perf_counter()
            call()
            host_s += time.perf_counter() - started
            after.record()
        self.synchronize()
        self._host_s[call] = host_s / count
        return [before.elapsed_time(after) for before, after in events], 1e6 * host_s / count

    def synchronize(self) -> None:
        """Waits for the device; raises what any queued launch left behind."""
        torch.cuda.synchronize(self.device)

    def peak_bytes(self, call: Call) -> int:
        """Highest allocation during one untimed call above what was allocated before it, outputs included."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = call()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del result
        return peak

    def release(self) -> None:
        """Gives cached memory back after a failure, so that a peer's out-of-memory stays its own."""
        torch.cuda.empty_cache()


def head_start_cycles(launches: int, call_s: float) -> int:
    """Clock cycles for which the device waits while the host queues launches of so many seconds each."""
    least, most = HEAD_START_S
    return int(CYCLES_PER_S * min(max(least, launches * call_s), most))


class CpuTimer:
    """The same interface by the wall clock, to run the whole program where there is no GPU."""

    def launch(self, call: Call, count: int) -> tuple[list[float], float | None]:
        """Runs ``call`` ``count`` times; returns the time of each in ms, and no host time of its own."""
        times = []
        for _ in range(count):
            started = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - started))
        return times, None

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def peak_bytes(self, call: Call) -> None:
        """Unknown: the CPU allocator keeps no peak."""

    def release(self) -> None:
        """Nothing is cached."""


Timer = CudaTimer | CpuTimer


def make_timer(device: torch.device) -> Timer:
    """The timer that suits a device."""
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def balanced_order(names: list[str], round_index: int) -> list[str]:
    """An order of each round in which nobody always follows the same one.

    A kernel that follows a hungry one finds a lower clock. Source: Williams 1949, "Experimental designs
    balanced for the estimation of residual effects of treatments", https://doi.org/10.1071/CH9490149.
    """
    count = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    order = [names[(at + round_index) % count] for at in zigzag]
    return order[::-1] if round_index % 2 else order


def measure(
    calls: dict[str, Call], timer: Timer, rounds: int, budget_s: float
) -> tuple[dict[str, Samples], dict[str, Exception]]:
    """Times several calls against each other in interleaved rounds.

    Every round runs every call a few times in a row, in its :func:`balanced_order`, so that clock drift, heat
    and whatever ran last fall on all of them alike. The number of launches per round comes from a warm-up, so
    that all rounds together take about ``budget_s``. A call that raises is dropped at once and leaves the
    others running.

    Returns:
        Samples of the calls that lasted, and the exception of each that did not, by name.
    """
    samples: dict[str, Samples] = {}
    failures: dict[str, Exception] = {}
    seconds_per_launch = 0.0
    long_calls = set()
    for name, call in calls.items():
        try:
            times, _ = timer.launch(call, 1)  # compiles, loads and allocates
            if 1e-3 * times[0] > LONG_CALL_S:
                times, _ = timer.launch(call, 1)  # without that
            if 1e-3 * times[0] > LONG_CALL_S:
                long_calls.add(name)
            else:
                started = time.perf_counter()
                timer.launch(call, WARM_UP_LAUNCHES)
                seconds_per_launch += (time.perf_counter() - started) / WARM_UP_LAUNCHES
            samples[name] = Samples()
        except Exception as error:  # noqa: BLE001 - whatever a peer throws is a result, not an end
            failures[name] = error
            timer.release()
    fitting = int(budget_s / (rounds * seconds_per_launch)) if seconds_per_launch else 0
    launches = min(max(fitting, MIN_LAUNCHES_PER_ROUND), MAX_LAUNCHES_PER_ROUND)
    names = list(samples)
    for index in range(rounds):
        for name in balanced_order(names, index):
            long = name in long_calls
            if name in failures or (long and index >= LAUNCHES_OF_LONG_CALL):
                continue
            try:
                times, call_us = timer.launch(calls[name], 1 if long else launches)
            except Exception as error:  # noqa: BLE001
                failures[name] = error
                del samples[name]
                timer.release()
                continue
            samples[name].rounds.append(times)
            if call_us is not None:
                samples[name].call_us.append(call_us)
    return samples, failures


def matmul_tflops(timer: Timer, device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """What the vendor's matrix product reaches on random N(0, 1) data, TFLOP/s: the ceiling of every row.

    Zeros or constants would run at a higher clock than any real data does.
    """
    on_gpu = device.type == "cuda"
    size = size if on_gpu else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    # A GPU that was idle first boosts; after about half a second it runs at what its power limit allows.
    timer.launch(lambda: a @ b, 400 if on_gpu else 2)
    times, _ = timer.launch(lambda: a @ b, 100 if on_gpu else 5)
    return 2.0 * size**3 / statistics.median(times) * 1e-9


def copy_gbps(timer: Timer, device: torch.device) -> float:
    """What a large copy inside the device's memory reaches, GB/s, bytes read plus bytes written."""
    count = (1 << 30) if device.type == "cuda" else (1 << 24)
    source = torch.empty(count, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    times, _ = timer.launch(lambda: target.copy_(source), 10)
    return 2.0 * count / statistics.median(times) * 1e-6
