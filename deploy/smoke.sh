#!/bin/sh
# Asks a server of `keepset serve` one question of each kind, and ends with 1 if an answer is not as it should be.
#
#   deploy/smoke.sh [http://127.0.0.1:8000]        with VLLM_API_KEY in the environment if the server has keys
set -eu
url=${1:-http://127.0.0.1:8000}
key=${VLLM_API_KEY:-none}
answer=$(mktemp)
trap 'rm -f "$answer"' EXIT

# ask WANTED METHOD PATH [BODY]: the status that the server must answer with; the answer is left in $answer.
ask() {
  got=$(curl --silent --show-error --max-time 300 --output "$answer" --write-out '%{http_code}' --request "$2" \
    --header "Authorization: Bearer $key" --header 'Content-Type: application/json' ${4:+--data "$4"} "$url$3") || got=none
  if [ "$got" = "$1" ]; then
    echo "ok      $2 $3 ($got)"
  else
    echo "FAILED  $2 $3: status $got, not $1: $(head -c 300 "$answer")"
    exit 1
  fi
}

# has TEXT: what the last answer must hold.
has() {
  grep -q -- "$1" "$answer" || { echo "FAILED  the answer has no $1: $(head -c 300 "$answer")"; exit 1; }
}

# dropped: entries that were dropped since the server started.
dropped() {
  awk '$1 ~ /^keepset:entries_dropped_total/ { sum += $2 } END { printf "%.0f", sum }' "$answer"
}

ask 200 GET /health
ask 200 GET /v1/models
model=$(grep -o '"id": *"[^"]*"' "$answer" | head -1 | cut -d '"' -f 4)
ask 200 GET /metrics
has '^keepset:recipe'
budget=200 # the status of a request with a budget of its own
grep -q '^keepset:recipe{recipe="none"}' "$answer" && budget=400
before=$(dropped)

ask 200 POST /v1/completions "{\"model\": \"$model\", \"prompt\": \"The capital of France is\", \"max_tokens\": 4, \"temperature\": 0}"
has '"text"'
# A prompt of some 250 tokens under a budget of 64 entries: most of it must be dropped, whatever the server's recipe. A
# server of contexts alone has none.
long=$(yes 'One line of a text that is long enough.' | head -25 | tr '\n' ' ')
ask "$budget" POST /v1/completions "{\"model\": \"$model\", \"prompt\": \"$long\", \"max_tokens\": 4, \"keepset\": {\"keep\": 64}}"
ask 400 POST /v1/completions "{\"model\": \"$model\", \"prompt\": \"Hello\", \"keepset\": {\"keep\": \"much\"}}"
ask 400 POST /v1/completions "{\"model\": \"$model\", \"prompt\": \"Hello\", \"keepset\": {\"context\": \"no such context\"}}"
ask 200 GET /v1/contexts
has '"refused"'

[ "$budget" = 200 ] || { echo "ok      the server compresses no prompts"; exit 0; }
# Counters are written by the engine's processes a moment later.
for _ in 1 2 3 4 5; do
  ask 200 GET /metrics
  [ "$(dropped)" -gt "$before" ] && { echo "ok      $(($(dropped) - before)) entries were dropped"; exit 0; }
  sleep 1
done
echo "FAILED  nothing was dropped of a prompt of 250 tokens under keep=64"
exit 1
