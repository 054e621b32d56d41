#!/usr/bin/env bash
# kernels_more.sh: the kernels' tests, then what results/published/kernels-h200/bench_more.py times, then racecheck and ncu.
# LIMIT seconds in all (default 240, cut from the end); SKIP="race ncu" leaves stages out; SGLANG=folder of an unpacked wheel
# times its kernel too. Nothing else may run on that card.
. workflows/offline/common.sh
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} OMP_NUM_THREADS=2
LIMIT=${LIMIT:-240}; SKIP=${SKIP:-}; START=$(date +%s); HERE=results/published/kernels-h200
export PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
command -v ncu > /dev/null || export PATH=$PATH:$(ls -d /opt/nvidia/nsight-compute/* 2> /dev/null | tail -n 1)
left() { echo $((LIMIT - ($(date +%s) - START))); }
stage() {  # stage NAME SECONDS COMMAND...: bounded, appended to its log, a failure stops nothing
  local name=$1 limit=$2; shift 2
  case " $SKIP " in *" $name "*) say "$name left out"; return 0 ;; esac
  [ "$(left)" -lt "$limit" ] && limit=$(left)
  [ "$limit" -lt 8 ] && { say "$name: no time left"; return 1; }
  echo "== $*" >> "$OUT/kernels-$name.txt"
  timeout -k 5 "$limit" "$@" >> "$OUT/kernels-$name.txt" 2>&1
  say "$name: exit $?, $(($(date +%s) - START)) s"
}
tests() { python3 -m pytest -q -m gpu --no-header -p no:cacheprovider "$@"; }
export HERE; export -f tests
rm -f "$OUT"/kernels-{tests,bench,race,ncu}.txt
# 1: compile all side by side, then right or wrong; the Triton tests need no compiler and run meanwhile
stage tests 90 bash -c "tests -n 3 tests/test_triton.py -k 'recurrent or bit_equal or graph' > $RUN/log/triton.txt 2>&1 &
  python3 $HERE/bench_more.py --build; tests -n 6 tests/test_deferred.py tests/test_mixer_cuda.py tests/test_fused_cuda.py
  wait; cat $RUN/log/triton.txt"
# 2: times, on a card that does nothing else
stage bench 75 python3 $HERE/bench_more.py --out "$OUT" --commit "$COMMIT" ${SGLANG:+--sglang "$SGLANG"}
# 3: shared memory: the committed kernels, then each handover's other form, to know what the tool follows
race() { compute-sanitizer --tool racecheck --racecheck-report analysis --print-limit 20 python3 $HERE/sanitize.py "$@" 2>&1; }
export -f race
stage race 60 bash -c "race verify --kind one_lane > $RUN/log/race1.txt & race verify --kind one_barrier_less > $RUN/log/race2.txt &
  race verify deferred mixer; wait; tail -n +1 $RUN/log/race[12].txt"
# 4: what bounds the mixer and the deferred verify, at the paper's heads
stage ncu 40 ncu --set full --clock-control none --launch-count 9 --print-details header \
  python3 $HERE/sanitize.py mixer deferred --nodes 65 --heads 16
say "kernels_more: $(($(date +%s) - START)) s"
