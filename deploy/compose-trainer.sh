#!/bin/sh
# Runs a command as a trainer of docker compose, with a copy of the token that no other user can read.
set -eu
umask 077
cp /etc/shardwell/trainers/token /tmp/token
export SHARDWELL_TOKEN_FILE=/tmp/token
umask 022
exec "$@"
