#!/usr/bin/env bash
# Profiles one call of one benchmark case with Nsight Compute.
#
#   bench/profile.sh CASE [--dir fwd|bwd] [--entrant sm80] [--dtype bf16] [--out DIR] [--nvtx RANGE|none]
#                         [--fa3-lib PATH] [--cudart12 PATH] [--lines yes|no]
#
# Builds the extension with line tables first (FLASH_EXT_LINEINFO=1: minutes the first time; --lines no leaves it as it
# is). Leaves DIR/CASE-dir-entrant.ncu-rep (open it in ncu-ui: source view, since kernels carry line numbers), the raw
# page as .raw.csv and the metrics to look at first as .csv. `python -m bench.attention --list` names the cases.
# Clocks are left alone (--clock-control none), so that times match the benchmark's.
set -euo pipefail

cd "$(dirname "$0")/.."
if [[ $# -lt 1 || $1 == -* ]]; then
  sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi

case_name=$1
shift
direction=fwd entrant=sm80 out=out/profile nvtx= lines=yes
run_arguments=()
while [[ $# -gt 0 ]]; do
  if [[ $# -lt 2 ]]; then
    echo "$1 wants a value" >&2
    exit 2
  fi
  case $1 in
    --dir) direction=$2 ;;
    --entrant) entrant=$2 ;;
    --out) out=$2 ;;
    --nvtx) nvtx=$2 ;;
    --lines) lines=$2 ;;
    --dtype | --fa3-lib | --cudart12) run_arguments+=("$1" "$2") ;;
    *)
      echo "unknown option $1" >&2
      exit 2
      ;;
  esac
  shift 2
done

python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then
  python=.venv/bin/python
fi
ncu=${NCU:-ncu}
if ! command -v "$ncu" >/dev/null; then
  echo "Nsight Compute (ncu) is not on the PATH; set NCU to where it is" >&2
  exit 1
fi

# Our operators open an NVTX range of their own (C++, domain flash_ext), which leaves out what torch launches
# around them. A peer has none: everything between profiler start and stop is its own.
if [[ -z $nvtx ]]; then
  case $entrant in
    sm*) nvtx="flash_ext@$direction/" ;;
    *) nvtx=none ;;
  esac
fi
filter=()
if [[ $nvtx != none ]]; then
  filter=(--nvtx --nvtx-include "$nvtx")
fi

if [[ $lines != no ]]; then
  FLASH_EXT_LINEINFO=1 "$python" setup.py --quiet build_ext --inplace
fi
mkdir -p "$out"
report="$out/$case_name-$direction-$entrant"
"$ncu" --force-overwrite --export "$report" --set full --import-source on --clock-control none \
  --profile-from-start off "${filter[@]}" \
  "$python" -m bench.profile_case run "$case_name" --dir "$direction" --entrant "$entrant" "${run_arguments[@]}"
if [[ ! -f $report.ncu-rep ]]; then
  echo "ncu wrote no report: no kernel in range $nvtx (try --nvtx none)" >&2
  exit 1
fi
"$ncu" --import "$report.ncu-rep" --page raw --csv >"$report.raw.csv"
"$python" -m bench.profile_case metrics "$report.raw.csv" "$report.csv"
