"""Rebuild of the paper's ShareChat sample: 250 English conversations and 50 of each of five languages.

The five CSV files are read from the hub at a pinned revision; the pick is a function of their content and the seed.
The same conversations as the paper's follow only if the files are the ones it used, which no pin of theirs shows.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from tfm.prompts import SUBSAMPLE_SEED, PromptRow

PLATFORMS = ("chatgpt", "claude", "gemini", "grok", "perplexity")
# the order matters: earlier topics take the remainders and pick first
# fmt: off
TOPICS = (
    "specific_info", "other", "computer_programming", "mathematical_calculation", "tutoring_or_teaching",
    "write_fiction", "argument_or_summary_generation", "unclear", "create_an_image",
    "relationships_and_personal_reflection", "edit_or_critique_provided_text", "greetings_and_chitchat",
    "health_fitness_beauty_or_self_care", "data_analysis", "how_to_advice", "analyze_an_image",
    "purchasable_products", "translation", "personal_writing_or_communication", "cooking_and_recipes",
    "asking_about_the_model", "creative_ideation", "games_and_role_play", "generate_or_retrieve_other_media",
)
# fmt: on
ENGLISH = "english"
LANGUAGES = {"japanese": 50, "spanish": 50, "russian": 50, "chinese": 50, "french": 50}
CODES = {"en": ENGLISH, "ja": "japanese", "es": "spanish", "ru": "russian", "zh": "chinese", "fr": "french"}
ENGLISH_COUNT = 250
ENGLISH_TARGETS = {"chatgpt": 250, "grok": 80, "perplexity": 80, "gemini": 50, "claude": 40}
OTHER_TARGETS = {"chatgpt": 300, "grok": 80, "perplexity": 70, "gemini": 30, "claude": 20}
POOL = 300  # conversations kept per topic, or per language and topic
COLUMNS = ("url", "role", "plain_text", "topic", "detected_language_final")
FILE = "hf://datasets/{repo}@{revision}/{platform}_results_final_language_filtered.csv"


@dataclass(frozen=True)
class Conversation:
    platform: str
    url: str
    topic: str
    language: str
    turns: tuple[str, ...]
    key: float  # of the hash, in [0, 1)


def rebuild_sharechat(fetch: Callable[[str], Iterable[dict]], entry: dict) -> list[PromptRow]:
    """Return the 500 rows in the benchmark's order. `fetch(address)` yields the records of one CSV file.

    A `data_files` in the pin is the address in place of the hub's, with {platform} in it.
    """
    conversations: list[Conversation] = []
    for platform in PLATFORMS:
        names = {"repo": entry.get("repo"), "revision": entry["revision"], "platform": platform}
        address = (entry.get("data_files") or FILE).format(**names)
        conversations += read_conversations(fetch(address), platform)
    return [
        PromptRow(
            id=f"sharechat/{c.platform}/{hashlib.sha256(c.url.encode()).hexdigest()[:16]}",
            index=index,
            dataset="sharechat",
            domain="chat",
            turns=c.turns,
            category=c.language,
            meta={"platform": c.platform, "topic": c.topic, "language": c.language},
        )
        for index, c in enumerate(pick(conversations))
    ]


def read_conversations(records: Iterable[dict], platform: str) -> list[Conversation]:
    """Return the conversations of one platform's records that pass the filters; consecutive rows share a url."""
    found = []
    for url, rows in groupby(_checked(records, platform), key=lambda record: record["url"]):
        users = [row for row in rows if str(row["role"]).lower() in ("user", "human") and row["plain_text"]]
        turns = tuple(str(row["plain_text"]) for row in users)
        if not 1 <= len(turns) <= 8 or max(map(len, turns)) > 8000 or not 20 <= sum(map(len, turns)) <= 12000:
            continue
        if not any(row["topic"] in TOPICS for row in users):
            continue
        topic = Counter(row["topic"] for row in users).most_common(1)[0][0]
        language = str(Counter(row["detected_language_final"] for row in users).most_common(1)[0][0]).lower()
        digest = hashlib.sha256(f"{SUBSAMPLE_SEED}|{platform}|{url}".encode()).digest()
        key = int.from_bytes(digest[:8], "big") / 2**64
        found.append(Conversation(platform, url, topic, CODES.get(language, language), turns, key))
    return found


def pick(conversations: list[Conversation]) -> list[Conversation]:
    """Return the chosen conversations, shuffled as the paper's script does: English, the others, then all."""
    english = _pick_english(_pools(conversations, ENGLISH))
    others = _pick_others({language: _pools(conversations, language) for language in LANGUAGES})
    shuffler = random.Random(SUBSAMPLE_SEED)
    shuffler.shuffle(english)
    shuffler.shuffle(others)
    union = english + others
    shuffler.shuffle(union)
    return union


def topic_quotas(total: int) -> dict[str, int]:
    """Return `total` split evenly over TOPICS; the first ones take the remainder."""
    base, remainder = divmod(total, len(TOPICS))
    return {topic: base + (place < remainder) for place, topic in enumerate(TOPICS)}


class _Picks:
    """What has been chosen so far, with the counts that the sort keys read."""

    def __init__(self, targets: dict[str, int]):
        self.targets = targets
        self.chosen: list[Conversation] = []
        self.urls: set[tuple[str, str]] = set()
        self.platforms: Counter = Counter()
        self.topics: Counter = Counter()

    def ratio(self, c: Conversation) -> float:
        return self.platforms[c.platform] / self.targets[c.platform]

    def is_full(self, c: Conversation) -> bool:
        return self.platforms[c.platform] >= self.targets[c.platform]

    def take(self, candidates: Iterable[Conversation], count: int, order: Callable) -> int:
        """Choose up to `count` candidates, each time the least by `order`; return how many were found."""
        left = [c for c in candidates if (c.platform, c.url) not in self.urls]
        for taken in range(count):
            if not left:
                return taken
            best = min(left, key=order)
            left.remove(best)
            self.chosen.append(best)
            self.urls.add((best.platform, best.url))
            self.platforms[best.platform] += 1
            self.topics[best.topic] += 1
        return count


def _pick_english(pools: dict[str, list[Conversation]]) -> list[Conversation]:
    picks = _Picks(ENGLISH_TARGETS)
    found = 0
    for topic, quota in topic_quotas(ENGLISH_COUNT).items():
        found += picks.take(
            pools[topic], quota, lambda c: (picks.is_full(c), picks.ratio(c), picks.topics[c.topic], c.key)
        )
    leftovers = [c for pool in pools.values() for c in pool]
    picks.take(leftovers, ENGLISH_COUNT - found, lambda c: (picks.ratio(c), picks.topics[c.topic], c.key))
    return picks.chosen


def _pick_others(pools: dict[str, dict[str, list[Conversation]]]) -> list[Conversation]:
    picks = _Picks(OTHER_TARGETS)
    ceiling = topic_quotas(sum(LANGUAGES.values()))

    def over(c: Conversation) -> bool:
        return picks.topics[c.topic] >= ceiling[c.topic]

    for language, count in LANGUAGES.items():
        found = 0
        for topic, quota in topic_quotas(count).items():
            found += picks.take(
                pools[language][topic],
                quota,
                lambda c: (over(c), picks.is_full(c), picks.ratio(c), picks.topics[c.topic], c.key),
            )
        leftovers = [c for pool in pools[language].values() for c in pool]
        picks.take(leftovers, count - found, lambda c: (over(c), picks.topics[c.topic], picks.ratio(c), c.key))
    return picks.chosen


def _pools(conversations: list[Conversation], language: str) -> dict[str, list[Conversation]]:
    pools: dict[str, list[Conversation]] = {topic: [] for topic in TOPICS}
    for c in conversations:
        if c.language == language and c.topic in pools:
            pools[c.topic].append(c)
    return {topic: sorted(pool, key=lambda c: c.key)[:POOL] for topic, pool in pools.items()}


def _checked(records: Iterable[dict], platform: str) -> Iterable[dict]:
    for record in records:
        if not isinstance(record, dict):
            raise ValueError(f"sharechat: {record!r} in the file of {platform} is no object; restore the file")
        lacking = [column for column in COLUMNS if column not in record]
        if lacking:
            raise ValueError(
                f"sharechat: column {', '.join(lacking)} is not in the file of {platform} "
                f"(there are: {', '.join(sorted(map(str, record)))}); pin a revision with the paper's columns"
            )
        yield record
