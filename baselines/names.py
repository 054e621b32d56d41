"""What cells are called: variants, settings and paths, each spelled in one way that is read back.

Nothing here reads a file; `config` is a suite's checked config, whose defaults a name leaves out.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from baselines.methods import METHODS
from baselines.refusals import one_of
from tfm.config import HEADS, RULES, DecodeConfig

# the letter of each knob in a variant's name; those in BARE are left out at their default
LETTERS = {"budget": "b", "width": "w", "candidates": "k", "children": "c", "depth": "d"}
BARE = ("candidates", "children", "depth")
DEFAULT_RULE = "target_only"
STAGED = "stages"
AGAIN = "null"  # the same method once more: what differs between the two is noise
# option of a method -> the words that a name may hold for it, with the value that each means
WORDS = {
    "residual": {"r0": False},
    "siblings": {"sampled": "sampled"},
    "head": {head: head for head in HEADS if head != DecodeConfig.head},
}
BONUS = r"n(?:0|[1-9]\d*)(?:\.\d*[1-9])?"  # a depth bonus of -0.2 is n0.2; left out at the suite's
NUMBER = "[1-9][0-9]*"
SETTING = r"t(?:0|[1-9]\d*)(?:\.\d*[1-9])?(?:-think)?"  # the pattern of setting_name


@dataclass(frozen=True)
class Variant:
    """A method with all its parameters; `name` spells it and `parse_variant` reads it back."""

    method: str
    budget: int | None = None
    width: int | None = None
    candidates: int | None = None
    children: int | None = None
    depth: int | None = None
    residual: bool = True
    siblings: str = "top"
    head: str = DecodeConfig.head
    depth_bonus: float = 0.0
    rule: str = DEFAULT_RULE
    staged: bool = False  # stage times and trees are recorded
    again: bool = False  # the null control, timed as the headline is

    def name(self, config: dict) -> str:
        """Return the one name of this variant under a config's defaults."""
        parts = [self.method]
        for knob in METHODS[self.method].knobs:
            value = getattr(self, knob)
            if knob not in BARE or value != config[knob]:
                parts.append(f"{LETTERS[knob]}{value}")
        parts += [word for option, word, value in _words(self.method) if getattr(self, option) == value]
        if _takes_bonus(self.method) and self.depth_bonus != config.get("depth_bonus", 0.0):
            parts.append(f"n{_digits(-self.depth_bonus)}")
        parts += [] if self.rule == DEFAULT_RULE else [self.rule]
        return "-".join([*parts, *([STAGED] if self.staged else []), *([AGAIN] if self.again else [])])


def parse_variant(name: str, config: dict) -> Variant:
    """Return the variant that `name` spells; raises ValueError for an unknown method or another name's spelling."""
    method, *parts = name.split("-")
    one_of("method", method, METHODS)
    match = re.fullmatch(variant_pattern(method, groups=True), name)
    if not match:
        example = "-".join([method, *(f"{LETTERS[knob]}N" for knob in METHODS[method].knobs if knob not in BARE)])
        optional = [f"-{LETTERS[knob]}N" for knob in METHODS[method].knobs if knob in BARE]
        optional += [f"-{word}" for _, word, _ in _words(method)] + ["-nN"] * _takes_bonus(method)
        raise ValueError(
            f"variant: {name!r} is not allowed (allowed: {example}, then any of {', '.join(optional) or 'nothing'}, "
            f"a rule of {', '.join(RULES)}, -{STAGED}, and -{AGAIN}; N is at least 1); write the name in that order"
        )
    found = match.groupdict()
    knobs = {knob: int(found[knob]) if found.get(knob) else config[knob] for knob in METHODS[method].knobs}
    variant = Variant(
        method,
        **knobs,
        **{option: value for option, word, value in _words(method) if found[option] == word},
        **_bonus(method, found, config),
        rule=found["rule"] or DEFAULT_RULE,
        staged=found["staged"] is not None,
        again=found["again"] is not None,
    )
    if variant.name(config) != name:
        raise ValueError(
            f"variant: {name!r} spells out a default; write {variant.name(config)!r}, the name of that cell"
        )
    return variant


def variant_pattern(method: str, *, groups: bool = False) -> str:
    """Return the regular expression of a method's variant names; `groups` names its parts."""
    pattern = method
    for knob in METHODS[method].knobs:
        number = f"(?P<{knob}>{NUMBER})" if groups else NUMBER
        pattern += f"(?:-{LETTERS[knob]}{number})?" if knob in BARE else f"-{LETTERS[knob]}{number}"
    for option in METHODS[method].options:
        words = BONUS if option == "depth_bonus" else "|".join(WORDS[option])
        pattern += f"(?:-(?P<{option}>{words}))?" if groups else f"(?:-(?:{words}))?"
    rules = "|".join(rule for rule in RULES if rule != DEFAULT_RULE)
    for name, words in (("rule", rules), ("staged", STAGED), ("again", AGAIN)):
        pattern += f"(?:-(?P<{name}>{words}))?" if groups else f"(?:-(?:{words}))?"
    return pattern


def setting_name(temperature: float, *, reasoning: bool = False) -> str:
    """Return t0, t1, t0.6, t0.000001, ... (every digit, no exponent), with -think when reasoning is on."""
    return f"t{_digits(temperature)}" + ("-think" if reasoning else "")


def parse_setting(name: str) -> tuple[float, bool]:
    """Return (temperature, reasoning) of a setting's name; raises ValueError for another spelling of it."""
    match = re.fullmatch(r"t(\d+(?:\.\d+)?)(-think)?", name)
    if not match:
        raise ValueError(f"setting: {name!r} is not allowed (allowed: t0, t1, t0.6, ..., each also with -think)")
    number = float(match[1])
    temperature, reasoning = int(number) if number.is_integer() else number, match[2] is not None
    spelled = setting_name(temperature, reasoning=reasoning) if math.isfinite(number) else "a finite number"
    if spelled != name:
        raise ValueError(f"setting: {name!r} is another spelling; write {spelled!r}, the name of that cell")
    return temperature, reasoning


def cell_path(config: dict, *, dataset: str, variant: str, setting: str, seed) -> str:
    """Return the folder of a cell, relative to the repository."""
    head = f"results/{config['suite']}/cells/{config['engine']}/{config['family']}"
    return f"{head}/{dataset}/{variant}/{setting}/seed{seed}"


def _words(method: str) -> list[tuple[str, str, object]]:
    """Return (option, word, value) of the options that a method takes and that names spell as words."""
    options = [option for option in METHODS[method].options if option in WORDS]
    return [(option, word, value) for option in options for word, value in WORDS[option].items()]


def _takes_bonus(method: str) -> bool:
    return "depth_bonus" in METHODS[method].options


def _bonus(method: str, found: dict, config: dict) -> dict:
    if not _takes_bonus(method):
        return {}
    spelled = found["depth_bonus"]
    return {"depth_bonus": config.get("depth_bonus", 0.0) if spelled is None else 0.0 - float(spelled[1:])}


def _digits(number: float) -> str:
    return f"{Decimal(repr(float(number) + 0.0)).normalize():f}"  # + 0.0: no minus before zero
