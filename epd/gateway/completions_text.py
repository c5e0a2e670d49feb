"""`POST /v1/completions`: see `text.py`, and `exchange.py` for what is common to all generated text."""

from aiohttp import web

from epd.gateway.account import Account
from epd.gateway.answer_shapes_text import TextCompletion
from epd.gateway.detokenize import Detokenizer
from epd.gateway.examples import COMPLETION
from epd.gateway.exchange import Exchange, Started, style_of
from epd.gateway.operations import Answer, Operation
from epd.gateway.reply_text import TextWriter
from epd.gateway.schema_completion import CompletionBody
from epd.gateway.text import TextService


class TextCompletions:
    """Everything shared is handed in."""

    def __init__(self, exchange: Exchange, *, text: TextService) -> None:
        self._exchange = exchange
        self._text = text

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation(
                method="POST",
                path="/v1/completions",
                handler=self.completions,
                tag="chat",
                summary="Continue a text",
                description="The text is the whole prompt: no chat template is used, and the spelling of a special "
                "token is that token.",
                request=CompletionBody,
                examples=COMPLETION,
                responses={
                    200: Answer(
                        description="The text, whole or as a stream of events",
                        shape=TextCompletion,
                        events=TextCompletion,
                    )
                },
                errors=(404, 429, 504),
            ),
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._exchange.serve(request, CompletionBody, self._start, id_prefix="cmpl-")

    def _start(self, body: CompletionBody, account: Account) -> Started:
        chat = self._text.chat
        account.num_choices = len(body.prompts) * body.num_choices
        style = style_of(
            body,
            num_choices=account.num_choices,
            with_logprobs=body.logprobs is not None,
            system_fingerprint=chat.system_fingerprint,
        )
        writer = TextWriter(
            account=account,
            created_unix_s=int(account.arrival_unix_s),
            vocabulary=chat.renderer.vocabulary,
            style=style,
            echoes=[self._echo(body, prompt) for prompt in body.prompts for _ in range(body.num_choices)],
            shows_hidden=body.skip_special_tokens is False,
        )
        return Started(self._text.answer(body, account), writer)

    def _echo(self, body: CompletionBody, prompt: str | list[int]) -> str:
        """What the choices of a prompt begin with. Of ids, what an answer of them would show."""
        if not body.echo or isinstance(prompt, str):
            return prompt if body.echo and isinstance(prompt, str) else ""
        tokens = self._text.chat.renderer.vocabulary.token_bytes
        detokenizer = Detokenizer(tokens, shows_hidden=body.skip_special_tokens is False)
        return detokenizer.push(prompt) + detokenizer.close()
