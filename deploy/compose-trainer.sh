#!/bin/sh
# Runs a training script as the trainers of docker compose, with a copy of the token that no other user can read.
#
#   docker compose run --rm trainer my_train.py --lr 0.1   a script of SHARDWELL_TRAIN_DIR, with its arguments
#   docker compose run --rm trainer                        the demo; an argument that begins with - is one of the demo
#   docker compose run --rm trainer bash                   any other command, with the environment of a trainer
set -eu
umask 077
cp /etc/shardwell/trainers/token /tmp/token
export SHARDWELL_TOKEN_FILE=/tmp/token
umask 022
case "${1:--}" in
-*) set -- /home/trainer/examples/train_gpt.py --output /var/lib/shardwell-output "$@" ;;
*.py)
    if [ ! -r "$1" ]; then
        echo "no script $1 in $PWD that user $(id -u) can read: $PWD is the host's folder SHARDWELL_TRAIN_DIR;" \
            "scripts must be readable for others (chmod o+r)" >&2
        exit 2
    fi
    ;;
*) exec "$@" ;;
esac
[ -z "${SHARDWELL_DP:-}" ] || set -- --dp "$SHARDWELL_DP" "$@"
exec shardwell launch --coordinator "$SHARDWELL_ADDRESS" --run "$SHARDWELL_RUN" --restart "$SHARDWELL_RESTARTS" \
    --num-trainers "$SHARDWELL_TRAINERS" --tp "${SHARDWELL_TP:-1}" --pp "${SHARDWELL_PP:-1}" "$@"
