"""How many token ids a checkpoint's tokenizer has."""

import json
from pathlib import Path

import pytest

from epd.engine.tokens import count_token_ids


def test_added_tokens_count(tmp_path: Path) -> None:
    assert count_token_ids(tmp_path) is None
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    assert count_token_ids(tmp_path) == 2
    path.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 6, "content": "<x>"}]}))
    assert count_token_ids(tmp_path) == 7
    for content in ("{}", "[]", '{"model": {"vocab": []}}', '{"model": {"vocab": {}}}', "no JSON"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"vocabulary|Expecting|empty|iterable|no JSON object"):
            count_token_ids(tmp_path)
