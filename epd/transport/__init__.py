"""How messages travel between gateway and workers: ZMQ sockets, or their in-process twins with the same behaviour.

base.py      the contract: Endpoint (a worker's side), Channel (the gateway's side), Peer, Received
sockets.py   WorkerEndpoint and WorkerChannel over ipc:// and tcp://
memory.py    MemoryNetwork: both sides in one process, messages passed as objects
rows.py      embedding rows of encoders on other hosts, as raw frames
codec.py     which message family each side decodes
frames.py    torch tensors to wire frames and back; the only file here that imports torch
"""
