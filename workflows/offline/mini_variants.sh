#!/usr/bin/env bash
# mini_variants.sh SEED: Weavers of other widths and of fewer answers over the target and drafter of mini_train.sh SEED,
# 2000 steps each, all at once on one card
. workflows/offline/common.sh
variant() {  # name, d_rank, answers
  local out=$RUN/variants/$1
  mkdir -p "$out/weights" "$out/sample"
  cp -r "$RUN/mini-$SEED/weights/target" "$RUN/mini-$SEED/weights/drafter" "$out/weights/"
  python3 - "$RUN/mini-$SEED/sample/samples.npz" "$out" "$2" "$3" "$SEED" <<'P' || return 1
import sys
from pathlib import Path

import yaml

from tfm.train.sample import Samples

source, out, rank, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
rows = Samples.load(source).rows()
kept = [row for row in rows if not row[2]]
# parts are sorted by the prompts' lengths: every k-th keeps all lengths; the held-out rows stay the same
kept = [kept[at * len(kept) // count] for at in range(count)] + [row for row in rows if row[2]]
Samples.join(kept).save(out / "sample/samples.npz")
config = yaml.safe_load(Path("workflows/config/train_mini.yaml").read_text())
config["weaver"]["model"]["d_rank"], config["weaver"]["train"]["steps"] = rank, 2000
config["sample"]["conversations"], config["seed"] = count, int(sys.argv[5])
(out / "train.yaml").write_text(yaml.safe_dump(config))
P
  python3 -m tfm.train.run --config "$out/train.yaml" --out "$out" --device cuda --stages weaver > "$RUN/log/$1.log" 2>&1
  say "$1: exit $?"
}
SEED=$1
for named in "d512-a24576 512 24576" "d128-a24576 128 24576" "d1024-a24576 1024 24576" "d512-a6144 512 6144"; do
  variant $named &
done
wait
tar -C "$RUN" -czf "$OUT/variants.tar.gz" --exclude samples.npz --exclude target --exclude drafter variants
