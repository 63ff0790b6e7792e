#!/bin/sh
# The "run" of a job: trains by the technique that was decided until all is consumed, or SIGTERM comes, and saves.
cd "$(dirname "$0")" || exit
exec "${PTC_TECHNIQUES:-../../planner/library/techniques}/$PTC_TECHNIQUE" execute <<QUESTION
{"job": "$PTC_JOB", "batch": $PTC_BATCH, "gpus": $WORLD_SIZE, "trial": {"program": "$PWD/model.py"}}
QUESTION
