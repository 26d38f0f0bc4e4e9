#!/usr/bin/env bash
# Builds one standalone program from csrc as it is now; needs nvcc, neither torch nor a GPU.
#
#   bench/standalone/build.sh NAME [nvcc flags], NAME one of fwd_sm90, fwd_split, bwd_sm90, modifiers_sm80,
#   modifiers_sm90, bwd_mod_sm90, bwd_bias_sm90, blocks_sm80
#
# Leaves out/standalone/NAME and what the compiler said in NAME.log. Prints spills and the C75xx warnings of ptxas,
# which say that it serialised wgmma. The head of each program names its own -D flags.
# NVCC names another compiler, ARCH another architecture than sm_90a.
set -euo pipefail

cd "$(dirname "$0")/../.."
if [[ $# -lt 1 || ! -f bench/standalone/$1.cu ]]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi

name=$1
shift
sources=("bench/standalone/$name.cu")
if [[ $name == modifiers_sm80 ]]; then
  sources+=(csrc/inst/bwd_bias_sm80.cu)
fi
arch=${ARCH:-90a}
out=out/standalone
mkdir -p "$out"
# nvcc links its runtime statically, so that the program runs wherever there is a driver.
if ! "${NVCC:-nvcc}" -std=c++20 -O3 -gencode "arch=compute_$arch,code=sm_$arch" -Xptxas -v -Icsrc "$@" \
  -o "$out/$name" "${sources[@]}" >"$out/$name.log" 2>&1; then
  grep -E -A3 'error|fatal' "$out/$name.log" >&2 || cat "$out/$name.log" >&2
  exit 1
fi
# Spills are reported on a line after the one that names the kernel.
awk '/Function properties for/ { kernel = $NF }
     /C75[0-9][0-9]/ { print; found = 1 }
     /[1-9][0-9]* bytes spill/ { print kernel ":" $0; found = 1 }
     END { if (!found) print "no spills, no C75xx" }' "$out/$name.log"
ls -l "$out/$name"
