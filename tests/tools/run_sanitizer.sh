#!/bin/sh
# compute-sanitizer over small cases of every kernel: memcheck, racecheck, synccheck, initcheck.
#
#   tests/tools/run_sanitizer.sh [TOOL...]      default: all four
#
# TARGETS="sm90" and CASES="--only TEXT --part 1/4" (of sanitizer_cases.py) choose less. Of racecheck and initcheck a
# summary by kernel and source follows (sanitizer_summary.py); a build with FLASH_EXT_LINEINFO=1 has the lines.
# racecheck wants a build with FLASH_EXT_DEBUG=1: it does not follow bar.arrive, which that build replaces.
# PYTHON chooses the interpreter, SANITIZER the program, LIMIT the seconds of a run (500). Exit status: 0 clean,
# 1 a finding, 3 nothing was checked because there is no compute-sanitizer or it refuses this GPU (some virtual ones do).
set -u
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
sanitizer=${SANITIZER:-compute-sanitizer}
tools=${*:-memcheck racecheck synccheck initcheck}
log=$(mktemp) || exit 2
trap 'rm -f "$log"' EXIT

if ! command -v "$sanitizer" >/dev/null 2>&1; then
    echo "NOT CHECKED: $sanitizer is not on PATH (it comes with the CUDA toolkit)"
    exit 3
fi

# Each allocation on its own, so that the end of a tensor is the end of what may be touched.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

variant=$("$python" -c "from flash_ext._ops.library import _C; print(_C.build_info['variant'])") || exit 2
status=0
for tool in $tools; do
    if [ "$tool" = racecheck ] && [ "$variant" != debug ]; then
        echo "racecheck: NOT CHECKED, this is a $variant build; FLASH_EXT_DEBUG=1 python setup.py build_ext --inplace"
        status=3
        continue
    fi
    for target in ${TARGETS:-sm80 sm80-99k sm90 sm80-short sm90-short}; do
        inputs=""
        case $tool in
            memcheck) options="--padding 64 --print-limit 20" ;;
            # Only our kernels are followed: what those of torch write would count as never written.
            # Without the stack of the host, whose writing takes most of the time. Without copies to the host, which it reports
            # for each 32 bytes that TMA stored: 89,000 of 102 cases. Launch by launch: findings that the tool's buffer does
            # not hold are then of a launch that the summary names.
            initcheck)
                options="--print-limit 100000 --show-backtrace no --check-api-memory-access no --force-blocking-launches"
                inputs="--from-host" ;;
            *) options="--print-limit 1000 --show-backtrace no" ;;
        esac
        # shellcheck disable=SC2086
        timeout "${LIMIT:-500}" "$sanitizer" --tool "$tool" $options --kernel-name kernel_substring=flash_ext \
            --error-exitcode 77 "$python" -m tests.tools.sanitizer_cases --target "$target" $inputs ${CASES:-} \
            >"$log" 2>&1
        code=$?
        if grep -q "Device not supported" "$log"; then
            echo "NOT CHECKED: $sanitizer refuses this GPU"
            exit 3
        fi
        if [ $code -eq 0 ]; then
            echo "$tool $target: clean, $(grep -c '^case ' "$log") cases"
        else
            echo "$tool $target: FAILED with code $code"
            # The last case named before a finding is the one that made it.
            case $tool in
                racecheck | initcheck) "$python" -m tests.tools.sanitizer_summary "$log" ;;
                *) grep -E '^case |^=========' "$log" | tail -n 60 ;;
            esac
            grep -E '^[A-Za-z]*Error' "$log"
            status=1
        fi
    done
done
exit $status
