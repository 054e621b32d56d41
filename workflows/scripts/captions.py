"""What a reader has to know of each table: its title, how its columns are counted, and where its numbers were made."""

import arms
import builder_tables
import family_tables
import lossless_table
import probe_tables
import tables

from baselines import probes

TITLES = {
    "headline": "Speed and accepted drafts, macro over prompt sets",
    "per_set": "Speed and accepted drafts by prompt set",
    "latency": "Where a step's time goes",
    "acceptance_by_position": "Acceptance by draft position",
    "sweeps": "Sweeps of budget, width, candidates, children and depth, and the weaver's residual on (1) and off (0)",
    "paired": "Paired differences between methods",
    "audit": "Audit of the acceptance rules",
    "oracle": "Share of the best tree that any lossless method could draft",
    "ceiling": "Acceptance ceiling: what marginals can get accepted, by draft position",
    "ceiling_claims": "Acceptance ceiling: the paper's claims as questions",
    "kernels": "GDN tree verification, microseconds a layer",
    "builders": "Builders at the same contexts, and their share of the oracle tree",
    "dartree_claims": "DARTree's claims beside what was measured",
    "lossless": "Token identity with ar",
    "families": "Families trained apart: another seed, other weavers",
    "sanity": "What a reader should doubt",
    "controls": "Controls of the timing",
    "arms": "How each method was run",
}
NOTES = {
    "headline": "tok/s: new tokens / wall of the prompt loop, prefill included, {timed}; speedup: ratio of macro "
    "tok/s to ar's, slow-downs shown as they are. tau: new tokens a step, the bonus token included (1 for ar by "
    "definition); tau_exact leaves out the token sampled at prefill (1.0 when nothing is accepted); tau_pooled divides "
    "the tokens of all requests by their steps, so that long answers weigh more; accepted: drafts a "
    "step, without the bonus, trimmed to what was emitted. same_as_ar: outputs equal to ar's, of those compared. "
    "flag: other work on the machine may have disturbed a timed cell (its process had less than "
    f"{tables.CPU_SHARE:.0%} of a core's time, or its slowest request's step took over {tables.STEP_SPREAD}x the "
    "fastest one's), or its card's clock moved or was held down by heat or power.",
    "latency": "Microseconds a step, from cells with stage timing; the levels verify and build split those stages. gdn "
    "is the recurrent layers' part of verify plus commit. untimed_decode_us is the same cell without stage timing.",
    "acceptance_by_position": "conditional: accepted at d given accepted at d - 1 and a tree that reaches d; "
    "unconditional: accepted at d, over all steps. n counts steps of the conditional.",
    "sweeps": "One knob at a time, the others as in the headline; a budget's width is ceil(budget / 16) "
    "for tfm, dartree keeps its own, and drafts at most width nodes a depth.",
    "paired": "Same prompts and seeds in both arms, resampled together; n counts prompts present in both.",
    "audit": "expected_accepted is the lossless bound of the same steps; excess is what was accepted over it, steps "
    "pooled; a rule above it is lossy. -sampled draws siblings without replacement: with traversal the law holds on "
    "average over trees, and no step has a bound. Values untrimmed.",
    "oracle": "The best tree of a budget holds the target's own most probable prefixes; limit is what it would accept "
    "on average at the contexts where the method drafted, expected_accepted what the method's tree would, share their "
    "ratio. A chain is held against the best tree of the suite's budget. entropy_nats: mean entropy of the target's "
    "law at the tokens of ar's answers. steps: sampled by hash, the same number a cell.",
    "ceiling": "acceptance: of a draft sampled at this position, sum over tokens of min(draft, target), given that all "
    "earlier drafts were accepted (along continuations of the target, each weighed with the probability that its "
    "tokens were drafted and accepted; a drafter of one token follows its own path). survival: all drafts up to here "
    "accepted. "
    "length: the sum of survival, the accepted drafts up to here. on_text: acceptance along the target's own text, "
    "whatever became of earlier drafts. reached: anchors' worth of paths that get here. The oracle marginal is "
    "estimated from below (each continuation left out of its own mean) and from above (_above, by tangents); the "
    "distances over_ceiling are to the estimate from above.",
    "ceiling_claims": "Distances are to the ceiling's estimate from above, positions weighted by what reaches them. A "
    "crossover one past the last position means that the curves do not cross; it is answered by its value where that "
    "lies within, else by whether its interval reaches there.",
    "kernels": "One call for all heads of a layer, the ancestor mask given; without convolution, gates and commit. "
    "ratio: the baseline's time (the recurrence node by node) over this backend's, of the same round; on a CPU it says "
    "nothing about a GPU. error: largest error of the float32 result against float64, relative to the largest value; a "
    "backend above the limit is not timed.",
}
NOTES["builders"] = (
    "build_us: median of building a tree, the drafter's pass left out, the device idle before and after; calls: "
    "expansions of the head; accepted: what a lossless rule accepts of the tree on average at T = 1; oracle_share: "
    "that over the best tree of the budget, which no method passes; faster_than_heap: the sequential heap's median "
    "time over this one's; same_nodes_as_heap: share of contexts with the heap's nodes."
)
NOTES["dartree_claims"] = (
    "paper: printed by DARTree's authors for Qwen3-4B and Qwen3-8B with Domino's head at T = 0, read in a summary. "
    "reproduced: the interval meets the rule (a gain: above 1 and up to the printed number or past it); smaller: a "
    "gain, its interval below the printed one; refuted: none of the interval meets the rule; undecided: some does; "
    "measured: nothing was said; open: no number. Rules and this suite's own claims are the project's. Ratios are "
    "paired over prompts and seeds; the largest of several sets has its own interval, not widened for the choice of it."
)
NOTES["lossless"] = (
    "Every prompt decoded by ar and by each method in float32; same: all tokens equal. A difference is a near tie "
    f"where ar's two best scores, noise in, are within {lossless_table.NEAR_TIE:g} of each other; wrong counts the "
    "others."
)
NOTES["families"] = (
    "metric: tau of a method, or a ratio of accepted drafts a step; over_shipped: the number over the shipped one's, "
    "of tau with both families' prompts resampled together; inside: whether it lies in the shipped number's interval. "
    "answers, d_rank, weaver_steps: what the weaver was trained on and its width; drafter_chain, weaver_alpha: last "
    "validation. A weaver's variant keeps the target and drafter of the seed that it names."
)
PROBE_TABLES = [name for names in probes.TABLES.values() for name in names]
NOTES["sanity"] = (
    "One row a check over all records, its worst value and the limit above which it is flagged (the first "
    "draft: below). Rows that break a count (steps missing, accepted deeper than the tree) stop the tables instead."
)
HEADLINES = ("headline", "per_set", "paired")  # tables that compare methods
# tables of one setting and seed, and of one set unless the suite says otherwise; "" is a sweep that it does not name
ON_THE_SIDE = {"latency": "stages", "sweeps": "", "audit": "audit", "controls": "null"}
NOTES["per_set"] = NOTES["headline"]
NOTES["controls"] = (
    "ar once more at the end of the run, against ar: the same work, so that the ratio is noise and drift alone; step "
    "times of the second half of a cell's requests over the first; the card's clock after a timed cell over before "
    "it, and whether heat or power held it down."
)
NOTES["arms"] = "Knobs of each method; concurrency counts requests decoded together; what else differs is named."


def caption(name: str, data: tables.Suite, *, note: str = "") -> str:
    """Return what a reader has to know of a table: suite, device, sizes, counts, what is left open."""
    if name in PROBE_TABLES:
        config = data.config
        where = f"Suite {config['suite']}, target {config['family']}{_weights(config)}."
        notes = {"builders": builder_tables.notes, "families": family_tables.notes, "lossless": lossless_table.notes}
        said = notes[name](data) if name in notes else probe_tables.notes(name, data)
        return " ".join(filter(None, [f"{TITLES[name]}. {NOTES[name]}", where, said]))
    config, requests = data.config, data.requests
    devices = " + ".join(sorted(requests["device_name"].unique())) or "no device"
    note_of_table = NOTES.get(name, "").format(timed="all seeds" if config.get("timed") == "all" else "first seed")
    per_set = requests.groupby("dataset")["id"].nunique()
    counts = ", ".join(f"{dataset} {per_set.get(dataset, 0)}" for dataset in config["datasets"])
    if name in ON_THE_SIDE:
        side = data.side(ON_THE_SIDE[name])
        everywhere = config.get("everywhere", [])
        if everywhere and name == "sweeps":
            counts = f"{counts} for sweeps with dataset macro ({', '.join(everywhere)}), else "
        elif "dataset" in side:
            counts = ""
        counts += f"{side['dataset']} {per_set.get(side['dataset'], 0)}" if "dataset" in side else ""
        counts += f", setting {side['setting']}, seed {side['seed']}"
    budget = config["budget"]
    parts = [
        f"{TITLES[name]}. {note_of_table}".strip(),
        f"Suite {config['suite']} on {devices}, engine {config['engine']}, "
        f"target {config['family']}{_weights(config)}, {config['dtype']}, "
        f"protocol {config['protocol']}{_reasoning(config)}; timed cells decode one request at a time.",
        f"Budget {budget} drafted nodes, {budget + 1} verified rows (the root is extra).",
        f"Prompts: {counts}; up to {config['max_new_tokens']} new tokens; intervals are 95 % bootstrap over prompts.",
    ]
    notes = [*arms.unfair(arms.launches_of(data.plan)), arms.domain_note({cell["domain"] for cell in data.plan})]
    parts += [f"{note[0].upper()}{note[1:]}." for note in notes if note] if name in HEADLINES else []
    missing = data.records.missing
    parts += [f"Missing: {len(missing)} of {len(data.plan)} cells."] if missing else []
    parts += [f"MIXED: {note}."] if note else []
    parts += [f"Open: {'; '.join(item['item'] for item in config['open'])}."] if config["open"] else []
    return " ".join(parts)


def _weights(config: dict) -> str:
    """Say what is special about the suite's weights; plans of before that key have nothing to say."""
    return f" ({config['caption']})" if config.get("caption") else ""


def _reasoning(config: dict) -> str:
    """Say which settings open a think block; nothing where none does."""
    if True not in config["reasoning"]:
        return ""
    return ", reasoning on (-think)" + (" and off" if False in config["reasoning"] else "")
