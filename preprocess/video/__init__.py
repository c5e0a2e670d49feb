"""Video bytes to chosen frames, cut into parts of patches.

    index     one pass over the packets, no decoding
    opened    which frames, which size; the way of decoding
    plan      which packets are needed, cut into tasks (pure); `bitstream` proves where decoding can start
    planned   several decoders at work on the tasks; `references` tells which pictures of H.264 they can leave out
    scan      frames by decoding from the start, where no plan can be trusted
    torchcodec, decord  other libraries that may be chosen; `guests` says which files they get, `look` what a first
              frame must look like, `backends` whether they work here
    animation frames of an animated WebP
    parts     frames to parts, with back pressure

Memory is the parts in flight plus a handful of decoder frames; frames that are not chosen are never converted to RGB.
"""

from preprocess.video.index import VideoIndex, read_index
from preprocess.video.opened import OpenVideo, VideoChanged, open_video
from preprocess.video.scan import Emit, FewerFrames, scan

__all__ = ["Emit", "FewerFrames", "OpenVideo", "VideoChanged", "VideoIndex", "open_video", "read_index", "scan"]
