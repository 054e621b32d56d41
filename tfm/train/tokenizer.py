"""Training the byte-level BPE tokenizer of a family."""

from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from tfm.tokenizer import SPECIAL_TOKENS, TextTokenizer

VOCAB_SIZE = 2048

# letters with one leading space, apostrophe or underscore; single digits; punctuation with the line ends behind it;
# line ends; indentation, whose last blank goes with the word that follows
PIECES = r"[ '_]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> TextTokenizer:
    """Train byte-level BPE on `texts`; ids 0 to 5 are SPECIAL_TOKENS, then the 256 bytes, then the merges.

    Deterministic in the multiset of texts. Raises ValueError when the text yields fewer than `vocab_size` tokens.
    """
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise ValueError(f"vocab_size: {vocab_size} is not allowed (allowed: at least {smallest}); raise vocab_size")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size: {vocab_size} is more than the text supports ({tokenizer.get_vocab_size()}); "
            "give more training text or lower vocab_size"
        )
    return TextTokenizer(tokenizer.to_str(pretty=False))
