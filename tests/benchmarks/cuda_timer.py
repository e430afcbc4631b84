"""Durations of work on a GPU, in CUDA graphs and with a flushed L2 cache."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_RUNS = 30
# Bytes written between two runs: more than any L2 cache holds.
_FLUSHED_BYTES = 2**28


@contextmanager
def capturable(device: str) -> Iterator[None]:
    """Run the block on a stream that a CUDA graph can capture; on a CPU, simply run it.

    A backward pass runs on the stream of its forward pass, and the default stream cannot be
    captured.
    """
    if not device.startswith("cuda"):
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize(device)


def cuda_seconds(run: Callable[[], object]) -> float:
    """Return the median duration of some work on the GPU, in seconds.

    Must be called within `capturable`. A CUDA graph of the work is replayed, so that the time to
    launch its kernels does not count.
    """
    for _ in range(3):
        run()
    stream = torch.cuda.current_stream()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    for _ in range(_RUNS):
        flushed.zero_()
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
