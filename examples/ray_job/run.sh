#!/bin/sh
# Submit the job to a Ray cluster: ./run.sh http://HEAD:8265 s3://bucket/run [arguments of train.py]
# The same line again continues from the newest verified checkpoint.
set -eu
if [ "$#" -lt 2 ]; then
    echo "usage: $0 ADDRESS CHECKPOINTS [arguments of train.py], such as $0 http://HEAD:8265 s3://bucket/run" >&2
    exit 2
fi
address=$1
checkpoints=$2
shift 2
cd "$(dirname "$0")"
exec ray job submit --address "$address" --runtime-env runtime_env.yaml --working-dir . \
    -- python train.py --checkpoints "$checkpoints" "$@"
