#!/bin/sh
# Makes the secrets of docker compose, each only if it is missing: an authority for development, the certificate and the
# key of the servers, and the key of the cluster. Certificates are renewed 30 days before they expire.
# Arguments replace the options of `shardwell-server certs`: `docker compose run --rm certs --days 365` renews now.
set -eu
umask 077
authority=/etc/shardwell/authority servers=/etc/shardwell/servers
[ $# -gt 0 ] || set -- --renew-before 30
shardwell-server certs "$authority" --host "$SHARDWELL_TLS_SERVER_NAME" "$@"
for file in server-key.pem server.pem ca.pem; do
    cmp -s "$authority/$file" "$servers/$file" && continue
    new=$(mktemp "$servers/.new.XXXXXX")
    cp "$authority/$file" "$new"
    mv "$new" "$servers/$file" # as a whole: servers may read the file now
done
new=$(mktemp "$servers/.new.XXXXXX")
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$new"
ln "$new" "$servers/key" 2> /dev/null || [ -s "$servers/key" ] # the first key stays, also if another container makes one now
rm "$new"
