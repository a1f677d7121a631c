"""A stream through the OpenAI client, and where its time went.

    python examples/openai_client.py [http://127.0.0.1:8000]

Needs: pip install openai
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = os.environ.get("VLLM_API_KEY", "none")
client = OpenAI(base_url=f"{url}/v1", api_key=key)
model = client.models.list().data[0].id

answer = client.chat.completions.with_raw_response.create(
    model=model,
    messages=[{"role": "user", "content": "Name three rivers in Europe."}],
    max_tokens=60,
    temperature=0,
    stream=True,
)
for chunk in answer.parse():
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

# The node remembers: which engines, how long each phase took.
request = urllib.request.Request(
    f"{url}/pd/requests/{answer.headers['x-request-id']}",
    headers={"authorization": f"Bearer {key}"},
)
with urllib.request.urlopen(request) as said:
    life = json.load(said)["requests"][0]
print(f"prefill on {life['prefill']}, decode on {life['decode']} ({life['reason']})")
print("time to first token, ms:", life["ttft"])
