#!/bin/sh
# Gives the trainers of docker compose what they need: the authority's certificate and a token for the run SHARDWELL_RUN.
# Runs in the trainers' group, which can read both.
set -eu
umask 027
servers=/etc/shardwell/servers trainers=/etc/shardwell/trainers
new=$(mktemp -d "$trainers/.new.XXXXXX") # another container may make them at the same time
cat "$servers/ca.pem" > "$new/ca.pem" # cp would copy the mode
shardwell token --role trainer --run "$SHARDWELL_RUN" --expires 7d > "$new/token"
mv "$new/ca.pem" "$new/token" "$trainers"
rmdir "$new"
