"""Which session a request belongs to: prompts of one session probably begin alike, and their KV is stored together.

A client may say so with `prompt_cache_key`. Else a conversation is known by how it begins, which later turns repeat.
"""

from xxhash import xxh3_128

from epd.gateway.schema import ChatBody
from epd.gateway.schema_parts import UserMessage


def session_of(body: ChatBody) -> str:
    """`prompt_cache_key`, or 32 hexadecimal digits of the model and the messages up to the first of the user.

    It decides where KV is looked for, never what KV is used: sessions that meet by chance only share a place.
    """
    if body.prompt_cache_key:
        return body.prompt_cache_key
    digest = xxh3_128(body.model.encode())
    for message in body.messages:
        _feed(digest, message.model_dump(exclude_none=True))
        if isinstance(message, UserMessage):
            break
    return digest.hexdigest()


def _feed(digest: xxh3_128, value: object) -> None:
    """A JSON value, each piece after its kind and length so that no two values read alike."""
    match value:
        case dict():
            digest.update(b"{%d" % len(value))
            for key, item in value.items():
                _feed(digest, key)
                _feed(digest, item)
        case list():
            digest.update(b"[%d" % len(value))
            for item in value:
                _feed(digest, item)
        case str():
            content = value.encode()
            digest.update(b'"%d:' % len(content))
            digest.update(content)
        case _:
            _feed(digest, repr(value))
