"""What one API key has here besides its request: the files it uploaded, and the media it may ask for by name."""

import asyncio
from dataclasses import dataclass

from epd.errors import InvalidRequest, ServeError, UnknownFile, UnknownMedia
from epd.gateway.files import FileStore
from epd.gateway.media_shelf import MediaShelf, Shelved
from epd.gateway.problems import Refused, problem_of
from epd.gateway.validation import shown
from preprocess.errors import MediaError, MediaUnsupported
from preprocess.local import decode_data_url
from preprocess.recognise import modality_of
from preprocess.sniff import sniff
from preprocess.types import MediaKey, MediaOptions, Modality


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Of the API key `owner`. `files` is None where the server keeps none; media have at most `max_bytes`."""

    owner: str
    files: FileStore | None
    shelf: MediaShelf
    max_bytes: int

    def kind_of_file(self, file_id: str, param: str) -> Modality:
        """What a file is. Blocks. Raises ServeError naming `param`: no such file, or it is no medium."""
        try:
            file = self._files(param).get(self.owner, file_id)
        except UnknownFile as error:
            raise UnknownFile(f"{param}: {error.message}", param=param) from error
        if file.modality is None:
            raise _no_medium(f"the file {file_id}", param)
        return file.modality

    async def file(self, file_id: str, param: str) -> bytes:
        """The content of a file. Raises ServeError naming `param`."""
        files = self._files(param)
        try:
            return await asyncio.to_thread(files.read, self.owner, file_id, max_bytes=self.max_bytes)
        except ServeError as error:
            raise type(error)(f"{param}: {error.message}", param=param) from error

    def inline(self, data: str, param: str) -> tuple[bytes, Modality]:
        """The content of a data: URL or of bare base64, and what it is. Blocks. Raises Refused naming `param`."""
        head = data[:16].lower()
        if head.startswith(("http:", "https:", "file:")):
            raise InvalidRequest(f"{param} is a URL; allowed: base64, or a data: URL", param=param)
        try:
            content = decode_data_url(data if head.startswith("data:") else f"data:;base64,{data}", self.max_bytes)
        except MediaError as error:
            raise Refused(problem_of(error, param=param)) from error
        modality = modality_of(content)
        if modality is None:
            raise _no_medium(f"the content ({sniff(content)})", param)
        return content, modality

    def named(self, *, uuid: str | None, key: MediaKey | None) -> Shelved | None:
        """The medium that a key, or else a uuid, stands for; None when it is not on the shelf."""
        found = None if key is None else self.shelf.by_key(self.owner, key)
        return found if found is not None or uuid is None else self.shelf.by_uuid(self.owner, uuid)

    def remember(
        self, content: bytes, modality: Modality, options: MediaOptions, *, uuid: str | None, key: MediaKey
    ) -> None:
        """Put a medium on the shelf: a uuid means from now on what came with it last."""
        self.shelf.put(self.owner, Shelved(content, modality, options), uuid=uuid, key=key)

    def _files(self, param: str) -> FileStore:
        if self.files is None:
            raise InvalidRequest(f"{param} names a file; this server keeps none (gateway.files_bytes)", param=param)
        return self.files


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """Those of all API keys."""

    files: FileStore | None
    shelf: MediaShelf
    max_bytes: int

    def of(self, owner: str) -> Library:
        return Library(owner=owner, files=self.files, shelf=self.shelf, max_bytes=self.max_bytes)


def unknown_media(*, uuid: str | None, key: str | None, path: str) -> UnknownMedia:
    """Naming the field that was to be known."""
    name = "key" if key is not None else "uuid"
    param = f"{path}.{name}"
    return UnknownMedia(
        f"{param} is {shown(key or uuid)}; nobody here has that medium (any more): send its content", param=param
    )


def _no_medium(what: str, param: str) -> Refused:
    error = MediaUnsupported(f"{what} is no picture, video or sound")
    return Refused(problem_of(error, param=param))
