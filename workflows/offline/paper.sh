#!/usr/bin/env bash
# paper.sh [LAYERS]: suite paper rehearsed on one card: random weights of its shape, with LAYERS of the target's 64 layers
# (default 16: 21 GB of disk, twice that of memory; 64 take 58 GB), through its files and its loader into the static engine
. workflows/offline/common.sh
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} OMP_NUM_THREADS=8
rm -rf "$RUN/paper-weights"  # of a call that was ended
timeout -k 5 "${LIMIT:-240}" python3 workflows/scripts/rehearse_paper.py --folder "$RUN/paper-weights" --layers "${1:-16}" \
  --out "$OUT/rehearse_paper.json" 2>&1 | tee "$OUT/rehearse_paper.txt" | tail -n 20
rm -rf "$RUN/paper-weights"
