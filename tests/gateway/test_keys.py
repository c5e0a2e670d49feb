"""API keys: as texts, as digests, from a file that changes while it is used."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from epd.gateway.keys import ApiKeys, KeysUnusable


def digest(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def test_texts_and_digests() -> None:
    keys = ApiKeys(["one", digest("two")])
    assert keys.are_asked_for
    assert [keys.accepts(key) for key in (b"one", b"two", b"on", b"one ", b"", digest("two").encode())] == [
        *(True, True, False, False, False, False)
    ]
    assert not ApiKeys().are_asked_for


def test_a_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nfirst\n")
    keys = ApiKeys(["fixed"], file)
    assert keys.accepts(b"first")
    assert keys.accepts(b"fixed")
    replacement = tmp_path / "new"
    replacement.write_text(f"second\n{digest('third')}\n")
    os.replace(replacement, file)
    assert keys.accepts(b"first")
    keys.renew()
    assert [keys.accepts(key) for key in (b"first", b"second", b"third", b"fixed")] == [False, True, True, True]
    with caplog.at_level(logging.INFO):
        file.write_bytes(b"\xff\xfe")
        keys.renew()
        assert keys.accepts(b"second")
        file.unlink()
        keys.renew()
        keys.renew()
    assert keys.accepts(b"second")
    assert caplog.text.count("stay as they are") == 2
    file.write_text("")
    keys.renew()
    assert keys.accepts(b"second"), "a file that is written in place is empty for a moment"
    file.write_text("fourth\n")
    keys.renew()
    assert keys.accepts(b"fourth")
    file.write_text("")
    keys.renew()
    assert keys.accepts(b"fourth")
    caplog.clear()
    keys.renew()
    assert keys.are_asked_for
    assert not keys.accepts(b"fourth")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    caplog.clear()
    keys.renew()
    assert not caplog.records
    assert "second" not in caplog.text


@pytest.mark.parametrize("text", ["", "# nothing\n", "sha256:12\n", "a\x07b\n"])
def test_files_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(KeysUnusable) as caught:
        ApiKeys((), file)
    assert "a\x07b" not in str(caught.value)
    with pytest.raises(KeysUnusable, match="No such file"):
        ApiKeys((), tmp_path / "absent")


@pytest.mark.parametrize("key", ["", " ", " a", "a\n", "sha256:xyz", "SHA256:xyz", "Sha256:"])
def test_keys_that_cannot_be_used(key: str) -> None:
    with pytest.raises(KeysUnusable, match=r"key 2 of gateway\.api_keys"):
        ApiKeys(["good", key])


def test_the_name_of_the_digest_in_any_case() -> None:
    for name in ("sha256", "SHA256", "Sha256"):
        given = f"{name}:{hashlib.sha256(b'two').hexdigest().upper()}"
        keys = ApiKeys([given])
        assert keys.accepts(b"two")
        assert not keys.accepts(given.encode())
