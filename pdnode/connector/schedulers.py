"""vLLM's schedulers with prompts in the order of :mod:`pdnode.connector.prompt_order`.

vLLM is given their names (``SchedulerConfig.scheduler_cls``) and imports them in the engine.
"""

from pdnode.vllm_compat import prompts_in_order, scheduler_class

Scheduler = prompts_in_order(scheduler_class(asynchronous=False))
AsyncScheduler = prompts_in_order(scheduler_class(asynchronous=True))
