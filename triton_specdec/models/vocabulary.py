"""Whether a draft speaks the target's language: drafted tokens are ids, so both must mean the same by them."""

from __future__ import annotations

from .protocol import Model


def check_same_ids(target: Model, draft: Model) -> None:
    """Raise ValueError where the two models' ids differ, as far as can be seen.

    With two tokenizers, every id that both hold must be the same token. Without, a draft with more ids than the target
    is refused: it was trained with others.
    """
    ours, theirs = (_vocabulary(model) for model in (target, draft))
    if ours is None or theirs is None:
        if draft.vocab_size > target.vocab_size:
            raise ValueError(
                f"the draft's vocabulary ({draft.vocab_size}) exceeds the target's ({target.vocab_size}): if both "
                "share a tokenizer and one is padded, give both models that tokenizer, or the number of its ids as "
                "vocab_size"
            )
        return
    names = {index: token for token, index in ours.items()}
    different = sorted((i, t) for t, i in theirs.items() if i < draft.vocab_size and names.get(i, t) != t)
    if different:
        index, token = different[0]
        raise ValueError(
            f"target and draft have different tokenizers: id {index} is {names.get(index)!r} for the target and "
            f"{token!r} for the draft ({len(different)} ids differ). Drafts are token ids, so take a draft of the "
            "target's family, or draft='prompt_lookup'"
        )


def _vocabulary(model: Model) -> dict[str, int] | None:
    """Token to id of a model's tokenizer, where it has one."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary
