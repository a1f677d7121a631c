"""The node as a LangChain chat model.

    python examples/langchain_chat.py [http://127.0.0.1:8000]

Needs: pip install langchain-openai
"""

from __future__ import annotations

import os
import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
model = ChatOpenAI(
    base_url=f"{url}/v1",
    api_key=os.environ.get("VLLM_API_KEY", "none"),
    # The embedded model's name; GET /v1/models lists what your node serves.
    model=os.environ.get("MODEL", "SmolLM2-135M-Instruct"),
    temperature=0,
    max_tokens=60,
)
prompt = ChatPromptTemplate.from_messages(
    [("system", "Answer in one short sentence."), ("user", "{question}")]
)
for piece in (prompt | model).stream({"question": "What is the capital of France?"}):
    print(piece.content, end="", flush=True)
print()
