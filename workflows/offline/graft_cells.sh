#!/usr/bin/env bash
# graft_cells.sh: the timed cells of RUN/results/graft-real/plan.json, one process a card, LIMIT seconds in all (default 540);
# finished cells are kept and a second call goes on
. workflows/offline/common.sh
LIMIT=${LIMIT:-540}
nvidia-smi --query-gpu=name,clocks.sm,temperature.gpu,memory.used --format=csv
for card in $(seq 0 $((CARDS - 1))); do
  CUDA_VISIBLE_DEVICES=$card OMP_NUM_THREADS=4 timeout -k 5 "$LIMIT" python3 workflows/scripts/run_paired.py \
    --list "$RUN/results/graft-real/plan.json" --out "$RUN" --commit "$COMMIT" --part "$((card + 1))/$CARDS" \
    --seconds $((LIMIT - 60)) > "$OUT/graft-$card.txt" 2>&1 &
done
wait
tail -n 20 "$OUT"/graft-?.txt | cut -c1-300
tar -C "$RUN" -czf "$OUT/graft.tar.gz" results/graft-real/cells
