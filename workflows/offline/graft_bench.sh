#!/usr/bin/env bash
# graft_bench.sh: the static engine on one card: right or wrong, then times. LIMIT seconds in all (default 420, cut from the
# end); SKIP="check early" leaves stages out; TFM_LAUNCHES=cuda or plain turns early launches off. Needs
# RUN/results/graft/plan.json. Nothing else may run on that card.
. workflows/offline/common.sh
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} OMP_NUM_THREADS=4
LIMIT=${LIMIT:-420}; SKIP=${SKIP:-}; START=$(date +%s); export JSON=$RUN/graft-bench; mkdir -p "$JSON"
left() { echo $((LIMIT - ($(date +%s) - START))); }
stage() {  # stage NAME SECONDS COMMAND...: bounded, logged, a failure stops nothing
  local name=$1 limit=$2; shift 2
  case " $SKIP " in *" $name "*) say "$name left out"; return 0 ;; esac
  [ "$(left)" -lt "$limit" ] && limit=$(left)
  [ "$limit" -lt 8 ] && { say "$name: no time left"; return 1; }
  timeout -k 5 "$limit" "$@" > "$OUT/graft-$name.txt" 2>&1
  say "$name: exit $?, $(($(date +%s) - START)) s"
}
tests() { python3 -m pytest -q -m gpu --no-header -p no:cacheprovider "$@"; }
bench() { python3 workflows/scripts/bench_engine.py --out "$JSON" "$@"; }
export -f tests bench
# 1: right or wrong, beside each other; Triton's cache is warm afterwards
stage forms 90 bash -c "tests -n 4 tests/test_engine_triton.py" &
stage product 100 bash -c "tests -n 4 tests/test_product_cuda.py" &
stage engine 110 bash -c "tests -n 5 tests/test_engine_gpu.py" &
stage check 200 python3 workflows/scripts/check_graft.py --plan "$RUN/results/graft/plan.json" --device cuda \
  --shallow-layers 16 --prompts 2 --max-new-tokens 20 --out "$JSON/check_graft.json" &
for part in 0 1 2 3 4 5; do stage compile$part 110 bash -c "bench --stage compile --name compile$part --part $part/6" & done
wait
tail -qn 1 "$OUT"/graft-forms.txt "$OUT"/graft-product.txt "$OUT"/graft-engine.txt "$OUT"/graft-check.txt 2> /dev/null | cut -c1-200
# 2: early against plain launches, torch's products in both
stage early 60 bash -c "bench --stage steps --name early --arms ar dflash tfm --variants all:fused_cuda all:fused_cuda:off:plain \
  --contexts 512 --steps 12 --rounds 4 --seconds 45"
# 3: which product and which tiling is faster; what follows runs with the choices
stage products 60 bash -c "bench --stage products --seconds 45"
[ -e "$JSON/linear_choices.json" ] && cp "$JSON/linear_choices.json" kernels/ && cp "$JSON/linear_choices.json" "$OUT/"
# 4: the steps that are published: contexts, stages, budgets, widths, other forms
stage tuned 150 bash -c "bench --stage steps --name tuned --arms ar dflash ddtree dartree tfm --variants all:fused_cuda \
  --contexts 512 2048 8192 --prefills 128 366 --steps 16 --rounds 4 --seconds 130 \
  --also 'ar dflash ddtree dartree tfm; all:fused_cuda:stages; 512' \
  --also 'tfm-b8 tfm-b16 tfm-b32 tfm-b128 tfm-w1 tfm-w2 tfm-w8 tfm-w16 ddtree-b16 ddtree-b32 ddtree-b128; all:fused_cuda; 512 2048' \
  --also 'ar tfm; all:fused_cuda:off:early:chunks; 512' --also 'tfm ddtree; none:fused_cuda all:recurrent_triton; 512' \
  --also 'tfm-b256; all:recurrent_triton; 512'"
grep -h median "$OUT"/graft-early.txt "$OUT"/graft-tuned.txt 2> /dev/null
tar -C "$RUN" -czf "$OUT/graft-bench.tar.gz" graft-bench
say "graft_bench: $(($(date +%s) - START)) s"
