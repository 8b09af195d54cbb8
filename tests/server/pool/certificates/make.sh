#!/bin/bash
# Makes the certificates of control_stream_test.cc, which protect nothing: an authority with a leader and a worker, and
# a stranger of another authority. Needs openssl.
set -euo pipefail
cd "$(dirname "$0")"

authority() {  # NAME
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 -subj "/CN=test $1" \
    -keyout "$1.key" -out "$1.pem" 2> /dev/null
}
signed_by() {  # AUTHORITY NAME
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=test $2" -keyout "$2.key" -out "$2.csr" \
    2> /dev/null
  openssl x509 -req -in "$2.csr" -CA "$1.pem" -CAkey "$1.key" -CAcreateserial -days 36500 -out "$2.pem" \
    -extfile <(echo "subjectAltName=IP:127.0.0.1,DNS:localhost") 2> /dev/null
  rm "$2.csr"
}

authority authority
signed_by authority leader
signed_by authority worker
authority other_authority
signed_by other_authority stranger
rm authority.key other_authority.key ./*.srl
