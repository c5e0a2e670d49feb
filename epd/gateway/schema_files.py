"""The shapes of `/v1/files`: OpenAI's."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from epd.gateway.files import Purpose, StoredFile
from epd.gateway.shape import Shape


class UploadForm(Shape):
    """The text fields of an upload; `file` is the file. Their values are text, as in every form."""

    purpose: Purpose
    expires_after_anchor: Literal["created_at"] | None = Field(default=None, alias="expires_after[anchor]")
    expires_after_seconds: str | None = Field(default=None, alias="expires_after[seconds]")


class FileObject(BaseModel):
    """A file that is kept."""

    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: StoredFile) -> "FileObject":
        return cls(
            id=file.id,
            bytes=file.size_bytes,
            created_at=file.created_unix_s,
            expires_at=file.expires_unix_s,
            filename=file.filename,
            purpose=file.purpose,
        )


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
