"""One box, prefill and decode on separate devices, one OpenAI endpoint.

The life of a request (prefill-first):

 1. vLLM's server and front end tokenise it          vllm_compat.build_async_llm
 2. it enters the node                               split_client.SplitClient.add_request_async
 3. where may token 1 be sampled?                    token1.decide
 4. which engines?                                   placement.place
 5. the prefill leg is sent                          journey.Journey.prefill_request
    when its turn comes                              turns.Turn, connector/prompt_order.next_pass
 6. P computes the prompt and offers its KV          connector/scheduler.SchedulerHalf.finished
 7. token 1 goes to the client, D gets the request   split_client.SplitClient._advance
 8. D finds the entry and asks for what it lacks     connector/scheduler.SchedulerHalf.match
 9. D's worker copies P's blocks into its own        connector/worker.WorkerHalf.load
10. D acknowledges, P gives its blocks back          connector/scheduler.SchedulerHalf.loaded,
                                                     .release_pins
11. D decodes to the end                             journey.Journey.on_output

Decode-first (--flow), D begins with 5: a follower copies     decode_first.DecodeFirst._follow,
each chunk that P has computed, and 8 finds less to ask for    connector/following.Following.step

Around it: config (argv -> NodeConfig), node (up, serve, down), engine (one engine core's life),
nursery (where CPU engines are forked from), rundir and reaper (nothing stays behind), selftest, warmup
and meter (how fast the engines are), status (what the node looks like from outside).

Imports go one way: launcher -> pdnode -> ipc.
"""
