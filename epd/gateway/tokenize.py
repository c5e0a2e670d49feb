"""`POST /tokenize` and `POST /detokenize`: what a prompt is in tokens, as the two ways to ask for text read it."""

import asyncio
from typing import Any

from aiohttp import web

from epd.config import GatewayConfig
from epd.errors import InvalidRequest
from epd.gateway.admission import Admission
from epd.gateway.answer_shapes_text import Detokenized, Tokenized
from epd.gateway.body import BodyReader
from epd.gateway.chat import ChatService
from epd.gateway.conversation import read_conversation
from epd.gateway.examples import DETOKENIZE, TOKENIZE
from epd.gateway.operations import Answer, Operation
from epd.gateway.schema import ChatBody
from epd.gateway.schema_completion import DetokenizeBody, TokenizeBody
from epd.gateway.text import encode_text
from epd.gateway.validation import read_body, unknown_model


class TokenizerRoutes:
    """Everything shared is handed in. All work is done on threads: texts may be long."""

    def __init__(self, config: GatewayConfig, *, chat: ChatService, admission: Admission, bodies: BodyReader) -> None:
        self._config = config
        self._chat = chat
        self._admission = admission
        self._bodies = bodies

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation(
                method="POST",
                path="/tokenize",
                handler=self.tokenize,
                tag="chat",
                summary="The tokens of a text or of a conversation",
                request=TokenizeBody,
                examples=TOKENIZE,
                responses={200: Answer(description="The tokens", shape=Tokenized)},
                errors=(404, 429),
            ),
            Operation(
                method="POST",
                path="/detokenize",
                handler=self.detokenize,
                tag="chat",
                summary="The text of tokens",
                request=DetokenizeBody,
                examples=DETOKENIZE,
                responses={200: Answer(description="The text", shape=Detokenized)},
                errors=(404, 429),
            ),
        )

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        async with self._admission.session():
            self._admission.check()
            raw = await self._bodies.read(request)
            with self._admission.place():
                return web.json_response(await asyncio.to_thread(self._tokenize, raw))

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        async with self._admission.session():
            self._admission.check()
            raw = await self._bodies.read(request)
            with self._admission.place():
                return web.json_response(await asyncio.to_thread(self._detokenize, raw))

    def _tokenize(self, raw: bytearray) -> dict[str, Any]:
        body = read_body(raw, TokenizeBody, self._config)
        self._check_model(body.model)
        token_ids = self._of_messages(body) if body.prompt is None else self._of_prompt(body.prompt, body)
        vocabulary = self._chat.renderer.vocabulary
        spelled = [vocabulary.spell([token_id]).decode("utf-8", "replace") for token_id in token_ids]
        return {
            "count": len(token_ids),
            "max_model_len": self._chat.max_context_tokens,
            "tokens": token_ids,
            "token_strs": spelled if body.return_token_strs else None,
        }

    def _of_prompt(self, prompt: str, body: TokenizeBody) -> list[int]:
        if not prompt:
            return []
        return encode_text(self._chat, prompt, param="prompt", add_special=body.add_special_tokens is not False)

    def _of_messages(self, body: TokenizeBody) -> list[int]:
        """Of text only: how many tokens a medium takes is known when it is encoded."""
        assert body.messages is not None, "the shape asks for one of both"
        renderer = self._chat.renderer
        chat = ChatBody(
            model=self._config.model_name,
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        conversation = read_conversation(chat, renderer.vocabulary.guard)
        if conversation.media:
            param = conversation.media[0].param
            raise InvalidRequest(
                f"{param} is a medium; /tokenize takes text only: the tokens of media are known when they are encoded",
                param=param,
            )
        return list(renderer.assemble(renderer.render(conversation), []).token_ids)

    def _detokenize(self, raw: bytearray) -> dict[str, Any]:
        body = read_body(raw, DetokenizeBody, self._config)
        self._check_model(body.model)
        vocabulary = self._chat.renderer.vocabulary
        for i, token_id in enumerate(body.tokens):
            if token_id >= vocabulary.num_token_ids:
                raise InvalidRequest(
                    f"tokens[{i}] is {token_id}; allowed: 0 to {vocabulary.num_token_ids - 1}, the ids of this "
                    "model's tokens",
                    param=f"tokens[{i}]",
                )
        return {"prompt": vocabulary.spell(body.tokens).decode("utf-8", "replace")}

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._config.model_name):
            raise unknown_model(str(model), self._config)
