"""Decoding in worker processes, for `preprocess.pool.DecodePool` with `isolation = "processes"`. Linux only.

    media          one medium that is open in a worker, as the pool sees it
    nursery        starts, keeps and replaces workers
    worker         one worker, as the pool sees it
    child          what runs in the processes themselves
    wire           the messages between them
    shared_arrays  the memory between them
    mapping        how it is mapped

Whatever happens in a worker ends as a MediaError for the one medium it worked on:

    raises MediaError          the same error in the pool; the worker goes on
    past its deadline          killed half a second later, should it not notice by itself: MediaDecodeTimeout
    over its memory ceiling    killed, or refused by the kernel: MediaTooLarge
    killed by someone else     tried once more in another worker, unless parts of it were handed over; the second time
                               MediaTooLarge, as that is what a machine does that runs out of memory
    dies, or raises otherwise  DecoderCrashed

Want of descriptors or shared memory is no fault of a medium: DecoderUnavailable.
"""
