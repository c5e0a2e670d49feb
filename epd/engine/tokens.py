"""What the engine knows of a checkpoint's tokenizer: how many token ids it has."""

from pathlib import Path

from encoder.checkpoint import read_json_object


def count_token_ids(model_dir: Path) -> int | None:
    """One more than the largest id that tokenizer.json gives a token; None when the checkpoint has no such file.

    A vocabulary is padded to a round number of rows, and the rows beyond the tokenizer were never trained.
    Raises ValueError for a file that is no tokenizer.
    """
    path = model_dir / "tokenizer.json"
    if not path.exists():
        return None
    spec = read_json_object(path)
    try:
        ids: list[int] = [*spec["model"]["vocab"].values(), *(token["id"] for token in spec.get("added_tokens") or [])]
        return max(ids) + 1
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} of {model_dir.name} has no vocabulary: {error}") from error
