"""Whether an answer is right, by rule: the number of a GSM8K answer, the tests of a HumanEval or MBPP program.

The rules do not ask how an answer was decoded, so that they can guard against a method that trades answers for speed.
"""

import re
from decimal import Decimal, InvalidOperation

# in this order: a boxed number, the set's own mark, words that announce it, else the last number of the text
MARKS = (
    r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}",
    r"####\s*(\S[^\n]*)",
    r"(?i:answer(?:\s+is)?\s*:?)\s*\**\s*\$?(-?[\d.,/]*\d)",
)
FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d[\d,]*)?")
FENCE = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", flags=re.DOTALL)
THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", flags=re.DOTALL)


def gsm8k_answer(text: str) -> Decimal | None:
    """Return the number that an answer gives: the last marked one, else the last number; None without a number."""
    text = FRACTION.sub(r"\1/\2", _without_thoughts(text).replace("\u2212", "-"))
    for mark in MARKS:
        numbers = [number for found in re.findall(mark, text) if (number := _number(found)) is not None]
        if numbers:
            return numbers[-1]
    found = NUMBER.findall(text)
    return _number(found[-1]) if found else None


def gsm8k_is_right(text: str, reference: str) -> bool:
    """Return whether an answer gives the number behind the `####` of the set's solution, or the number itself."""
    expected = _number(reference.rpartition("####")[2])
    if expected is None:
        raise ValueError(f"reference: {reference[-40:]!r} holds no number; take the set's own solution")
    return gsm8k_answer(text) == expected


def humaneval_program(answer: str, *, prompt: str, entry_point: str, test: str) -> str:
    """Return the program that ends well exactly when an answer passes the tests.

    The code is the last block of the answer that defines the function, else the answer's last block, else all of it;
    code without the definition continues the prompt, which is a function's head.
    """
    code = _code(answer, entry_point)
    if not re.search(rf"^def {re.escape(entry_point)}\b", code, flags=re.MULTILINE):
        code = f"{prompt}{_indented(code)}"
    else:
        # imports that stand above the head in the prompt
        code = f"{prompt.partition('def ')[0]}\n{code}"
    return f"{code}\n{test}\ncheck({entry_point})"


def mbpp_program(answer: str, *, tests: list[str], imports: list[str] | None = None) -> str:
    """Return the program that ends well exactly when an answer passes the assertions."""
    called = re.findall(r"\b(\w+)\s*\(", "\n".join(tests))
    return "\n".join([*(imports or ()), _code(answer, *called), *tests])


def _code(answer: str, *names: str) -> str:
    """Return the last block that defines one of the names, else the last block, else all of the answer."""
    answer = _without_thoughts(answer).replace("\r\n", "\n")
    blocks = [body for _, body in FENCE.findall(answer)]
    defining = [body for body in blocks if set(names) & set(re.findall(r"\bdef (\w+)", body))]
    return (defining or blocks or [answer])[-1]


def _without_thoughts(text: str) -> str:
    # with reasoning on the block was opened by the prompt
    return THINKING.sub("", text).rpartition("</think>")[2]


def _indented(code: str) -> str:
    """Return a continuation of a function's body, up to the first line that leaves it."""
    lines = code.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if not first.startswith((" ", "\t")):
        lines = [f"    {line}" if line.strip() else line for line in lines]
    end = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith((" ", "\t"))), len(lines))
    return "\n".join(lines[:end])


def _number(text: str) -> Decimal | None:
    found = NUMBER.search(text.replace("\\!", "").replace("\\,", "").replace("{,}", ","))
    if not found:
        return None
    above, _, below = found[0].replace(",", "").replace(" ", "").partition("/")
    try:
        return Decimal(above) / Decimal(below) if below else Decimal(above).normalize()
    except (InvalidOperation, ZeroDivisionError):
        return None
