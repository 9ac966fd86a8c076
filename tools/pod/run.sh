#!/usr/bin/env bash
# On the rented machine: data, check, three seeds. Start it again after a break: what is done is skipped.
#   SHARDS=80 VARIANT=caseops SWEEP=tools/pod/seeds.sweep bash tools/pod/run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
SHARDS=${SHARDS:-80}
VARIANT=${VARIANT:-caseops}
SWEEP=${SWEEP:-tools/pod/seeds.sweep}
POD=runs/pod
# Before data and check are paid for.
if [ ! -f "$SWEEP" ]; then
    echo "pod: SWEEP=$SWEEP: no such file; name one like tools/pod/seeds.sweep, as seen from $PWD" >&2
    exit 2
fi
mkdir -p "$POD"
rm -f "$POD/ended"

# Whatever the end is: the last line of the newest log, which says how to go on, comes after torchrun's own.
at_the_end() {
    status=$?
    newest=$(ls -t runs/*/*/log.txt 2>/dev/null | head -n 1 || true)
    if [ "$status" != 0 ] && [ -n "$newest" ]; then
        echo "$newest: $(tail -n 1 "$newest")"
    fi
    echo "$status" > "$POD/ended"
    echo "ended with status $status: fetch the runs, and stop this machine, which is paid by the hour"
}
trap at_the_end EXIT

# stage NAME COMMAND ...: run it and print its seconds; with a name other than "-" only until it has succeeded once.
stage() {
    name=$1
    shift
    if [ -e "$POD/$name.done" ]; then
        echo "pod: $name is done already"
        return
    fi
    start=$(date +%s)
    echo "pod: $name: $*"
    "$@"
    echo "pod: $name took $(($(date +%s) - start)) s" | tee -a "$POD/seconds.txt"
    touch "$POD/$name.done"
}

# Other shards are another stage.
stage "data-$VARIANT-$SHARDS" python data/fineweb.py --variant "$VARIANT" --train-shards "$SHARDS"
# The check wants a new folder: that of a former try moves.
if [ -e "$POD/check" ] && [ ! -e "$POD/check.done" ]; then
    mv "$POD/check" "$(mktemp -d "$POD/former-XXXX")"
fi
stage check python benchmarks/gpu_check.py --out "$POD/check"
# The sweep itself skips seeds that have finished, resumes those that have a checkpoint, and stops at a limit.
rm -f "$POD/seeds.done"
stage seeds python -m tools sweep "$SWEEP"
