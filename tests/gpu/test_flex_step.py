"""The CUDA program against the independent oracle, by name, and one package on several workers of one GPU."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from aot.buckets import Bucket
from aot.compile import BuildRequest, build
from aot.runtime import prepare
from aot.store import Store
from dflash.config import load_config
from dflash.drafter.programs import make_programs
from tests.support.oracle import oracle_step, relative_errors
from tests.support.race import FreeRace

RUN = "scripts/gpu/smollm2-gpu.toml"
FACTORY = "dflash.drafter.programs:program_set"
BUCKET = Bucket(2048, 64)
DEVICE = torch.device("cuda:0")
WORKERS = 3
#: Outputs that an argmax decides: bfloat16 turns near ties over.
ARGMAX_TERMS = {"cap", "accept", "slot_correct"}
TIE_GAP = 0.1
ROOT = Path(__file__).parents[2]
#: One layer, small enough to compile quickly.
SMALL = (
    "drafter.hidden_size=128",
    "drafter.intermediate_size=256",
    "drafter.num_layers=1",
    "drafter.num_heads=2",
    "drafter.num_kv_heads=1",
    "drafter.vocab_size=1000",
    'data.buckets=["256x16"]',
    "data.token_budget=256",
    "data.max_seq_len=256",
    "data.max_anchors=16",
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    # Where the run's packages are built already, they serve.
    store = Store(Path(os.environ.get("DFLASH_AOT_STORE") or tmp_path_factory.mktemp("store")))
    programs = make_programs(load_config(RUN))
    build([BuildRequest(FACTORY, RUN, (), program.name, str(BUCKET)) for program in programs], store, jobs=2)
    return prepare(store, [(program, BUCKET) for program in programs], run=RUN, device="cuda:0")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("index", [0, 1], ids=["train_step", "eval_step"])
def test_package_equals_the_oracle_by_name(prepared, index, seed, capsys):
    program = make_programs(load_config(RUN))[index]
    tensors = program.example_inputs(BUCKET, seed, DEVICE)
    inputs = dict(zip(program.call_spec(BUCKET).input_names, tensors, strict=True))
    on_host = {name: tensor.cpu() for name, tensor in inputs.items()}
    reference, gaps = oracle_step(program.config, program.loss, on_host)
    outputs = {name: t.cpu() for name, t in prepared[program.name, BUCKET].load(DEVICE)(inputs).items()}
    dense = program.config.model_copy(update={"attention": "sdpa"})
    twin = {name: t.cpu() for name, t in program.run(dense, inputs).items()}
    errors, twin_errors = relative_errors(outputs, reference), relative_errors(twin, reference)
    ties = sum(gap < TIE_GAP for gap in gaps)
    with capsys.disabled():
        print(f"\n{program.name} {BUCKET} seed {seed}: {ties} of {len(gaps)} slots within {TIE_GAP} of a tie")
        for name in sorted(errors, key=errors.get, reverse=True):
            print(f"  {name:45s} package {errors[name]:.2e}  bfloat16 dense twin {twin_errors[name]:.2e}")
    for name in errors.keys() - ARGMAX_TERMS:
        gradient = name.startswith("grad.")
        # Scalars are sums of many terms, whose rounding meets by luck.
        assert errors[name] <= (1.2 * twin_errors[name] if gradient else 2e-3), name
    flipped = (outputs["slot_correct"].double() - reference["slot_correct"]).abs().sum().item()
    assert flipped <= ties


def test_workers_of_one_gpu_agree_to_the_bit_while_the_tracing_flag_is_set(prepared, monkeypatch):
    program = make_programs(load_config(RUN))[0]
    tensors = program.example_inputs(BUCKET, 3, DEVICE)
    inputs = dict(zip(program.call_spec(BUCKET).input_names, tensors, strict=True))
    results, errors = {}, []

    def work(worker):
        try:
            with torch.cuda.device(DEVICE), torch.cuda.stream(torch.cuda.Stream(DEVICE)):
                artifact = prepared[program.name, BUCKET].load(DEVICE)
                for _ in range(5):
                    outputs = artifact(inputs)
                torch.cuda.synchronize(DEVICE)
                results[worker] = {name: tensor.clone() for name, tensor in outputs.items()}
        except BaseException as error:
            errors.append(error)

    if hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"):
        monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    torch.cuda.synchronize(DEVICE)
    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(results) == WORKERS
    for name, tensor in results[0].items():
        for worker in range(1, WORKERS):
            assert torch.equal(tensor, results[worker][name]), name


def test_a_thousand_calls_beside_a_thread_that_traces_are_equal_to_the_bit(prepared, capsys):
    program = make_programs(load_config(RUN))[0]
    names = program.call_spec(BUCKET).input_names
    inputs = [
        dict(zip(names, program.example_inputs(BUCKET, seed, DEVICE), strict=True)) for seed in range(WORKERS)
    ]
    with torch.cuda.device(DEVICE):
        single = prepared[program.name, BUCKET].load(DEVICE)
        expected = [single(named) for named in inputs]
    torch.cuda.synchronize(DEVICE)

    def make():
        torch.cuda.set_device(DEVICE)
        torch.cuda.set_stream(torch.cuda.Stream(DEVICE))
        return prepared[program.name, BUCKET].load(DEVICE)

    race = FreeRace(wanted_calls=1_000, wanted_traces=100, threads=WORKERS)
    race.run(make, inputs, expected)
    with capsys.disabled():
        print(f"\n{race.calls.total()} calls of {WORKERS} threads beside {race.traces} traces")
    assert race.errors == []
    assert race.calls.total() >= 1_000
    assert race.traces >= 100


def test_verify_catches_a_package_whose_kernel_has_the_wrong_sign(tmp_path):
    """The reference is the naive twin: a wrong kernel does not vouch for itself."""
    for package in ("aot", "dflash"):
        shutil.copytree(ROOT / package, tmp_path / package)
    kernels = tmp_path / "dflash" / "drafter" / "kernels.py"
    right, wrong = "+ kl_scale", "- kl_scale"
    source = kernels.read_text()
    assert right in source
    settings = [word for change in SMALL for word in ("--set", change)]

    def tool(*words):
        return subprocess.run(
            [sys.executable, "-m", "aot.cli", *words, "--lock", "l", "--store", str(tmp_path / "store")],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            check=False,
        )

    shutil.copy(ROOT / RUN, tmp_path / "run.toml")
    for sign, expected in ((right, 0), (wrong, 1)):
        kernels.write_text(source.replace(right, sign))
        built = tool("build", "run.toml", *settings)
        assert built.returncode == 0, built.stderr
        checked = tool("verify", "run.toml", *settings, "--level", "numerics")
        print(checked.stdout, checked.stderr)
        assert checked.returncode == expected, checked.stderr
    assert "grad." in checked.stdout + checked.stderr
