#!/usr/bin/env bash
# All checks that need a GPU, in less than 8 minutes; results go to a folder. What it does without one:
#
#   tests/gpu/run.sh                  on the first CUDA device
#   tests/gpu/run.sh --dry            the same commands on the CPU with a tiny shape, to see that they run
#
# The environment may name others than the defaults below. Answers on record are the embedded model's own unless
# TRACES names a file of them, and READER the model whose tokenizer they are in.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON="${PYTHON:-.venv/bin/python}"
OUT="${OUT:-gpu-results}"
READER="${READER:-}"
if [[ "${1:-}" == "--dry" ]]; then
    DEVICE=cpu SHAPE=tiny PROMPTS=2 TOKENS=12 CONTEXTS=32,64 ANSWERS=2
elif [[ $# -gt 0 ]]; then
    echo "error: unknown option $1: give --dry or nothing" >&2
    exit 2
else
    DEVICE="${DEVICE:-cuda}" SHAPE="${SHAPE:-llama-7b}" STEPS="${STEPS:-llama-3-8b}" PROMPTS="${PROMPTS:-20}" TOKENS="${TOKENS:-256}"
    CONTEXTS="${CONTEXTS:-128,768}" ANSWERS="${ANSWERS:-6}"
    if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "error: torch sees no CUDA device here: run this where there is one, or with --dry on the CPU" >&2
        exit 1
    fi
fi
mkdir -p "$OUT"
LIMIT=470
failed=0

# A step that fails, or finds no time left, is told, and the others run all the same.
step() {
    local name="$1" started=$SECONDS left=$((LIMIT - SECONDS)) code=0
    shift
    echo "── $name" >&2
    timeout "$((left > 0 ? left : 1))" "$PYTHON" -m "$@" >"$OUT/$name.txt" || code=$?
    cat "$OUT/$name.txt"
    if ((code)); then
        echo "failed with code $code: $name" >&2
        failed=1
    fi
    echo "   $((SECONDS - started)) s" >&2
}

# What would teach the most comes first. Exactness: identical to plain decoding, and that to the library.
verify() {
    local name="$1"
    shift
    step "$name" hdtool.cli verify --device "$DEVICE" --num-prompts "$PROMPTS" --max-new-tokens "$TOKENS" --quiet "$@"
}
verify verify-float32 --dtype float32

# hdtool's own pass and kernels, on random trees of small models of several families.
for dtype in float32 bfloat16; do
    [[ "$DEVICE" == cpu ]] || step "passes-$dtype" tests.benchmarks.gpu_passes --device "$DEVICE" --dtype "$dtype"
done

# A step of a large model: milliseconds, the share of the bandwidth, and its kernels.
if [[ "$DEVICE" != cpu ]]; then
    step steps tests.benchmarks.gpu_step "$STEPS" --device "$DEVICE" --trace
fi

# Layers for multi-token prediction, alone and with databases: their passes are captured, too.
rm -rf "$OUT/hybrid"
step hybrid hdtool.cli bench data/demo/hybrid --device "$DEVICE" --questions data/demo/prompts.jsonl \
    --num-prompts "$ANSWERS" --max-new-tokens "$TOKENS" --methods ar,mtp,hd,hd+mtp --out "$OUT/hybrid" --quiet

# The shape in one run: the library, its static cache and compilation, ours plain, ours drafting.
if [[ -z "${TRACES:-}" ]]; then
    TRACES="$OUT/answers.jsonl"
    rm -f "$TRACES"
    head -n "$ANSWERS" data/demo/prompts.jsonl >"$OUT/prompts.jsonl"
    step answers hdtool.cli collect --prompts "$OUT/prompts.jsonl" --out "$TRACES" --device "$DEVICE" \
        --max-new-tokens "$TOKENS" --quiet
fi
step "$SHAPE" hdtool.cli bench-shape "$SHAPE" --traces "$TRACES" ${READER:+--model "$READER"} --device "$DEVICE" \
    --limit "$ANSWERS" --max-new-tokens "$TOKENS" --quiet

# Draws by the rankings that come with a step, and by rows of logits.
verify verify-top-k --dtype float32 --temperature 1 --top-k 50
verify verify-top-p --dtype float32 --temperature 1 --top-p 0.9

# The gaps of near ties in low precision; the passes of heads are recorded, too.
verify verify-bfloat16 --dtype bfloat16
verify verify-heads --dtype float32 --method hd+amphista

# Quantized weights in captured steps, where torchao is installed.
if "$PYTHON" -c 'import torchao' 2>/dev/null; then
    verify verify-int8 --quantization int8
fi

# What a pass takes by nodes and context: the embedded model, then the shape.
step cost hdtool.cli bench-cost --device "$DEVICE" --contexts "$CONTEXTS" --out "$OUT/cost" --quiet
step "cost-$SHAPE" hdtool.cli bench-cost --shape "$SHAPE" --device "$DEVICE" --contexts "$CONTEXTS" \
    --out "$OUT/cost-$SHAPE" --quiet

echo "results are in $OUT" >&2
exit "$failed"
