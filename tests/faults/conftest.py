"""Faults: an empty store, a package, and the totals that a run prints at its end."""

from collections.abc import Callable
from pathlib import Path

import pytest

from aot.store import Store
from tests.support.stores import package_bytes

Total = Callable[[str, int], None]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt2"
    path.write_bytes(package_bytes())
    return path


@pytest.fixture
def total(record_property: Callable[[str, object], None]) -> Total:
    """Count cases: `total("mutated artifacts", 10_000)`; the sums are printed when the session ends."""

    def count(what: str, number: int) -> None:
        record_property("faults", (what, number))

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals: dict[str, int] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in getattr(report, "user_properties", ()):
            if name == "faults" and report.when == "call":
                totals[value[0]] = totals.get(value[0], 0) + value[1]
    if totals:
        terminalreporter.section("faults survived")
        for what, number in sorted(totals.items()):
            terminalreporter.line(f"{number:>9,}  {what}")
