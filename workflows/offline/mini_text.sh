#!/usr/bin/env bash
# mini_text.sh [BENCHMARKS]: SmolLM2's answers to the training prompts and to messages it makes up, on all cards. A second
# call goes on. BENCHMARKS is a folder of prompt sets (*.jsonl) whose wording must not appear.
. workflows/offline/common.sh
torchrun --nproc-per-node "$CARDS" -m tfm.train.generate --gguf "$RUN/model.gguf" --train-data "$RUN/train" \
  ${1:+--benchmarks "$1"} --out "$RUN/text" --device cuda --requests 4096 --new-prompts 50000 --workers 8 \
  2>&1 | tee "$RUN/log/text.log" | tail -n 2
# moved once all are there: the prompts of a second call must be those of the first
grep -q '"done": true' "$RUN/log/text.log" && mv "$RUN"/text/generated-* "$RUN/train/"
