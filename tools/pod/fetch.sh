#!/usr/bin/env bash
# At home: copy the runs of a rented machine here, once, or every EVERY seconds until run.sh has ended there.
#   EVERY=60 PORT=22 bash tools/pod/fetch.sh root@HOST [FOLDER_THERE]
set -euo pipefail
if [ -z "${1:-}" ]; then
    echo "usage: EVERY=60 PORT=22 bash tools/pod/fetch.sh USER@HOST [FOLDER_THERE]" >&2
    exit 2
fi
if ! command -v rsync > /dev/null; then
    echo "fetch: rsync is not installed here; install it, also on the machine (apt-get install rsync)" >&2
    exit 2
fi
cd "$(dirname "$0")/../.."
mkdir -p runs
rm -f runs/pod/ended
while true; do
    # Checkpoints stay there: a run resumes where it began.
    if ! rsync -az --partial --exclude checkpoint.pt -e "ssh -p ${PORT:-22}" "$1:${2:-/repository}/runs/" runs/; then
        echo "fetch: rsync failed; is the machine up, PORT right, and rsync installed there?" >&2
        [ -n "${EVERY:-}" ] || exit 1
    fi
    if [ -e runs/pod/ended ]; then
        echo "fetch: everything is here (exit status $(cat runs/pod/ended)): stop the machine"
        exit 0
    fi
    [ -n "${EVERY:-}" ] || exit 0
    sleep "$EVERY"
done
