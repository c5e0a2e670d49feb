"""The engine: one worker's loop over continuous batches. Import the submodule that is wanted; most of them load torch.

loop.py       the step: receive -> admit -> plan -> run -> commit -> reply
scheduler.py  decides what runs next, and alone moves a Sequence
runner.py     a StepPlan to a StepResult: model, KV pages, sampler
handoff.py    KV from prefill to decode
worker.py     a process around the loop
"""
