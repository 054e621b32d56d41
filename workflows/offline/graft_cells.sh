#!/usr/bin/env bash
# graft_cells.sh [CARD...]: the timed cells of suite graft-real, one process a card (default: all), LIMIT seconds in all
# (default 540). PLAN is the list (default RUN/results/graft-real/plan.json). Processes share it by claims: call it again
# for another card while it runs, or afterwards for what is left. Finished prompts are kept, a cell that failed is left out.
. workflows/offline/common.sh
LIMIT=${LIMIT:-540}; PLAN=${PLAN:-$RUN/results/graft-real/plan.json}; START=$(date +%s)
left() { echo $((LIMIT - ($(date +%s) - START))); }
nvidia-smi --query-gpu=name,clocks.sm,temperature.gpu,memory.used --format=csv
worker() {  # card: again after an error of the device, which ends a process with status 3
  local status=3
  while [ $status -eq 3 ] && [ "$(left)" -gt 20 ]; do
    CUDA_VISIBLE_DEVICES=$1 OMP_NUM_THREADS=4 timeout -k 5 "$(left)" python3 workflows/scripts/run_paired.py --list "$PLAN" \
      --out "$RUN" --commit "$COMMIT" --seconds "$(($(left) > 60 ? $(left) - 40 : 20))" >> "$OUT/graft-$1.txt" 2>&1
    status=$?
  done
  say "graft_cells: card $1, exit $status, $(($(date +%s) - START)) s"
}
for card in ${*:-$(seq 0 $((CARDS - 1)))}; do worker "$card" & done
wait
tail -n 20 "$OUT"/graft-?.txt | cut -c1-300
say "graft_cells: $(find "$RUN/results/graft-real/cells" -name cell.json 2> /dev/null | wc -l) cells in all"
tar -C "$RUN" -czf "$OUT/graft.tar.gz" --exclude '*.lock' results/graft-real
