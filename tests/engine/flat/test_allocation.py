"""Flat buffers: zeros of the length and dtype that was asked for, wherever their pages come from."""

from __future__ import annotations

import mmap

import pytest
import torch

from launcher.engine.flat.allocation import HUGE_PAGE, MIN_HUGE_PAGES, flat_zeros

CPU = torch.device("cpu")
LEAST = MIN_HUGE_PAGES * HUGE_PAGE  # bytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size_bytes", [0, 4, LEAST - HUGE_PAGE, LEAST, LEAST + 4])
def test_buffers_are_zeros_that_can_be_written_to_their_end(dtype, size_bytes) -> None:
    numel = size_bytes // dtype.itemsize
    buffer = flat_zeros(numel, dtype, CPU)
    assert (buffer.shape, buffer.dtype, buffer.device) == ((numel,), dtype, CPU)
    assert not buffer.any()
    assert int(buffer.fill_(1).count_nonzero()) == numel


def test_two_buffers_are_two_memories() -> None:
    one, other = (flat_zeros(LEAST // 4, torch.float32, CPU) for _ in range(2))
    one.fill_(1)
    assert not other.any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux alone")
def test_large_buffers_ask_for_huge_pages_and_do_without_where_there_are_none(monkeypatch) -> None:
    asked = []

    class Refusing(mmap.mmap):
        def madvise(self, advice: int) -> None:  # type: ignore[override]
            asked.append((advice, len(self)))
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("launcher.engine.flat.allocation.mmap.mmap", Refusing)
    assert not flat_zeros(LEAST // 4 + 1, torch.float32, CPU).any()
    assert not flat_zeros(LEAST // 4 - HUGE_PAGE // 4, torch.float32, CPU).any()
    assert asked == [(mmap.MADV_HUGEPAGE, LEAST + HUGE_PAGE)], "whole pages, and none for a small buffer"
    device = torch.device("meta")
    assert flat_zeros(LEAST, torch.float32, device).device == device
    assert len(asked) == 1
