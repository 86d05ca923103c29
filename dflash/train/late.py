"""What a device works out, read without making it wait: a worker goes on, and reads one piece of work late.

On the CPU there is nothing to wait for, and everything here is immediate.
"""

from __future__ import annotations

import time

import torch


class Late:
    """A small tensor on its way to the host, and how long the work before it took on its device."""

    def __init__(self, device: torch.device):
        """Begin to time, at what the current stream does next."""
        self._cuda = device.type == "cuda"
        self._begun = torch.cuda.Event(enable_timing=True) if self._cuda else time.monotonic()
        if self._cuda:
            self._begun.record()
        self._values: torch.Tensor | None = None

    def send(self, values: torch.Tensor) -> None:
        """End the timing and send `values` to the host, behind the work enqueued so far."""
        if not self._cuda:
            self._ended, self._values = time.monotonic(), values
            return
        # A blocking event lets the thread sleep while it waits.
        self._ended = torch.cuda.Event(enable_timing=True, blocking=True)
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._ended.record()

    def wait(self) -> None:
        """Wait until the device has come to this point; the work enqueued after it goes on meanwhile."""
        if self._cuda:
            self._ended.synchronize()

    def read(self) -> torch.Tensor:
        """Wait, and return the values, on the host."""
        assert self._values is not None, "nothing was sent"
        self.wait()
        return self._values

    @property
    def seconds(self) -> float:
        """How long the device worked; waits like `read`."""
        self.wait()
        if self._cuda:
            return self._begun.elapsed_time(self._ended) / 1e3
        return self._ended - self._begun
