"""`POST /v1/chat/completions`. What is common to all generated text is told in `exchange.py`, what happens between body
and answer in `chat.py`."""

from aiohttp import web

from epd.gateway.account import Account
from epd.gateway.answer_shapes import ChatCompletion, ChatCompletionChunk
from epd.gateway.chat import ChatService
from epd.gateway.examples import CHAT
from epd.gateway.exchange import Exchange, Started, style_of
from epd.gateway.operations import MEDIA_ERRORS, Answer, Operation
from epd.gateway.reply import ChatWriter
from epd.gateway.schema import ChatBody


class ChatCompletions:
    """Everything shared is handed in."""

    def __init__(self, exchange: Exchange, *, chat: ChatService) -> None:
        self._exchange = exchange
        self._chat = chat

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation(
                method="POST",
                path="/v1/chat/completions",
                handler=self.chat_completions,
                tag="chat",
                summary="Answer a conversation",
                request=ChatBody,
                examples=CHAT,
                responses={
                    200: Answer(
                        description="The answer, whole or as a stream of events",
                        shape=ChatCompletion,
                        events=ChatCompletionChunk,
                    )
                },
                errors=(*MEDIA_ERRORS, 429),
            ),
        )

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._exchange.serve(request, ChatBody, self._start, id_prefix="chatcmpl-")

    def _start(self, body: ChatBody, account: Account) -> Started:
        style = style_of(
            body,
            num_choices=body.num_choices,
            with_logprobs=bool(body.logprobs),
            system_fingerprint=self._chat.system_fingerprint,
        )
        writer = ChatWriter(
            account=account,
            created_unix_s=int(account.arrival_unix_s),
            vocabulary=self._chat.renderer.vocabulary,
            style=style,
        )
        return Started(self._chat.answer(body, account), writer)
