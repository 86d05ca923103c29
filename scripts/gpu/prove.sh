#!/usr/bin/env bash
# Proves the GPU program through the whole product on one GPU: build, numerics, training with two drafter workers.
# Needs an environment with this project and the converted SmolLM2 folder that `make demo` makes.
# Usage: scripts/gpu/prove.sh [LOG]
set -euo pipefail
cd "$(dirname "$0")/../.."
log=${1:-runs/smollm2-gpu.log}
run=scripts/gpu/smollm2-gpu.toml
mkdir -p "$(dirname "$log")"
model=.cache/smollm2-135m-instruct
lock="--lock runs/smollm2-gpu.lock"
export DFLASH_AOT_STORE=${DFLASH_AOT_STORE:-artifacts/store}

prove() {
    date -u +%F
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    python3 -c 'import sys, torch, triton, transformers as t
print("Python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__, "transformers", t.__version__)'
    python3 scripts/demo/token_file.py scripts/demo/chats.safetensors.zst .cache/demo/chats.jsonl
    rm -rf .cache/demo/data runs/smollm2-gpu
    local step
    for step in \
        "dflash prepare .cache/demo/chats.jsonl --tokenizer $model --output .cache/demo/data --eval-fraction 0.03" \
        "dflash-aot doctor" \
        "dflash-aot plan $run" \
        "dflash-aot build $run --jobs 2 $lock" \
        "dflash-aot build $run $lock" \
        "dflash-aot verify $run $lock --level bytes,trust,env,source,graph,numerics" \
        "dflash train $run $lock" \
        "dflash eval $run --shuffle-features --decode 4"; do
        echo
        echo "\$ $step"
        local begun=$SECONDS
        $step
        echo "($((SECONDS - begun)) s)"
    done
    echo
    echo "\$ python3 -m pytest -m gpu tests/gpu/test_flex_step.py tests/gpu/test_worker.py"
    python3 -m pytest -m gpu tests/gpu/test_flex_step.py tests/gpu/test_worker.py -s
}

prove 2>&1 | tee "$log"
