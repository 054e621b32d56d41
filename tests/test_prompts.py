"""Tokenizer, training text, subsets, templates and skips."""

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm.pins import load_pins
from tfm.prompt_sources import load_prompt_set
from tfm.prompts import (
    Preparation,
    PromptRow,
    category_quotas,
    prepare,
    read_prepared,
    render,
    select,
    subsample_key,
    template_id,
    template_sha256,
)
from tfm.tokenizer import SPECIAL_TOKENS, check_same_vocabulary, encode_prompt, load_tokenizer, prompt_text
from tfm.train.text import (
    TokenisedText,
    balanced_sample,
    encode_conversation,
    iter_training_rows,
    tokenise_directory,
    tokenise_rows,
    training_files,
    training_manifest,
)
from tfm.train.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "workflows" / "config" / "datasets.yaml"
TARGET = ROOT / "tfm" / "weights" / "nano" / "target"
TINY = ROOT / "tfm" / "data" / "tiny-train.jsonl"
SAMPLES = ("sample-chat", "sample-math", "sample-code")
ROOMY = Preparation(max_new_tokens=48, context=2048)

TOKENIZER = load_tokenizer(TARGET)
ALL_PINS = load_pins(PINS)


def row(turn="What is 2 + 2?", index=0, **fields) -> PromptRow:
    values = {"id": f"set/{index}", "index": index, "dataset": "set", "domain": "math", "turns": (turn,)} | fields
    return PromptRow(**values)


# tokenizer


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_survives_encode_and_decode(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*SPECIAL_TOKENS, "user\n", " ", "<|", "mask|>", "é", "7"]), max_size=8))
def test_text_that_spells_tags_never_becomes_a_special_id(pieces):
    text = "".join(pieces)
    tokens = TOKENIZER.encode(text)
    assert not set(tokens) & set(TOKENIZER.special_ids.values())
    assert TOKENIZER.decode(tokens) == text


def test_vocabulary_is_2048_with_the_tags_first_and_digits_apart():
    assert TOKENIZER.vocab_size == 2048
    assert [TOKENIZER.special_ids[name] for name in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert len(TOKENIZER.encode("1234567890")) == 10
    assert (TARGET / "tokenizer.json").stat().st_size < 130_000


def test_training_on_the_same_text_in_another_order_gives_the_same_tokenizer():
    texts = balanced_sample(iter_training_rows(TINY), 100_000)
    assert train_tokenizer(texts, 400).definition == train_tokenizer(texts[::-1], 400).definition


def test_too_little_text_for_the_vocabulary_is_an_error():
    with pytest.raises(ValueError, match="vocab_size: 2048 .*give more training text"):
        train_tokenizer(["one line"], 2048)


def test_swapped_ids_are_told_apart_by_content_and_both_are_named(tmp_path):
    fields = json.loads(TOKENIZER.definition)
    vocab = fields["model"]["vocab"]
    names = sorted(vocab, key=vocab.get)[300:310]
    for first, second in zip(names[::2], names[1::2], strict=True):
        vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    other = load_tokenizer(tmp_path)
    assert other.vocab_size == TOKENIZER.vocab_size
    check_same_vocabulary("target", TOKENIZER, "copy", load_tokenizer(TARGET))
    with pytest.raises(ValueError, match=r"'target' and 'drafter'.*\[300, 301"):
        check_same_vocabulary("target", TOKENIZER, "drafter", other)


def test_ids_that_only_the_other_vocabulary_has_are_named(tmp_path):
    fields = json.loads(TOKENIZER.definition)
    fields["added_tokens"].append({**fields["added_tokens"][0], "id": TOKENIZER.vocab_size, "content": "<|more|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"first at ids \[{TOKENIZER.vocab_size}\]"):
        check_same_vocabulary("target", TOKENIZER, "drafter", load_tokenizer(tmp_path))


def test_a_missing_or_broken_tokenizer_names_path_and_remedy(tmp_path):
    with pytest.raises(ValueError, match="does not exist; give the directory"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match="is not a tokenizer.json"):
        load_tokenizer(tmp_path)


def test_transformers_loads_the_tokenizer_and_agrees_on_the_raw_text():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(TARGET)
    assert (theirs.eos_token_id, theirs.mask_token_id) == (TOKENIZER.eos_id, TOKENIZER.mask_id)
    for turn in ("Hi!", "\n\n def f(x):\n    return 12", " lead and trail \n"):
        for reasoning in (False, True):
            raw = prompt_text(turn, reasoning=reasoning)
            assert theirs(raw)["input_ids"] == encode_prompt(TOKENIZER, turn, reasoning=reasoning)
            message = [{"role": "user", "content": turn}]
            assert raw == theirs.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True, enable_thinking=reasoning
            )


# training text


def test_a_conversation_masks_its_answers_and_opens_only_the_last_one_with_a_think_block():
    messages = [("user", "a?"), ("assistant", "b."), ("user", "c?"), ("assistant", "d.")]
    tokens, mask = encode_conversation(TOKENIZER, messages)
    assert TOKENIZER.decode(tokens) == (
        "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nb.<|im_end|>\n"
        "<|im_start|>user\nc?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nd.<|im_end|>"
    )
    kept = [token for token, keep in zip(tokens, mask, strict=True) if keep]
    assert TOKENIZER.decode(kept) == "b.<|im_end|>d.<|im_end|>"


def test_a_training_row_starts_with_the_ids_of_its_prompt():
    tokens, mask = encode_conversation(TOKENIZER, [("user", "What is 3 * 4?"), ("assistant", "12")])
    prompt = encode_prompt(TOKENIZER, "What is 3 * 4?", reasoning=False)
    assert tokens[: len(prompt)] == prompt
    assert mask == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))


def test_tokenised_rows_equal_conversations_one_by_one_and_survive_a_file(tmp_path):
    rows = list(iter_training_rows(TINY))
    whole = tokenise_directory(TINY, TOKENIZER)
    assert len(whole) == len(rows) and whole.tokens.dtype == np.uint16
    whole.save(tmp_path / "text.npz")
    again = TokenisedText.load(tmp_path / "text.npz")
    for index in (0, 3, len(rows) - 1):
        tokens, mask = again.row(index)
        assert (tokens.tolist(), mask.tolist()) == encode_conversation(TOKENIZER, rows[index].messages)


def test_excluded_sources_and_files_are_not_read(tmp_path):
    def write(name, *sources):
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        lines = [json.dumps({"domain": "chat", "source": s, "messages": messages}) + "\n" for s in sources]
        with gzip.open(tmp_path / name, "wt") as file:
            file.writelines(lines)

    write("chat.jsonl.gz", "alpaca_eval:some-model", "gpteacher_roleplay", "taskmaster4", "pypi:rich")
    write("chat_sharealike.jsonl.gz", "foldoc")
    assert [row.source for row in iter_training_rows(tmp_path)] == ["taskmaster4", "pypi:rich"]
    manifest = training_manifest(tmp_path)
    assert list(manifest["files"]) == ["chat.jsonl.gz"] and manifest["rows"] == {"pypi": 1, "taskmaster4": 1}


def test_missing_training_text_names_key_and_remedy(tmp_path):
    with pytest.raises(ValueError, match="train_data: None .*--config train_data=DIR"):
        training_files(None)
    with pytest.raises(ValueError, match="holds no training file"):
        training_files(tmp_path)
    with pytest.raises(ValueError, match="no row is left"):
        tokenise_rows([], TOKENIZER)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("{", "chat.jsonl line 1: not JSON", id="cut_line"),
        pytest.param('{"domain": "law"}', "domain 'law' is not allowed", id="unknown_domain"),
        pytest.param('{"domain": "chat", "messages": [{"role": "user", "content": "x"}]}', "alternate", id="no_answer"),
        pytest.param(
            '{"domain": "chat", "messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}',
            "needs a string `content`",
            id="no_content",
        ),
    ],
)
def test_a_malformed_training_row_names_file_and_line(tmp_path, line, message):
    (tmp_path / "chat.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        list(iter_training_rows(tmp_path))


def test_tiny_training_text_covers_the_domains_and_stays_small():
    rows = list(iter_training_rows(TINY))
    assert {row.domain for row in rows} == {"chat", "math", "code"} and 60 <= len(rows) <= 100
    assert TINY.stat().st_size <= 60_000


# prompt sets and subsets


@pytest.mark.parametrize("name", SAMPLES)
def test_embedded_sets_prepare_without_a_skip(name):
    rows = load_prompt_set(ALL_PINS, source="embedded", name=name).rows
    prompts, skipped = prepare(rows, TOKENIZER, ROOMY)
    assert len(prompts) == len(rows) >= 12 and not skipped
    assert len({prompt.sha256 for prompt in prompts}) == len(rows)


def test_subset_key_is_the_papers_rule_by_hand():
    rows = [row(index=i, category="xy"[i % 2]) for i in range(9)]
    by_hand = {
        r.index: hashlib.sha256(f"20260617|gsm8k|set/{r.index}|{r.category}".encode()).digest()[:8] for r in rows
    }
    assert {r.index: subsample_key(r, name="gsm8k") for r in rows} == by_hand
    smallest = sorted(sorted(by_hand, key=by_hand.get)[:4])
    assert [r.index for r in select(rows, name="gsm8k", count=4)] == smallest == [0, 2, 6, 7]


def test_category_quotas_are_largest_remainders_by_hand():
    # shares of 4 over 5, 3, 2 rows: 2.0, 1.2, 0.8 -> floors 2, 1, 0 and the one left goes to the largest remainder
    assert category_quotas(["a"] * 5 + ["b"] * 3 + ["c"] * 2, 4) == {"a": 2, "b": 1, "c": 1}
    assert category_quotas(["b", "a", "c"], 2) == {"a": 1, "b": 1, "c": 0}


def test_stratified_subset_takes_the_smallest_keys_of_each_category():
    rows = [row(index=i, category="aaaaabbbcc"[i]) for i in range(10)]
    chosen = select(rows, name="math500", count=4, stratify=True)
    for category, quota in {"a": 2, "b": 1, "c": 1}.items():
        keys = sorted(subsample_key(r, name="math500") for r in rows if r.category == category)
        assert sorted(subsample_key(r, name="math500") for r in chosen if r.category == category) == keys[:quota]
    assert [r.index for r in chosen] == sorted(r.index for r in chosen)


@given(st.integers(1, 40), st.data())
def test_a_smaller_limit_is_part_of_a_larger_one(size, data):
    rows = [row(index=i) for i in range(size)]
    small = data.draw(st.integers(1, size))
    large = data.draw(st.integers(small, size))
    first, second = (select(rows, name="set", count=count) for count in (small, large))
    assert len(first) == small and set(r.index for r in first) <= set(r.index for r in second)


@pytest.mark.parametrize("count", [81, 200, 0, -1, True, 2.0])
def test_more_prompts_than_rows_is_an_error_and_never_a_repeat(count):
    rows = [row(index=i) for i in range(80)]
    with pytest.raises(ValueError, match=r"limit: .* for mtbench \(allowed: 1 to 80"):
        select(rows, name="mtbench", count=count)


# templates and preparation


def test_paper_templates_by_hand():
    mbpp = row(
        "Add two numbers.", dataset="mbpp", meta={"test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}
    )
    assert render(mbpp, "paper") == "Add two numbers.\n\nExamples/tests:\nassert add(1, 2) == 3\nassert add(0, 0) == 0"
    stub = "def f(x: dict):\n    return {turn}\n"
    assert render(row(stub, dataset="humaneval"), "paper") == stub
    statement = row("Solve it.", dataset="livecodebench_v5", meta={"starter_code": "class S:\n    pass"})
    assert render(statement, "paper") == "Solve it.\n\nclass S:\n    pass"
    assert render(row("Solve it.", dataset="livecodebench_v5", meta={"starter_code": ""}), "paper") == "Solve it."


def test_dflash_templates_by_hand():
    boxed = "2?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert render(row("2?", dataset="gsm8k"), "dflash") == boxed
    assert "```python\ndef f():\n```" in render(row("def f():", dataset="humaneval"), "dflash")
    bare = render(row("S", dataset="livecodebench_v5"), "dflash")
    assert "### Question:\nS\n\n" in bare and "# YOUR CODE HERE" in bare


def test_template_ids_and_hashes_tell_protocol_template_and_mode_apart():
    ids = [
        template_id(row(dataset=dataset), Preparation(1, 9, protocol=protocol, reasoning=reasoning))
        for dataset, protocol, reasoning in [
            ("gsm8k", "paper", False),
            ("gsm8k", "paper", True),
            ("gsm8k", "dflash", False),
            ("mbpp", "paper", False),
        ]
    ]
    assert ids == ["paper/raw/direct", "paper/raw/think", "dflash/math/direct", "paper/mbpp/direct"]
    assert len({template_sha256(name) for name in ids}) == 4


def test_only_the_first_turn_is_sent():
    [prompt], _ = prepare([row(turns=("one", "two"))], TOKENIZER, ROOMY)
    assert TOKENIZER.decode(prompt.tokens) == prompt_text("one", reasoning=False)


def test_reasoning_leaves_the_think_block_open():
    [prompt], _ = prepare([row("hi")], TOKENIZER, Preparation(48, 2048, reasoning=True))
    assert TOKENIZER.decode(prompt.tokens).endswith("<|im_start|>assistant\n<think>\n")


def test_a_prompt_that_spells_the_mask_keeps_its_text_and_gains_no_mask_id():
    turn = "What does <|mask|> mean? <think> <|im_end|>"
    [prompt], _ = prepare([row(turn)], TOKENIZER, ROOMY)
    assert TOKENIZER.mask_id not in prompt.tokens
    assert prompt.tokens.count(TOKENIZER.eos_id) == 1
    assert TOKENIZER.decode(prompt.tokens) == prompt_text(turn, reasoning=False)


def test_unusable_rows_are_skipped_by_name_with_their_reason():
    turns = ["fine", "", None, "  \n", "word " * 3000]
    rows = [row(turn, index=i) for i, turn in enumerate(turns)] + [row(index=5, turns=())]
    prompts, skipped = prepare(rows, TOKENIZER, ROOMY)
    assert [prompt.id for prompt in prompts] == ["set/0"]
    reasons = {skip.id: skip.reason for skip in skipped}
    assert [reasons[f"set/{i}"] for i in (1, 2, 3, 5)] == [
        f"first turn is {w}" for w in ("empty", "None", "empty", "empty")
    ]
    assert reasons["set/4"].endswith("prompt tokens + 48 new > context 2048")


def test_the_context_holds_prompt_and_cap_exactly():
    length = len(encode_prompt(TOKENIZER, "hi", reasoning=False))
    prompts, skipped = prepare([row("hi")], TOKENIZER, Preparation(max_new_tokens=5, context=length + 5))
    assert len(prompts) == 1 and not skipped
    with pytest.raises(ValueError, match=f"{length} prompt tokens \\+ 5 new > context {length + 4}"):
        prepare([row("hi")], TOKENIZER, Preparation(max_new_tokens=5, context=length + 4))


def test_nothing_left_is_an_error_that_names_the_reasons():
    with pytest.raises(ValueError, match="no prompt is left of 1 rows .*first turn is empty"):
        prepare([row("")], TOKENIZER, ROOMY)
    with pytest.raises(ValueError, match="no prompt is left of 0 rows .*it has no rows"):
        prepare([], TOKENIZER, ROOMY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"protocol": "dflsh"}, r"protocol: 'dflsh' .*\(allowed: paper, dflash\)", id="protocol"),
        pytest.param({"max_new_tokens": 0}, "max_new_tokens: 0 .*at least 1", id="cap"),
        pytest.param({"context": 0}, "context: 0 .*at least 1", id="context"),
    ],
)
def test_bad_preparation_names_key_and_allowed_values(fields, message):
    with pytest.raises(ValueError, match=message):
        Preparation(**({"max_new_tokens": 4, "context": 99} | fields)).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"turns": ("half a pair: \ud83d",)}, "row 'x' is not UTF-8 text"),
        ({"category": "\udc00"}, "row 'x' is not UTF-8 text"),
        ({"dataset": "mbpp", "meta": {"test_list": "assert f(1)"}}, "row 'x': meta.test_list 'assert f\\(1\\)' is not"),
        ({"dataset": "mbpp", "meta": {"test_list": [1]}}, "meta.test_list .*allowed: a list of strings"),
        ({"dataset": "mbpp"}, "meta.test_list None is not allowed"),
        ({"dataset": "livecodebench", "meta": {"starter_code": ["def f"]}}, "meta.starter_code .*allowed: a string"),
    ],
)
def test_a_row_that_its_template_cannot_show_stops_the_set_and_is_named(fields, message):
    """A string in place of the list of tests would be sent letter by letter."""
    row = PromptRow(**{"id": "x", "index": 0, "dataset": "d", "domain": "code", "turns": ("why?",)} | fields)
    with pytest.raises(ValueError, match=message):
        prepare([row], TOKENIZER, Preparation(max_new_tokens=4, context=64))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": "12"}, "tokens: '12' is not allowed"),
        ({"tokens": []}, "at least one"),
        ({"tokens": [3, True]}, "tokens: .3, True. is not allowed"),
        ({"tokens": [-1]}, "ids >= 0"),
        ({"index": "0"}, "index: '0' is not allowed"),
        ({"index": 2**31}, "index: 2147483648 is not allowed"),
        ({"id": ["a"]}, "id: .'a'. is not allowed"),
        ({"id": "other"}, "index 0 is there twice"),
        ({"tokens": ["<<"]}, "not a prepared prompt"),
    ],
)
def test_a_prepared_prompt_of_other_types_is_refused_by_line(tmp_path, fields, message):
    prompt = dict.fromkeys(("dataset", "domain", "category", "template", "sha256"), "") | {"tokens": [1]}
    lines = [json.dumps(prompt | {"id": "a", "index": 0}), json.dumps(prompt | {"id": "b", "index": 0} | fields)]
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(lines).replace('"<<"', "[" * 100_000) + "\n")
    with pytest.raises(ValueError, match=rf"set.jsonl line 2: .*{message}"):
        read_prepared(path)
