"""What `tfm generate` does once torch is there: load, decode, and show tokens as they are committed."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.text import Text

from baselines.commands.generate import Job, title
from baselines.loading import load_models
from baselines.methods import resolve
from baselines.terminal import Screen
from baselines.tree_view import Node, TreeView, draw, quoted
from tfm import device
from tfm.acceptance import edge_log_probs
from tfm.clock import Clock
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, Step, decode
from tfm.tokenizer import TextTokenizer, load_tokenizer
from tfm.trace import STAGES, RequestTrace

PARTS = ("drafter", "weaver")
WARM_UP_TOKENS = 8
WINDOW = 64  # tokens decoded again for a new one, at most, where no character is held
DRAFTED, OWN = "green", ""  # styles of accepted drafts and of the target's own tokens


@dataclass
class Answer:
    """A finished run; `seconds` is its wall without what was spent on showing it."""

    job: Job
    trace: RequestTrace
    seconds: float

    @property
    def tau(self) -> float | None:
        """New tokens a step (the paper's tau), 1 for ar by definition, None without a step."""
        if not self.trace.steps:
            return None
        return 1.0 if self.job.config.method == "ar" else len(self.trace.output_tokens) / len(self.trace.steps)

    @property
    def tokens_per_second(self) -> float:
        return len(self.trace.output_tokens) / self.seconds


def run(job: Job, other: Job | None, options) -> int:
    """Run one job, or two on the same prompt; return 1 when their tokens differ."""
    screen = Screen()
    where = device.check_device(job.device)
    device.make_deterministic(threads=job.threads)
    with device.claim(where) as where:
        tokenizer = load_tokenizer(job.weights["target"])
        models = load_both(screen, job, other, where)
        (screen.line if options.show_tree else screen.aside)(Text(title(job), style="dim"))
        watcher = Watcher(job, tokenizer, screen, tree_rows=options.tree_rows if options.show_tree else None)
        answer = decode_job(job, models, where, watcher=watcher, timed=options.stats or other is not None)
        watcher.close(answer.trace)
        if screen.is_terminal:
            screen.line()
        screen.aside(summary(answer, where))
        if options.stats:
            show_stats(screen, answer)
        if other is None:
            return 0
        second = decode_job(other, models, where, watcher=None, timed=True)
        return 0 if compare(screen, answer, second, tokenizer) else 1


def load_both(screen: Screen, job: Job, other: Job | None, where: torch.device) -> Models:
    """Load every part that one of the jobs needs."""
    weights = {**(other.weights if other else {}), **job.weights}
    if not screen.is_terminal:
        return load_models(weights, device=where, dtype=torch.float32)
    with screen.console.status(f"loading {job.family}", spinner="dots"):
        return load_models(weights, device=where, dtype=torch.float32)


def decode_job(job: Job, models: Models, where: torch.device, *, watcher: "Watcher | None", timed: bool) -> Answer:
    """Decode one prompt with the parts that its method needs; `timed` warms up first and clocks the stages."""
    models = Models(models.target, *(getattr(models, part) if part in job.weights else None for part in PARTS))
    proposer = resolve(job.config.method)(job.config, models)
    prompt, clock, finished = Prompt("prompt", 0, list(job.tokens)), Clock("stages" if timed else "wall", where), []
    if timed:
        # no measured prompt: its tokens in reverse
        warm_up = dataclasses.replace(prompt, tokens=prompt.tokens[::-1])
        short = dataclasses.replace(job.config, max_new_tokens=WARM_UP_TOKENS, eos_tokens=())
        decode([warm_up], models, short, proposer=proposer, on_finish=lambda _: None)
    on_step = None
    if watcher is not None:
        proposer = watcher.watched(proposer)
        on_step = watcher.on_step
    decode([prompt], models, job.config, proposer=proposer, on_finish=finished.append, clock=clock, on_step=on_step)
    wall = (finished[0].prefill_us + finished[0].decode_us) / 1e6
    return Answer(job, finished[0], wall - (watcher.seconds if watcher else 0.0))


class Detokeniser:
    """Turns a growing list of tokens into text that is never taken back: half a character is held until it is whole."""

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._start, self._shown = 0, 0  # first token of the window, and characters of the window's text returned

    def feed(self, tokens: list[int], *, final: bool = False) -> str:
        """Return the text that all `tokens` so far add to what was returned before; `final` holds nothing back.

        Bytes that form no character yet decode to one U+FFFD at the end.
        """
        text = self._decode(tokens[self._start :])
        end = len(text) - (not final and text.endswith("\ufffd"))
        new, self._shown = text[self._shown : end], max(self._shown, end)
        if end == len(text) and len(tokens) - self._start > WINDOW:
            # one token stays: some tokenizers spell the first one of a text differently
            self._start = len(tokens) - 1
            self._shown = len(self._decode(tokens[self._start :]))
        return new


class Watcher:
    """Shows one request while it is decoded: its text as it is committed, or every step's tree."""

    def __init__(self, job: Job, tokenizer: TextTokenizer, screen: Screen, *, tree_rows: int | None):
        self.seconds = 0.0  # spent here
        self._config, self._tokenizer, self._screen, self._tree_rows = job.config, tokenizer, screen, tree_rows
        self._weaver = "weaver" in job.weights
        self._detokeniser, self._seen, self._steps = Detokeniser(tokenizer.decode), 0, 0
        self._marginals = None
        if tree_rows is not None:
            self._legend()

    def watched(self, proposer) -> "_Watched":
        """Return the proposer, with each step's marginals kept for the tree."""
        return _Watched(proposer, self._keep_marginals) if self._tree_rows is not None else proposer

    def on_step(self, step: Step) -> None:
        """Show what a step committed."""
        start = time.perf_counter()
        output, accepted = step.outputs[0], int(step.result.accepted[0])
        if self._tree_rows is None:
            kinds = [OWN] * (not self._seen) + [DRAFTED] * accepted + [OWN]
            self._write(output, kinds)
        else:
            if not self._seen:
                self._screen.line(Text(f"prefill emits {quoted(self._tokenizer.decode(output[:1]))}", "dim"))
            self._draw(step, output)
        self._seen, self._steps = len(output), self._steps + 1
        self.seconds += time.perf_counter() - start

    def close(self, trace: RequestTrace) -> None:
        """Write what is left: the whole text under trees, a first token without steps, half a character."""
        output = trace.output_tokens
        if self._tree_rows is not None:
            self._screen.line()
        self._screen.write(self._detokeniser.feed(self._text_tokens(output), final=True))
        self._screen.write("\n")

    def _write(self, output: list[int], kinds: list[str]) -> None:
        for count, style in zip(range(self._seen + 1, len(output) + 1), kinds, strict=False):
            piece = self._detokeniser.feed(self._text_tokens(output[:count]))
            if piece:
                self._screen.write(piece, style)

    def _text_tokens(self, output: list[int]) -> list[int]:
        # the end of the turn is a token, not text
        return output[:-1] if output and output[-1] in self._config.eos_tokens else output

    def _legend(self) -> None:
        glyphs = self._screen.glyphs
        temperature = 1.0 if self._config.is_greedy else self._config.temperature
        signs = f"{glyphs.hit} accepted  {glyphs.miss} drafted  {glyphs.bonus} bonus, the target's own token"
        self._screen.line(Text(signs, "dim"))
        self._screen.line(Text(f"probabilities given the parent; the target's at T = {temperature:g}", "dim"))
        self._screen.line(Text("expected: drafts that a lossless rule accepts on average", "dim"))

    def _draw(self, step: Step, output: list[int]) -> None:
        view = tree_view(
            step,
            number=self._steps,
            marginals=self._marginals,
            weaver=self._weaver,
            config=self._config,
            spell=lambda token: self._tokenizer.decode([token]),
            emitted=self._tokenizer.decode(output[max(self._seen, 1) :]),
        )
        self._marginals = None
        self._screen.line()
        width = min(self._screen.width, 120)
        for line in draw(view, rows=self._tree_rows, width=width, glyphs=self._screen.glyphs):
            self._screen.line(line)

    def _keep_marginals(self, marginals) -> None:
        self._marginals = marginals


class _Watched:
    """A proposer that shows each step's marginals to `keep`."""

    def __init__(self, proposer, keep: Callable):
        self._proposer, self._keep = proposer, keep

    def propose(self, context, clock):
        return self._proposer.propose(_WatchedContext(context, self._keep), clock)


class _WatchedContext:
    def __init__(self, context, keep: Callable):
        self._context, self._keep = context, keep

    def __getattr__(self, name: str):
        return getattr(self._context, name)

    def draft(self, candidates: int):
        marginals = self._context.draft(candidates)
        self._keep(marginals)
        return marginals


def tree_view(
    step: Step, *, number: int, marginals, weaver: bool, config: DecodeConfig, spell: Callable[[int], str], emitted: str
) -> TreeView:
    """Return what a step of one request drafted, as text and numbers."""
    tree, temperature = step.tree, 1.0 if config.is_greedy else config.temperature
    count = int(tree.num_nodes[0])
    target = edge_log_probs(tree, step.logits, temperature)[0, :count].exp().tolist()
    local = tree.log_probs[0, :count].tolist()
    tokens, parents = tree.tokens[0, :count].tolist(), tree.parents[0, :count].tolist()
    depths, path = tree.depths[0, :count].tolist(), step.result.path[0].tolist()
    columns = (*(("drafter",) if marginals is not None else ()), *(("weaver",) if weaver else ()), "target")
    nodes, scores = [], []
    for index, (token, parent, depth) in enumerate(zip(tokens, parents, depths, strict=True)):
        found = {"target": target[index], "weaver": _exp(local[index])}
        if marginals is not None and depth:
            found["drafter"] = marginal_probability(marginals, depth - 1, token)
        scores.append(scores[parent] + local[index] if index else 0.0)
        kept = {name: found.get(name) for name in columns}
        nodes.append(Node(spell(token), parent, depth, scores[-1], kept, index in path))
    leaf, bonus = path[int(step.result.accepted[0])], int(step.result.bonus[0])
    chance = float((step.logits[0, leaf].float() / temperature).softmax(-1)[bonus])
    expected = float(step.result.expected_accepted[0])
    return TreeView(number, nodes, columns, spell(bonus), chance, emitted, expected)


def marginal_probability(marginals, row: int, token: int) -> float | None:
    """Return the drafter's probability of a token at a row, None when it is no candidate there."""
    places = (marginals.tokens[0, row] == token).nonzero()
    return float(marginals.log_probs[0, row, places[0, 0]].exp()) if len(places) else None


def _exp(value: float) -> float:
    return float(torch.tensor(value).exp())


def summary(answer: Answer, where: torch.device) -> Text:
    """Return the last line: tokens, steps, tau, speed and on what."""
    trace, facts = answer.trace, device.facts(where)
    name = facts["name"].replace("(R)", "").replace("(TM)", "")
    threads = facts["torch_threads"]
    machine = name if facts["kind"] == "cuda" else f"{name}, {threads} thread{'s' * (threads > 1)}"
    cap = " (the cap)" if trace.finish_reason == "length" else ""
    tau = "-" if answer.tau is None else f"{answer.tau:.2f}"
    return Text.assemble(
        f"{len(trace.output_tokens)} tokens{cap}, {len(trace.steps)} steps, ",
        (f"tau {tau}", "bold"),
        f", {answer.tokens_per_second:.0f} tok/s on {machine}",
    )


def show_stats(screen: Screen, answer: Answer) -> None:
    """Show accepted drafts a step, and the milliseconds of each stage."""
    steps = answer.trace.steps
    if not steps:
        screen.line("no step: the first token ended the answer")
        return
    counts = [sum(step.accepted == value for step in steps) for value in range(max(s.accepted for s in steps) + 1)]
    rows = [(str(value), str(count), count / max(counts)) for value, count in enumerate(counts)]
    screen.bars(("accepted", "steps"), rows)
    spent = {stage: sum(step.stage_us[stage] for step in steps) / len(steps) / 1e3 for stage in STAGES}
    whole = sum(spent.values())
    rows = [(stage, f"{value:.2f}", value / whole) for stage, value in spent.items()]
    screen.bars(("stage", "ms a step"), rows)
    accepted, expected = (sum(getattr(s, key) for s in steps) for key in ("accepted_untrimmed", "expected_accepted"))
    note = (
        f"accepted {accepted / len(steps):.2f} drafts a step; a lossless rule accepts {expected / len(steps):.2f} on "
    )
    screen.line(note + "average on these trees")


def compare(screen: Screen, first: Answer, second: Answer, tokenizer: TextTokenizer) -> bool:
    """Show two answers side by side; return whether their tokens are the same."""
    rows = []
    for answer in (first, second):
        steps, tokens = answer.trace.steps, len(answer.trace.output_tokens)
        accepted = f"{sum(step.accepted for step in steps) / len(steps):.2f}" if steps else "-"
        tau = "-" if answer.tau is None else f"{answer.tau:.2f}"
        method = answer.job.config.method
        rows.append((method, str(tokens), str(len(steps)), tau, accepted, f"{answer.tokens_per_second:.0f}"))
    screen.table(("method", "tokens", "steps", "tau", "accepted a step", "tok/s"), rows)
    ours, theirs = first.trace.output_tokens, second.trace.output_tokens
    names = f"{first.job.config.method} and {second.job.config.method}"
    if ours == theirs:
        screen.line(Text(f"{screen.glyphs.good} {names} emit the same {len(ours)} tokens", "green"))
        return True
    at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(ours), len(theirs)) if at is None else at
    words = [quoted(tokenizer.decode(line[at : at + 1])) for line in (ours, theirs)]
    screen.line(Text(f"{screen.glyphs.bad} {names} differ from token {at}: {words[0]} and {words[1]}", "bold red"))
    return False
