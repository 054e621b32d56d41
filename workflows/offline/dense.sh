#!/usr/bin/env bash
# dense.sh train [options] | builders [options] | measure [SECONDS] | lossless [options]: suite dense on one card. Needs
# RUN/model.gguf; train also RUN/train, the others RUN/results/dense-real/prompts. Call train with the same options until
# its last line has nothing left under "remaining". The plan is written here, with the digests of what was trained.
. workflows/offline/common.sh
W=tfm/weights/smollm2; R=$RUN/results/dense-real; P=$R/prompts/smollm2; DEVICE=${DEVICE:-cuda}
CONFIG=${CONFIG:-workflows/config/dense.yaml}
[ -e $W/target/config.json ] || python3 -m tfm.llama_gguf --gguf "$RUN/model.gguf" --out $W/target || exit 1
what=${1:-nothing}; shift
if [ "$what" != train ]; then
  if [ ! -e $W/README.md ]; then python3 -m tfm.train.export --from "$RUN/dense/weights" --to $W || exit 1; fi
  # the folder of the sets is machine-bound; the plan calls it local, as the workflow does
  RESOLVED=$(python3 -c '
import json, sys, yaml
from baselines import suite
config = suite.resolve(yaml.safe_load(open(sys.argv[1])) | {"data": sys.argv[2]})
print(json.dumps(config | {"data": "local"}, sort_keys=True))' "$CONFIG" "$P") || exit 1
  python3 workflows/scripts/write_plan.py --out "$R/plan.json" --config "$RESOLVED" || exit 1
fi
case $what in
  train)
    python3 -m tfm.train.dense --config workflows/config/train_dense.yaml --target $W/target --gguf "$RUN/model.gguf" \
      --data "$RUN/train" --out "$RUN/dense" --device "$DEVICE" --minutes 9 "$@" 2>&1 | tee -a "$RUN/log/dense.log"
    tar -C "$RUN/dense" -czf "$OUT/dense.tar.gz" weights ;;
  builders)
    python3 workflows/scripts/bench_builders.py --config "$CONFIG" --heads weaver,markov,recurrent \
      --prompts $(ls "$P"/{gsm8k,math500,humaneval,mtbench}.jsonl 2> /dev/null) --limit 3 --steps 16 --every 4 \
      --device "$DEVICE" --commit "$COMMIT" --out "$R/builders" "$@"
    tar -C "$RUN" -czf "$OUT/builders.tar.gz" results/dense-real/builders ;;
  measure)  # timed cells first, alone on the card, then what is left; the untimed ones are faster by cells.sh dense-real "" 2
    python3 workflows/scripts/run_paired.py --list "$R/plan.json" --out "$RUN" --commit "$COMMIT" --seconds "${1:-330}" | tail -n 40
    tar -C "$RUN" -czf "$OUT/dense-cells.tar.gz" results/dense-real ;;
  lossless)
    python3 workflows/scripts/check_lossless.py --weights $W --prompts "$P"/{gsm8k,mtbench}.jsonl --device "$DEVICE" \
      --max-new-tokens 48 --requests 8 --out "$OUT/lossless.json" "$@" ;;
  *) echo "dense.sh: $what is not allowed (allowed: train, builders, measure, lossless)" >&2; exit 2 ;;
esac
