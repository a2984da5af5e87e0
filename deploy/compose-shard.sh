#!/bin/sh
# Starts a shard server in a container of docker compose under the container's name, such as shardwell-shard-2. The name
# stays the same when the container is restarted or made anew; its host name does not. Only Docker's DNS knows it.
address=$(hostname -i | cut -d ' ' -f 1)
name=$(getent -s dns hosts "$address" | awk '{ sub(/[.].*/, "", $2); print $2; exit }')
[ -n "$name" ] || echo "no name for $address in DNS: the server's id will change when it restarts" >&2
export SHARDWELL_ID="${SHARDWELL_ID:-$name}"
exec shardwell-server shard "$@"
