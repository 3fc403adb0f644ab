# One predictor, two servers and an unmodified router on one machine; then one server is killed under
# load and comes back. Needs smg: pip install smg==1.13.0. MODEL is a model's folder or name.
# `python -m tests.checks.two_servers --smg PATH` runs these steps with a small model.

# 1. Start the predictor and two servers (with GPUs the second one needs --base-gpu-id).
cat > sage.toml <<EOF
[predictor]
service = "~/.cache/sage-sched/predictor.socket"
EOF

sage-sched predictor serve > predictor.log 2>&1 &
until [ -S ~/.cache/sage-sched/predictor.socket ]; do sleep 1; done
sage-sched serve --model-path MODEL --port 30001 --enable-metrics --sage-config sage.toml > 30001.log 2>&1 &
sage-sched serve --model-path MODEL --port 30002 --enable-metrics --sage-config sage.toml > 30002.log 2>&1 &
second=$!
for port in 30001 30002; do
    until curl -sf http://127.0.0.1:$port/health; do sleep 1; done
done

# 2. Start the router.
smg launch --policy least_load --load-monitor-interval 1 --port 30000 \
    --disable-worker-overload-protection --worker-wedge-secs 60 --health-check-interval-secs 5 \
    --worker-urls http://127.0.0.1:30001 http://127.0.0.1:30002 > smg.log 2>&1 &
until curl -sf http://127.0.0.1:30000/readiness; do sleep 1; done

# 3. Send 16 requests at a time; every other one is a stream.
mkdir answers
ask() {
    [ $(($1 % 2)) = 0 ] && stream=true || stream=false
    began=$(date +%s.%N)
    said=$(curl -s -o answers/$1 -w '%{http_code} %{exitcode}' http://127.0.0.1:30000/generate \
        -H 'Content-Type: application/json' -d '{"text": "Question '$1': why is the sky blue?",
        "stream": '$stream', "sampling_params": {"max_new_tokens": 20, "ignore_eos": true}}') || true
    [ "$said" = "200 0" ] && ! grep -q '"error"' answers/$1 && came=whole || came=lost
    echo $1 $began $said $came
    [ $came = whole ] || sleep 1
}
export -f ask
seq 100000 | xargs -P 16 -I{} bash -c '[ -e enough ] && exit 255; ask {}' > statuses.txt 2> /dev/null &
load=$!

# 4. Read the predicted work of a server, and the number that smg reads.
curl -s http://127.0.0.1:30001/metrics | grep backlog_seconds
curl -s http://127.0.0.1:30001/v1/loads | grep -o '"num_waiting_uncached_tokens":[0-9]*'

# 5. Kill one server.
date +%s.%N > killed.txt
kill -9 $second

# 6. Start it again.
sage-sched serve --model-path MODEL --port 30002 --enable-metrics --sage-config sage.toml > 30002.log 2>&1 &
until curl -sf http://127.0.0.1:30002/health; do sleep 1; done

# 7. Stop, and count the answers by HTTP status, curl's exit status and completeness.
touch enough
wait $load || true
cut -d ' ' -f 3- statuses.txt | sort | uniq -c
