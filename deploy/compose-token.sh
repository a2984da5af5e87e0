#!/bin/sh
# Gives the trainers of docker compose what they need: the authority's certificate and a token for the run SHARDWELL_RUN.
# Runs in the trainers' group, which can read both.
set -eu
umask 027
servers=/etc/shardwell/servers trainers=/etc/shardwell/trainers
cat "$servers/ca.pem" > "$trainers/.ca.pem" # cp would copy the mode
shardwell token --role trainer --run "$SHARDWELL_RUN" --expires 7d > "$trainers/.token"
mv "$trainers/.ca.pem" "$trainers/ca.pem"
mv "$trainers/.token" "$trainers/token"
