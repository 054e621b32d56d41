#!/usr/bin/env bash
# mini_train.sh SEED [TARGET] [SHARPEN]: the recipe of train_mini.yaml on one card (CUDA_VISIBLE_DEVICES), stage by stage.
# With TARGET (a folder with a trained target and its tokenizer) that one is kept, its logits times SHARPEN (default 1).
# A tokenizer alone in RUN/mini-SEED/weights/target is kept too.
. workflows/offline/common.sh
SEED=$1; RUN_OF=$RUN/mini-$SEED; STAGES="tokenizer,target sample drafter weaver export"
mkdir -p "$RUN_OF/weights/target" "$RUN_OF/target"
sed "s/^seed: .*/seed: $SEED/" workflows/config/train_mini.yaml > "$RUN_OF/train.yaml"
if [ -n "${2:-}" ]; then
  STAGES="tokenizer,sample drafter weaver export"
  [ -e "$RUN_OF/weights/target/model.safetensors" ] || python3 - "$2" "$RUN_OF/weights/target" "${3:-1}" <<'P'
import shutil
import sys
from pathlib import Path

import torch

from tfm import checkpoints
from tfm.train.target import sharpen

source, out, factor = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
target = checkpoints.load_target(source, device="cpu", dtype=torch.float32)
sharpen(target, factor)
checkpoints.save_target(target, out, storage="int8")
for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
    shutil.copyfile(source / name, out / name)
P
  cp "$2/../target_curve.csv" "$RUN_OF/target/curve.csv"
fi
for stage in $STAGES; do  # processes of their own: each gives the card's memory back
  say "mini $SEED: $stage"
  python3 -m tfm.train.run --config "$RUN_OF/train.yaml" --data "$RUN/train" --out "$RUN_OF" --device cuda --stages "$stage" \
    >> "$RUN/log/mini-$SEED.log" 2>&1 || { say "mini $SEED: $stage failed"; tail -n 5 "$RUN/log/mini-$SEED.log"; exit 1; }
done
say "mini $SEED: done"
tar -C "$RUN_OF" -cf "$OUT/mini-$SEED.tar" weights train.yaml
