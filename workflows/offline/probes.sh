#!/usr/bin/env bash
# probes.sh SUITE: oracle tree and ceiling of RUN/results/SUITE, whose headline cells must be there
. workflows/offline/common.sh
for probe in oracle ceiling; do
  settings=$(python3 -c "
import json, sys
from baselines import probes
config = json.load(open(sys.argv[1]))['config']
print(json.dumps(probes.SETTINGS[sys.argv[2]](config)))" "$RUN/results/$1/plan.json" $probe) || exit 1
  (ln -sfn "$PWD/tfm" "$RUN/tfm" && cd "$RUN" && python3 "$OLDPWD/workflows/scripts/estimate_$probe.py" --settings "$settings" \
    --commit "$COMMIT" --out "results/$1/$probe") 2> "$RUN/log/$probe.log" | tail -n 1
done
tar -C "$RUN" -czf "$OUT/probes.tar.gz" "results/$1/oracle" "results/$1/ceiling"
