#!/usr/bin/env bash
# cells.sh SUITE [WEIGHTS] [WORKERS]: the untimed cells of RUN/results/SUITE/plan.json, WORKERS processes a card (default 6).
# With WEIGHTS (a family's folder) those replace the plan's, under the suite's name SUITE-<folder's name>, for METHODS
# (comma-separated; default: all).
. workflows/offline/common.sh
QUEUE=$RUN/queue-$$; mkdir -p "$QUEUE/taken"
python3 workflows/offline/queue_cells.py --plan "$RUN/results/$1/plan.json" ${2:+--weights "$2"} ${METHODS:+--methods "$METHODS"} \
  --run "$RUN" --out "$QUEUE" || exit 1
worker() {
  local list
  while list=$(ls "$QUEUE"/*.json 2> /dev/null | head -n 1) && [ -n "$list" ]; do
    mv "$list" "$QUEUE/taken/" 2> /dev/null || continue  # another worker was faster
    CUDA_VISIBLE_DEVICES=$1 python3 workflows/scripts/run_cells.py --list "$QUEUE/taken/$(basename "$list")" --out "$RUN" \
      --commit "$COMMIT" --log "$RUN/log/cells-$(basename "$list").log" >> "$RUN/log/cells.out" 2>&1
  done
}
for card in $(seq 0 $((CARDS - 1))); do for _ in $(seq "${3:-6}"); do worker "$card" & done; done
wait
say "$1: $(find "$RUN"/results/*/cells -name cell.json | wc -l) cells in all"; grep -h '"failed": {"' "$RUN/log/cells.out"
tar -C "$RUN" -czf "$OUT/cells.tar.gz" results
