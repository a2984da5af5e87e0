#!/bin/sh
# Gives the trainers of docker compose what they need: the authority's certificate and a token for the run SHARDWELL_RUN.
set -eu
umask 077
servers=/etc/shardwell/servers trainers=/etc/shardwell/trainers
cp "$servers/ca.pem" "$trainers/.ca.pem"
shardwell token --role trainer --run "$SHARDWELL_RUN" --expires 7d > "$trainers/.token"
mv "$trainers/.ca.pem" "$trainers/ca.pem"
mv "$trainers/.token" "$trainers/token"
