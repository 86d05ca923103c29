"""A run as the commands see it: its programs, its buckets, and how its data and its store match them."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aot import console
from aot.buckets import auto_buckets, choose, parse_buckets
from aot.errors import ConfigError, CorruptArtifact, EnvironmentFault, MissingArtifact, StaleArtifact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aot.buckets import Bucket
    from aot.compile import BuildRequest
    from aot.program import Program, ProgramSet
    from aot.runtime import Fingerprints
    from aot.store import Store

AUTO_BUCKETS = 4


@dataclass(frozen=True)
class Run:
    """A run as the user named it, its programs, and the buckets to work on."""

    run_file: str
    overrides: tuple[str, ...]
    factory: str
    programs: ProgramSet
    buckets: tuple[Bucket, ...]

    @classmethod
    def load(
        cls, run_file: str, overrides: Sequence[str], factory_name: str | None, buckets_text: str | None
    ) -> Run:
        from aot.programs import load_program_set

        factory, programs = load_program_set(run_file, overrides, factory_name)
        if buckets_text is None:
            buckets = programs.buckets
        elif buckets_text == "auto":
            buckets = _auto(programs, run_file)
        else:
            buckets = parse_buckets(buckets_text)
        for program in programs.programs:
            for bucket in buckets:
                program.check_bucket(bucket)
        for text in programs.notes:
            console.note(text)
        return cls(run_file, tuple(overrides), factory, programs, buckets)

    @property
    def typed(self) -> str:
        """The run and its flags, as the user typed them."""
        return shlex.join([self.run_file, *(word for text in self.overrides for word in ("--set", text))])

    def needs(self) -> list[tuple[Program, Bucket]]:
        return [(program, bucket) for program in self.programs.programs for bucket in self.buckets]

    def requests(self) -> list[BuildRequest]:
        from aot.compile import BuildRequest

        return [
            BuildRequest(self.factory, self.run_file, self.overrides, program.name, str(bucket))
            for program, bucket in self.needs()
        ]


def _auto(programs: ProgramSet, run_file: str) -> tuple[Bucket, ...]:
    if programs.histogram is None or not programs.histogram.sizes():
        raise ConfigError(
            f"`--buckets auto` needs the data of '{run_file}', which is not there yet",
            "prepare the data first, or name the buckets, e.g. `--buckets 512x32,1024x64`",
        )

    def check(bucket: Bucket) -> None:
        for program in programs.programs:
            program.check_bucket(bucket)

    largest = max(programs.buckets, key=lambda bucket: (bucket.tokens, bucket.anchors))
    return auto_buckets(programs.histogram.sizes(), AUTO_BUCKETS, largest, check)


def plan_rows(run: Run, store: Store) -> list[dict[str, Any]]:
    """One row per program and bucket, and one with bucket `none` for micro-batches that fit nowhere.

    `padding` is the share of context tokens that are padding.
    """
    from aot.runtime import Fingerprints

    fingerprints = Fingerprints()
    rows: list[dict[str, Any]] = []
    histogram = run.programs.histogram
    for program in run.programs.programs:
        sizes = histogram.counts.get(program.name, {}) if histogram is not None else None
        counts, tokens = _per_bucket(sizes or {}, run.buckets)
        for bucket in run.buckets:
            number = counts[bucket]
            rows.append(
                {
                    "program": program.name,
                    "bucket": str(bucket),
                    "micro_batches": None if sizes is None else number,
                    "padding": 1 - tokens[bucket] / (number * bucket.tokens) if number else None,
                    "artifact": _artifact_state(store, program, bucket, fingerprints),
                }
            )
        if counts[None]:
            homeless = {"micro_batches": counts[None], "padding": None, "artifact": "-"}
            rows.append({"program": program.name, "bucket": "none", **homeless})
    return rows


def _per_bucket(
    sizes: Mapping[tuple[int, int], int], buckets: Sequence[Bucket]
) -> tuple[Counter[Bucket | None], Counter[Bucket | None]]:
    """Micro-batches and their real tokens, by the bucket each would run in (None: it fits none)."""
    counts: Counter[Bucket | None] = Counter()
    tokens: Counter[Bucket | None] = Counter()
    for (size, anchors), number in sizes.items():
        bucket = choose(buckets, size, anchors)
        counts[bucket] += number
        tokens[bucket] += number * size
    return counts, tokens


def _artifact_state(store: Store, program: Program, bucket: Bucket, fingerprints: Fingerprints) -> str:
    from aot.runtime import resolve

    try:
        fingerprint = fingerprints(program.device_type)
    except EnvironmentFault as fault:
        # A plan for another machine is still a plan.
        return f"unknown ({fault.message})"
    try:
        return f"present {resolve(store, program, bucket, fingerprint).key[:12]}"
    except MissingArtifact:
        return "missing"
    except StaleArtifact as error:
        return f"stale ({error.message.partition('stale: ')[2]})"
    except CorruptArtifact as error:
        return f"damaged ({error.message})"
