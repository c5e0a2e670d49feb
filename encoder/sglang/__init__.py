"""The encoder in the dialect of SGLang 0.5.23: its language-only servers take it for one of their own.

    POST /encode                  one part of a request: fetch, encode, push the rows to whoever waits for them
    POST /scheduler_receive_url   a rank says where it listens
    PUSH sockets                  one header frame and one frame of rows per destination

Loads no torch and nothing of SGLang. What is written as a pickle is spelled out in `encoder.sglang.pickles`; nothing
that comes from outside is ever given to an unpickler.
"""
