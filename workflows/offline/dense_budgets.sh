#!/usr/bin/env bash
# dense_budgets.sh [SECONDS]: DARTree's budgets once more, timed and side by side (suite dense times its headline alone).
# After dense.sh measure, which would make the untimed cells again.
. workflows/offline/common.sh
R=$RUN/results/dense-real
python3 workflows/offline/timed_budgets.py --plan "$R/plan.json" --out "$RUN/budgets.jsonl" || exit 1
python3 workflows/scripts/run_paired.py --list "$RUN/budgets.jsonl" --out "$RUN" --commit "$COMMIT" --seconds "${1:-150}" | tail -n 20
tar -C "$RUN" -czf "$OUT/dense-cells.tar.gz" results/dense-real
