"""The tokenizer that every part uses, and the chat template of a prompt.

Text and tags are encoded apart. `encode` treats its argument as plain text: a prompt that spells `<|mask|>` becomes
ordinary byte-pair tokens, never the mask's id, so a user's words cannot forge a turn or a mask. The tags of the chat
template are added as ids by `encode_parts`, which takes text (str) and tag ids (int) side by side. For text that
spells no tag the result equals encoding the whole raw string with the tags parsed, which is what the paper's
protocol sends to a server.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END, MASK = "<think>", "</think>", "<|mask|>"
QWEN3, SMOLLM2 = "qwen3", "smollm2"  # chat styles: how a turn becomes a prompt
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # its template's own
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, THINK_START, THINK_END, MASK)  # ids 0 to 5

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n') }}"
    "{%- endif -%}"
)


class TextTokenizer:
    """A tokenizer whose `encode` never yields a special id. Build it with `load_tokenizer` or `train_tokenizer`."""

    def __init__(self, definition: str, *, style: str = QWEN3):
        """`definition`: the text of a tokenizer.json."""
        self.definition, self.style = definition, style
        fields = json.loads(definition)
        # some public vocabularies list <think> as an ordinary added token; all of them must be inert in plain text
        for token in fields.get("added_tokens", ()):
            token["special"] = True
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
        self._tokenizer.encode_special_tokens = True
        self.special_ids = {token["content"]: token["id"] for token in fields.get("added_tokens", ())}

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    @property
    def eos_id(self) -> int:
        """The id that ends an assistant turn, <|im_end|>."""
        return self.tag(TURN_END)

    @property
    def mask_id(self) -> int:
        return self.tag(MASK)

    def tag(self, name: str) -> int:
        """Return the id of special token `name`, or raise ValueError with the names there are."""
        if name not in self.special_ids:
            allowed = ", ".join(sorted(self.special_ids)) or "none"
            raise ValueError(
                f"special token: {name!r} is not in this tokenizer (it has: {allowed}); "
                "use a tokenizer with Qwen's chat tags, or take the id from the model's config"
            )
        return self.special_ids[name]

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; the spelling of a special token in it stays text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Return the ids of text (str) and tag ids (int) in order; each str is encoded by itself."""
        tokens: list[int] = []
        for part in parts:
            if isinstance(part, str):
                tokens.extend(self.encode(part))
            else:
                tokens.append(part)
        return tokens

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, computed on all cores; equal to `encode` one by one."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, tags spelled out; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def vocab_sha256(self) -> str:
        """Return the sha256 of the id -> token map, which tells tokenizers of one size apart."""
        by_id = sorted((index, token) for token, index in self._tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(by_id, ensure_ascii=False).encode()).hexdigest()

    def save(self, directory: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json, loadable by AutoTokenizer."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        names = {"eos_token": TURN_END, "pad_token": END_OF_TEXT, "mask_token": MASK}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
            "additional_special_tokens": [TURN_START, THINK_START, THINK_END],
            "chat_template": CHAT_TEMPLATE,
            **names,
        }
        (directory / "tokenizer.json").write_text(self.definition, encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (directory / "special_tokens_map.json").write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


def load_tokenizer(directory: Path | str) -> TextTokenizer:
    """Return the tokenizer of a model directory (its tokenizer.json).

    A `chat_style` in its tokenizer_config.json says how prompts are made; Qwen3's way unless given. Raises ValueError
    when the file is missing or is no tokenizer, or for an unknown style, with the path and the remedy.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"tokenizer: {str(path)!r} does not exist; give the directory of a model in Hugging Face format, "
            "or train one with `python -m tfm.train.text --train-data DIR --out DIR`"
        )
    style = _chat_style(path.with_name("tokenizer_config.json"))
    try:
        return TextTokenizer(path.read_text(encoding="utf-8"), style=style)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(
            f"tokenizer: {str(path)!r} is not a tokenizer.json ({error}); restore or retrain it"
        ) from error


def _chat_style(path: Path) -> str:
    try:
        style = json.loads(path.read_text(encoding="utf-8")).get("chat_style", QWEN3) if path.is_file() else QWEN3
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: is no JSON object ({error}); restore it, or download it again") from error
    if style not in (QWEN3, SMOLLM2):
        raise ValueError(f"{path}: chat_style {style!r} is not allowed (allowed: {QWEN3}, {SMOLLM2}); leave it out")
    return style


def check_same_vocabulary(name: str, first: TextTokenizer, other_name: str, other: TextTokenizer) -> None:
    """Raise ValueError, naming both, unless two tokenizers map every id to the same token."""
    if first.vocab_sha256() == other.vocab_sha256():
        return
    sizes = f"{first.vocab_size} and {other.vocab_size} tokens"
    ours, theirs = (t._tokenizer.get_vocab(with_added_tokens=True) for t in (first, other))
    differing = sorted({index for _, index in ours.items() ^ theirs.items()})
    raise ValueError(
        f"tokenizer: {name!r} and {other_name!r} ({sizes}) differ, first at ids {differing[:10]}; "
        "target and drafter must share one vocabulary, use a matching pair"
    )


def check_folder_tokenizers(folders: dict[str, Path | str]) -> None:
    """Raise ValueError, naming both folders, when a part comes with another vocabulary than the target's.

    `folders` maps parts to checkpoint folders, target among them; a part without a tokenizer.json uses the target's.
    """
    target = load_tokenizer(folders["target"])
    for part, folder in folders.items():
        if part != "target" and (Path(folder) / "tokenizer.json").is_file():
            check_same_vocabulary(str(folders["target"]), target, str(folder), load_tokenizer(folder))


def end_tokens(folder: Path | str, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Return the ids that end an answer: <|im_end|>, then those of the model's generation_config.json, as servers do.

    Raises ValueError when that file holds something else than ids.
    """
    path = Path(folder) / "generation_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: is no JSON object ({error}); restore it, or download it again") from error
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"{path}: eos_token_id {found!r} is not allowed (allowed: an id or a list of ids)")
    return tuple(dict.fromkeys([tokenizer.eos_id, *ids]))


def answer_opening(*, reasoning: bool) -> list[str]:
    """Return what follows `<|im_start|>assistant\\n`: an empty think block, or an opened one."""
    return [THINK_START, "\n"] if reasoning else [THINK_START, "\n\n", THINK_END, "\n\n"]


def prompt_parts(turn: str, *, reasoning: bool, style: str = QWEN3) -> list[str]:
    """Return one user turn up to where the answer starts, tags and text apart.

    Qwen3's style has no system turn, as in the paper's protocol; SmolLM2's has its template's own and no think block.
    Raises ValueError for reasoning in a style without think blocks.
    """
    user = [TURN_START, "user\n" + turn, TURN_END, "\n", TURN_START, "assistant\n"]
    if style == QWEN3:
        return [*user, *answer_opening(reasoning=reasoning)]
    if reasoning:
        raise ValueError(f"reasoning: True is not allowed with chat style {style} (allowed: False); it has no <think>")
    return [TURN_START, "system\n" + SMOLLM2_SYSTEM, TURN_END, "\n", *user]


def encode_prompt(tokenizer: TextTokenizer, turn: str, *, reasoning: bool) -> list[int]:
    """Return the ids of `prompt_parts` in the tokenizer's style; `turn` is plain text."""
    parts = prompt_parts(turn, reasoning=reasoning, style=tokenizer.style)
    return tokenizer.encode_parts([_as_tag(tokenizer, part) for part in parts])


def prompt_text(turn: str, *, reasoning: bool, style: str = QWEN3) -> str:
    """Return the raw text of `encode_prompt`, as a server would be sent it."""
    return "".join(prompt_parts(turn, reasoning=reasoning, style=style))


def _as_tag(tokenizer: TextTokenizer, part: str) -> str | int:
    return tokenizer.tag(part) if part in (TURN_START, TURN_END, THINK_START, THINK_END) else part
