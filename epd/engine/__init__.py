"""The engine: one worker's loop over continuous batches. Import the submodule that is wanted; most of them load torch.

loop.py       the step: receive -> admit -> plan -> run -> commit -> reply
scheduler.py  decides what runs next, and alone moves a Sequence; roster.py is where they are and how they end,
              queue.py the waiting line, admission.py what is never taken, healing.py where a prompt resumes
feed.py       embedding rows on their way to the steps that read them, row_source.py where they come from, line.py who
              waits for them
runner.py     a StepPlan to a StepResult: model, KV pages, sampler
handoff.py    KV from prefill to decode; desk.py joins it with what the gateway announced
worker.py     a process, or a thread, around the loop
"""
