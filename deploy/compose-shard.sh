#!/bin/sh
# Starts a shard server of docker compose with the container's name as its id, such as shardwell-shard-2. The name stays
# the same when the container is restarted or recreated, unlike the host name. Only Docker's DNS can look it up.
address=$(hostname -i | cut -d ' ' -f 1)
name=$(getent -s dns hosts "$address" | awk '{ sub(/[.].*/, "", $2); print $2; exit }')
[ -n "$name" ] || echo "DNS has no name for $address: the server's id will change when the server restarts" >&2
export SHARDWELL_ID="${SHARDWELL_ID:-$name}"
# By default the host name, which only containers can look up. Linux hosts also reach the address.
case "${SHARDWELL_ADVERTISE:-}" in "") unset SHARDWELL_ADVERTISE ;; address) export SHARDWELL_ADVERTISE="$address" ;; esac
export SHARDWELL_OWN_MEMORY_LIMIT="${SHARDWELL_OWN_MEMORY_LIMIT:-1}" # one server per container
exec shardwell-server shard "$@"
