"""Estimate how many drafts marginals can get accepted: continuations of anchors in the target's own answers."""

import hashlib
import logging
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import pyarrow as pa
import torch
from decode_cell import check_weights
from input_errors import told
from probe_records import run_probe, write_rows
from torch import Tensor

from baselines.loading import load_models
from tfm import ceiling, device, manifest
from tfm.cells import load_cells
from tfm.decode import Models
from tfm.marginals import Marginals
from tfm.prompts import read_prepared
from tfm.sampling import next_tokens
from tfm.tokenizer import end_tokens, load_tokenizer
from tfm.tree import DraftTree

DESCRIPTION = """
Reads the answers of ar cells, their prompts, and the weights that --settings names. Chooses anchors in the answers by
hash, draws continuations from the target, and writes anchors.parquet (one row an anchor, drafter and offset) and
ceiling.json to --out. Last line of stdout: one JSON object. Exit 2 on bad input.
"""
DRAFTERS = ("oracle", "oracle_argmax", "dflash", "dflash_argmax", "weaver")
VALUES = ("reached", "accepted", "alive", "overlap", "accepted_above", "overlap_above")
ROWS_AT_ONCE = 384  # continuations decoded together
# keeps the noise of continuations apart from that of every request of a cell, whose index is a dataset index
NOISE_OFFSET, ANCHORS_A_PROMPT, CONTINUATIONS = 2**40, 2**14, 2**10
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("dataset", "domain", "id")),
        *((name, pa.int32()) for name in ("index", "anchor", "context")),
        ("drafter", pa.string()),
        ("position", pa.int32()),
        *((name, pa.float64()) for name in VALUES),
    ]
)
logger = logging.getLogger("estimate_ceiling")


@dataclass(frozen=True)
class Anchor:
    """A place in an answer: `tokens` is all that is committed, the root included."""

    dataset: str
    domain: str
    id: str
    index: int
    anchor: int  # emitted tokens, the root included
    tokens: list[int]

    @property
    def noise_index(self) -> int:
        """First of the indices that address this anchor's noise, one a continuation."""
        return NOISE_OFFSET + (self.index * ANCHORS_A_PROMPT + self.anchor) * CONTINUATIONS


@dataclass(frozen=True)
class Draft:
    """What the drafter and the target know at G anchors, before any continuation."""

    cache: object  # TargetCache of the G prefixes; read, never written
    roots: Tensor  # [G]
    target_hidden: Tensor  # [G, d], of the root's predecessor
    probs: Tensor  # [G, D, vocab], the drafter's marginals at temperature 1
    marginals: Marginals


def choose_anchors(settings: dict) -> list[Anchor]:
    """Return the anchors: of each set's first prompts by hash, the places of the answer with the smallest hashes."""
    anchors = []
    for cell, prompts in zip(settings["cells"], settings["prompts_files"], strict=True):
        prefix = {row.id: row.tokens for row in read_prepared(Path(prompts))}
        rows = load_cells([Path(cell)]).requests
        rows = rows[rows["output_tokens"].str.len() > 1]
        order = sorted(rows.to_dict("records"), key=lambda row: _key(settings, row, "prompt"))
        for row in order[: settings["prompts"]]:
            answer = row["output_tokens"].tolist()
            # the last token has no successor of its own, and an end of text has none at all
            places = sorted(range(1, len(answer)), key=lambda place: _key(settings, row, place))
            for place in sorted(places[: settings["anchors"]]):
                tokens = [*prefix[row["id"]], *answer[:place]]
                anchors.append(Anchor(row["dataset"], row["domain"], row["id"], row["index"], place, tokens))
    return anchors


def estimate(anchors: list[Anchor], models: Models, settings: dict, eos_tokens: tuple[int, ...]) -> list[dict]:
    """Return the rows of anchors.parquet for all anchors, a few at a time, those of like length together."""
    group = max(1, ROWS_AT_ONCE // settings["continuations"])
    order = sorted(range(len(anchors)), key=lambda i: len(anchors[i].tokens))
    rows: dict[int, list[dict]] = {}
    with torch.inference_mode():
        for start in range(0, len(order), group):
            chosen = order[start : start + group]
            found = _estimate_group([anchors[i] for i in chosen], models, settings, eos_tokens)
            rows |= dict(zip(chosen, found, strict=True))
            logger.info("%d of %d anchors", min(start + group, len(order)), len(order))
    return [row for number in range(len(anchors)) for row in rows[number]]


def _estimate_group(anchors: list[Anchor], models: Models, settings: dict, eos_tokens) -> list[list[dict]]:
    temperature, count = settings["temperature"], settings["continuations"]
    draft = draft_at(anchors, models, candidates=settings["candidates"])
    indices = torch.tensor([anchor.noise_index for anchor in anchors])[:, None] + torch.arange(count)
    indices = indices.flatten().to(draft.roots.device)
    steps = draft.probs.shape[1]
    tokens, logits = continue_text(
        draft, models, count, steps, indices=indices, seed=settings["seed"], temperature=temperature
    )
    owns = [
        ceiling.Continuations.of(*part, temperature=temperature, eos_tokens=eos_tokens)
        for part in zip(tokens.split(count), logits.split(count), strict=True)
    ]
    paths = {
        "oracle_argmax": torch.stack([ceiling.mean_law(own).max(-1).indices for own in owns]),
        "dflash_argmax": draft.probs.max(-1).indices,
    }
    laws = {name: (_follow(path, draft, models) / temperature).softmax(-1) for name, path in paths.items()}
    result = []
    for number, (anchor, own) in enumerate(zip(anchors, owns, strict=True)):
        found = {"oracle": ceiling.oracle(own), "dflash": ceiling.sampled(draft.probs[number], own)}
        guesses = {"oracle_argmax": ceiling.leave_one_out(own).max(-1).indices}
        guesses["dflash_argmax"] = paths["dflash_argmax"][number]
        for name, path in paths.items():
            found[name] = ceiling.forced(path[number], laws[name][number], eos_tokens, own, guesses[name])
        found["weaver"] = ceiling.sampled(weaver_laws(number, draft, own.tokens, models), own)
        result.append(_rows(anchor, found, ceiling.oracle_above(own)))
    return result


def draft_at(anchors: list[Anchor], models: Models, *, candidates: int) -> Draft:
    """Prefill the prefixes and run the drafter once at every anchor."""
    target, drafter = models.target, models.drafter
    where = target.embed_weight.device
    prefixes = [anchor.tokens[:-1] for anchor in anchors]
    lengths = torch.tensor([len(prefix) for prefix in prefixes], device=where)
    longest = int(lengths.max())
    tokens = torch.tensor([prefix + [0] * (longest - len(prefix)) for prefix in prefixes], device=where)
    cache = target.new_cache(len(anchors), longest + drafter.draft_rows + 1)
    output = target.prefill(tokens, lengths, cache)
    roots = torch.tensor([anchor.tokens[-1] for anchor in anchors], device=where)
    context = drafter.new_cache(len(anchors), longest)
    drafter.append(output.taps, lengths, context)
    logits, hidden = drafter.draft(roots, context, target)
    marginals = Marginals.from_logits(logits, hidden, candidates)
    return Draft(cache, roots, output.hidden[:, 0], logits.float().softmax(-1), marginals)


def continue_text(
    draft: Draft, models: Models, count: int, steps: int, *, indices: Tensor, seed: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Draw `count` continuations of every anchor, all in one batch.

    Returns tokens [G * count, steps] and the logits [G * count, steps, vocab] that they were drawn from; `indices`
    [G * count] address the noise.
    """
    target, cache = models.target, fork(draft.cache, count)
    latest, tokens, logits = draft.roots.repeat_interleave(count), [], []
    path = torch.zeros_like(latest)[:, None]
    for _ in range(steps):
        output = target.verify(DraftTree.root_only(latest), cache)
        cache.commit(output.scratch, path)
        # after the commit the cache holds the root, so that its length is the next token's position
        drawn = next_tokens(output.logits, cache.lengths[:, None], indices, seed=seed, temperature=temperature)
        latest = drawn[:, 0]
        tokens.append(latest)
        logits.append(output.logits[:, 0])
    return torch.stack(tokens, dim=1), torch.stack(logits, dim=1)


def fork(cache, count: int):
    """Return a cache that holds every request of `cache` `count` times, side by side."""
    layers = [
        type(layer)(**{f.name: getattr(layer, f.name).repeat_interleave(count, dim=0) for f in fields(layer)})
        for layer in cache.layers
    ]
    copy = type(cache)(layers, len(cache.lengths) * count, cache.lengths.device)
    copy.lengths = cache.lengths.repeat_interleave(count)
    return copy


def _follow(tokens: Tensor, draft: Draft, models: Models) -> Tensor:
    """Return the target's logits [G, D, vocab] along one path of tokens [G, D] an anchor; the cache is only read."""
    path = torch.cat([draft.roots[:, None], tokens], dim=1)
    parents = torch.arange(-1, tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    return models.target.verify(DraftTree.build(path, parents), draft.cache).logits[:, :-1].float()


def weaver_laws(number: int, draft: Draft, tokens: Tensor, models: Models) -> Tensor:
    """Return the weaver's laws [M, D, vocab] along continuations tokens [M, D] of anchor `number`; 0 off candidates."""
    weaver, target, count = models.weaver, models.target, len(tokens)
    line = torch.cat([draft.roots[number].expand(count, 1), tokens[:, :-1]], dim=1)
    hidden = (draft.target_hidden[number], draft.marginals.hidden[number])
    queries = weaver.path_queries(*(x.expand(count, *x.shape) for x in hidden), target.embed(line))
    candidates = draft.marginals.tokens[number]  # [D, K]
    residual = torch.einsum("mdh,dkh->mdk", queries, target.head_weight[candidates].to(queries.dtype))
    law = (draft.marginals.log_probs[number] + residual.float()).softmax(-1)
    whole = law.new_zeros(*tokens.shape, draft.probs.shape[-1])
    return whole.scatter_(2, candidates.expand_as(law), law)


def _rows(anchor: Anchor, found: dict[str, ceiling.Acceptance], above: ceiling.Acceptance) -> list[dict]:
    names = ("dataset", "domain", "id", "index", "anchor")
    head = {name: getattr(anchor, name) for name in names} | {"context": len(anchor.tokens)}
    rows = []
    for drafter in DRAFTERS:
        columns = {f.name: getattr(found[drafter], f.name).tolist() for f in fields(ceiling.Acceptance)}
        if drafter == "oracle":
            columns |= {"accepted_above": above.accepted.tolist(), "overlap_above": above.overlap.tolist()}
        for position in range(len(columns["reached"])):
            values = {name: column[position] for name, column in columns.items()}
            rows.append({**head, "drafter": drafter, "position": position + 1, **values})
    return rows


def run(settings: dict, out: Path) -> dict:
    """Estimate and write both files; return ceiling.json. Raises ValueError for weights that are not the settings'."""
    start = time.time()
    check_weights(settings)
    device.make_deterministic(threads=settings["threads"])
    with device.claim(device.check_device(settings["device"])) as where:
        tokenizer = load_tokenizer(settings["weights"]["target"])
        anchors, models = choose_anchors(settings), load_models(settings["weights"], device=where, dtype=torch.float32)
        rows = estimate(anchors, models, settings, end_tokens(settings["weights"]["target"], tokenizer))
        facts = {"device": device.facts(where)}
    facts |= {"schema": manifest.SCHEMA_VERSION, "settings": settings, "anchors": len(anchors)}
    facts |= {"source_digest": manifest.modules_digest(["tfm.ceiling", "tfm.decode", "tfm.weaver", "tfm.drafter"])}
    facts |= {"environment": manifest.environment(), "seconds": round(time.time() - start, 3)}
    facts["files"] = {"anchors.parquet": write_rows(out / "anchors.parquet", rows, SCHEMA)}
    manifest.write_json(out / "ceiling.json", facts)
    return facts


def _key(settings: dict, row: dict, what) -> bytes:
    return hashlib.sha256(f"{settings['seed']}|{row['dataset']}|{row['id']}|{what}".encode()).digest()


@told
def main() -> int:
    return run_probe("ceiling", DESCRIPTION, run, fact="anchors")


if __name__ == "__main__":
    sys.exit(main())
