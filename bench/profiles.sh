#!/usr/bin/env bash
# Profiles what is slower than it should be, one call after the other, beside the peer that is faster.
#
#   bench/profiles.sh [DIR [PATTERN [bench/profile.sh options]]]
#
# PATTERN chooses lines of the list below, e.g. 'feature-*' or '* bwd *'. Leaves what bench/profile.sh leaves for each
# of them in DIR (default out/profiles), and one table of all, DIR/profiles.md. Builds nothing. About 20 s a line. A line
# that fails is said, and the others go on; without a library of FlashAttention-3 (--fa3-lib PATH) its lines fail.
set -uo pipefail

cd "$(dirname "$0")/.."
out=${1:-out/profiles}
pattern=${2:-*}
shift $(($# < 2 ? $# : 2))

profiles=(
  "d128-causal-s4096 fwd sm90"
  "d128-causal-s4096 fwd fa3"
  "d256-full-s8192 fwd sm90"
  "d64-full-s1024 fwd sm90"
  "d128-causal-s1024 fwd sm90"
  "d256-full-s512 fwd sm90"
  "b4-d192-dv128-full fwd sm90"
  "b4-d192-dv192-full fwd sm90"
  "d64-causal-s16384 bwd sm90"
  "d64-causal-s16384 bwd fa3"
  "d64-full-s1024 bwd sm90"
  "d128-full-s8192 bwd sm90"
  "d128-full-s8192 bwd fa3"
  "d128-causal-s512 bwd sm90"
  "b4-d192-dv192-full bwd sm90"
  "window-1024-s16384 bwd sm90"
  "docs-8x2048-causal bwd sm90"
  "gqa-32-8-causal-s4096 bwd sm90"
  "d64-causal-s16384 bwd sm90-det"
  "d128-causal-s16384 bwd sm90-det"
  "feature-plain fwd sm90"
  "feature-key-padding fwd sm90"
  "feature-alibi fwd sm90"
  "feature-softcap fwd sm90"
  "feature-dropout fwd sm90"
  "feature-documents fwd sm90"
  "feature-blocks-128-quarter fwd sm90"
  "feature-plain bwd sm90"
  "feature-dropout bwd sm90"
  "feature-documents bwd sm90"
  "feature-blocks-128-quarter bwd sm90"
)

failed=0
for line in "${profiles[@]}"; do
  # shellcheck disable=SC2053
  [[ $line == $pattern ]] || continue
  read -r name direction entrant <<<"$line"
  # All of the call, so that a build without NVTX headers serves; the table leaves out what takes no time.
  asked=(--dir "$direction" --entrant "$entrant" --out "$out" --lines no --nvtx none)
  if ! bench/profile.sh "$name" "${asked[@]}" "$@" >/dev/null; then
    echo "no profile: $line" >&2
    failed=$((failed + 1))
  fi
done
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then
  python=.venv/bin/python
fi
"$python" -m bench.profile_case table "$out" || exit 1
exit $((failed > 0))
