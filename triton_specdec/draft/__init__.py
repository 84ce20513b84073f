"""Who proposes: a smaller model, or a look-up in the text itself."""

from .model import ModelDraft
from .prompt_lookup import PromptLookupDraft
from .proposal import Draft, Proposal

__all__ = ["Draft", "ModelDraft", "PromptLookupDraft", "Proposal"]
