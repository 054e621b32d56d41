# sourced by the others, in the repository's root
set -u -o pipefail
export RUN=$(realpath -m "${RUN:-run}"); export OUT=${OUT:-$RUN/out}; export COMMIT=${COMMIT:-$(git rev-parse HEAD)}
mkdir -p "$RUN/site" "$RUN/log" "$OUT"
if [ ! -e "$RUN/site/.installed" ] && ls "$RUN"/whl/*.whl > /dev/null 2>&1; then
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$RUN/site" "$RUN"/whl/*.whl && touch "$RUN/site/.installed"
fi
ln -sfn "$PWD/kernels" "$RUN/site/tfm_kernels"
export PYTHONPATH=$RUN/site:$PWD PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=true
CARDS=${CARDS:-$(nvidia-smi -L 2> /dev/null | wc -l)}
[ "$CARDS" -ge 1 ] || CARDS=1
say() { echo "$(date +%T) $*" | tee -a "$RUN/log/all.log"; }
