#!/usr/bin/env bash
# serving.sh first | stock | smoke | steps | cells: SGLang's own arms and the plugin's, from a folder of unpacked packages
# (RUN/sglang, beside the machine's torch). ARMS chooses the methods of first and the arms of steps, LIMIT the seconds
# after which what is done is kept: below the call's own limit, or no log comes back. The servers end with the script.
. workflows/offline/common.sh
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} HF_HUB_OFFLINE=1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
export TVM_FFI_CACHE_DIR=$RUN/cache/tvm-ffi TRITON_CACHE_DIR=$RUN/cache/triton FLASHINFER_WORKSPACE_BASE=$RUN/cache
# the engine's Python sees its packages, the runner's does not
printf '#!/bin/sh\nPYTHONPATH=$PYTHONPATH:%s exec python3 "$@"\n' "$RUN/sglang" > "$RUN/python"; chmod +x "$RUN/python"
LIMIT=${LIMIT:-590}; limited() { timeout --foreground -k 10 "$LIMIT" python3 "$@"; }
# a server that does not start in time is named as failed
server="--server-python $RUN/python --server-folder $RUN/servers --server-seconds $((LIMIT > 430 ? 400 : LIMIT - 30))"
bench() { limited workflows/scripts/bench_serving.py "$@" $server --commit "$COMMIT"; }
case $1 in
  first)
    # nvcc works while SGLang is imported
    python3 -c 'from tfm_kernels.gdn.fused_cuda import DEFAULT_PRECISION, library_of; import torch
library_of(torch.device("cuda"), 3, DEFAULT_PRECISION)' & nvcc=$!
    limited workflows/scripts/check_serving.py --list "$RUN/results/engines/plan.json" --root "$RUN" \
      --methods ${ARMS:-tfm ar} $server --out "$OUT/first.json"
    wait $nvcc ;;
  stock) bench --arms ar dflash --attention fa3 --prompts 512 --out "$OUT/stock.json" ;;
  smoke) bench --arms ddtree tfm ddtree-recurrent dartree --layers 8 --repeats 1 --new-tokens 64 --prompts 64 --out "$OUT/smoke.json" ;;
  steps) bench --arms ${ARMS:-ar dflash ddtree tfm ddtree-recurrent} --prompts 512 2048 --out "$OUT/steps.json" ;;
  cells)
    limited workflows/scripts/serve_cell.py --list "$RUN/results/engines/plan.json" --out "$RUN" --commit "$COMMIT" \
      --log "$RUN/log/serve.log" $server | tail -n 1
    tar -C "$RUN" -czf "$OUT/engines.tar.gz" results/engines ;;
  *) echo "serving.sh: $1 is not allowed (allowed: first, stock, smoke, steps, cells)" >&2; exit 2 ;;
esac
# of this call's servers: their logs are newer than the Python made above
(cd "$RUN" && find servers -name server.log -newer python -print0 | tar -czf "$OUT/server-logs.tar.gz" --null -T -)
