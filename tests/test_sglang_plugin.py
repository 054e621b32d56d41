"""The plugin's own parts, without SGLang: layouts, GDN layers from SGLang's slots, and a decode by them."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from engine_models import prompts_of, random_family, run_reference

from baselines.sglang.ahead import Aside
from baselines.sglang.gdn_memory import LayerShape, make_memory
from baselines.sglang.grower import Grower, Shared
from baselines.sglang.layout import attention_mask, forced_draws, links, output_tokens
from baselines.sglang.settings import Settings
from tfm.decode import Models
from tfm.sampling import next_tokens
from tfm.tree import DraftTree
from tfm_kernels.gdn.ops import ancestor_mask

TREES = [[-1, 0, 0, 1, 1, 3, 2], [-1, 0, 1, 2, 3], [-1, 0, 0, 0], [-1], [-1, 0, 0, 2, -1, -1]]


def children_of(parents: list[int], node: int) -> list[int]:
    return [i for i, parent in enumerate(parents) if parent == node]


@pytest.mark.parametrize("parents", TREES, ids=["mixed", "chain", "wide", "root", "padded"])
def test_links_walk_every_nodes_children_in_the_order_of_their_slots(parents):
    first, sibling = links(torch.tensor([parents]))
    for node in range(len(parents)):
        walked, at = [], int(first[0, node])
        while at >= 0:
            walked.append(at)
            at = int(sibling[0, at])
        assert walked == children_of(parents, node)


@pytest.mark.parametrize("prefix", [0, 3])
def test_the_mask_shows_a_node_the_prefix_its_ancestors_and_itself(prefix):
    parents = TREES[0]
    rows = attention_mask(ancestor_mask(torch.tensor([parents]))[0], prefix).view(len(parents), -1)
    for node in range(len(parents)):
        seen, at = set(range(prefix)), node
        while at >= 0:
            seen.add(prefix + at)
            at = parents[at]
        assert set(rows[node].nonzero().flatten().tolist()) == seen


def test_what_a_step_emits_is_the_path_and_the_bonus():
    tokens = torch.tensor([[9, 11, 12, 13, 14]])
    for path, accepted, wanted in [([0, 2, 4, -1], 2, [12, 14, 7]), ([0, -1, -1, -1], 0, [7])]:
        found = output_tokens(tokens, torch.tensor([path]), torch.tensor([accepted]), torch.tensor([7]))
        assert found[0, : accepted + 1].tolist() == wanted


def test_forced_draws_accept_first_children_to_the_depth_asked_for():
    parents = torch.tensor([[-1, 0, 0, 1, 3, 4]])
    depths, tokens = torch.tensor([[0, 1, 1, 2, 3, 4]]), torch.tensor([[1, 2, 3, 4, 5, 6]])
    drawn = forced_draws(tokens, depths, links(parents)[0], torch.full((1, 6), 90), 2)
    # the node at depth 2 draws the target's token again
    assert drawn.tolist() == [[2, 4, 90, 90, 90, 90]]


class Weights:
    def __init__(self, layer):
        self.conv_weights, self.A_log, self.dt_bias = layer.conv1d.weight[:, 0], layer.A_log, layer.dt_bias


def memory_of(target, nodes: int):
    config = target.config
    shape = LayerShape(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    places = [i for i, layer in enumerate(target.layers) if layer.kind == "linear_attention"]
    return make_memory(dict.fromkeys(places, shape), nodes=nodes, backend="solve", device="cpu", dtype=torch.float32)


def test_verify_and_commit_are_those_of_the_targets_own_layer():
    """From SGLang's slot (state [HV, V, K], window [C, 3]) to the committed state, on a branching tree."""
    target = random_family().target
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3, 2, 5]])
    memory = memory_of(target, parents.shape[1])
    memory.start(parents, ancestor_mask(parents))
    layer, place = target.layers[0].linear_attn, 0
    draw = torch.Generator().manual_seed(4)
    slot = torch.randn(3, 8, 8, generator=draw)
    channels = memory.layers[place].shape.channels
    window = torch.randn(channels, 3, generator=draw)
    mixed = torch.randn(8, channels, generator=draw)
    decay, write = torch.randn(8, 3, generator=draw), torch.randn(8, 3, generator=draw)
    memory.load(place, slot, window)
    with torch.no_grad():
        out = memory.verify(place, Weights(layer), mixed, decay, write)
        path = [0, 1, 3, 5]
        for leaf, nodes in ((5, path), (6, [0, 2, 6])):
            # the same inputs, one after the other, from the same slot
            rows = torch.cat([window.T, mixed[nodes]])
            convolved = torch.nn.functional.silu((rows.unfold(0, 4, 1) * layer.conv1d.weight[:, 0]).sum(-1))[None]
            q, k, v = layer._split(convolved)
            from tfm.target import log_decay_gate
            from tfm_kernels.gdn.naive import naive_tree_verify

            gates = log_decay_gate(layer.A_log, decay[None, nodes], layer.dt_bias), write[None, nodes].sigmoid()
            chain = torch.arange(-1, len(nodes) - 1)[None]
            wanted, writes, sums = naive_tree_verify(q, k, v, *gates, chain, slot.transpose(-1, -2)[None])
            assert torch.allclose(out[0, leaf], wanted[0, -1], atol=1e-5)
            if leaf == 5:
                from tfm_kernels.gdn import solve

                state = solve.commit(slot.transpose(-1, -2)[None], k, writes, sums, torch.arange(len(nodes))[None])
        memory.commit(torch.tensor([[*path, -1, -1]]))
    assert torch.allclose(memory.layers[place].state, state, atol=1e-5)
    assert torch.equal(memory.layers[place].window[0], mixed[[1, 3, 5]])


def test_a_path_of_nothing_leaves_the_state():
    target = random_family().target
    memory = memory_of(target, 4)
    memory.load(0, torch.randn(3, 8, 8), torch.randn(memory.layers[0].shape.channels, 3))
    kept = memory.layers[0].state.clone()
    with torch.no_grad():
        weights = Weights(target.layers[0].linear_attn)
        memory.verify(0, weights, torch.randn(4, memory.layers[0].shape.channels), torch.randn(4, 3), torch.randn(4, 3))
    memory.commit(torch.full((1, 3), -1))
    assert torch.equal(memory.layers[0].state, kept)


class ServerSteps:
    """What worker.py does around the grower, with this project's target and drafter in SGLang's place."""

    def __init__(self, models, settings: Settings, seed: int, *, graphs: bool = False):
        self.models, target = models, models.target
        shared = Shared(target.embed_weight, target.head_weight)
        rows = models.drafter.draft_rows
        self.grower = Grower(
            settings, shared, weaver=models.weaver, draft_rows=rows, seed=seed, memory=None, graphs=graphs
        )
        self.seed, self.graphs, nodes = seed, graphs, settings.budget + 1
        self.aside = Aside(target.head_weight.device)
        # SGLang's graphs write to the same addresses in every step
        weight = target.head_weight
        self.logits, self.hidden = weight.new_zeros(nodes, len(weight)), weight.new_zeros(nodes, weight.shape[1])

    def decode(self, prompt, *, temperature: float, count: int) -> tuple[list[int], list[int]]:
        target, drafter, grower = self.models.target, self.models.drafter, self.grower
        context, device = grower.context, self.logits.device
        lengths = torch.tensor([len(prompt.tokens)], device=device)
        room = len(prompt.tokens) + 2 * count
        cache, notes = target.new_cache(1, room), drafter.new_cache(1, room)
        output = target.prefill(torch.tensor([prompt.tokens], device=device), lengths, cache)
        context.indices.fill_(prompt.index)
        root = next_tokens(output.logits, lengths[:, None], context.indices, seed=self.seed, temperature=temperature)
        context.roots.copy_(root[:, 0])
        context.target_hidden.copy_(output.hidden[:, 0])
        drafter.append(output.taps, lengths, notes)
        emitted, accepted = root[0].tolist(), []
        while len(emitted) < count:
            # as the worker: the first draft in the step, the others behind the step before
            with self.aside.behind() if accepted else contextlib.nullcontext():
                _, hidden = drafter.draft(context.roots, notes, target)
                context.rows.copy_(hidden)
                context.root_positions.copy_(cache.lengths)
                grower.build()
            self.aside.join()
            tree = DraftTree(grower.tokens, grower.parents, grower.depths, grower.depths.float(), grower._counts)
            output = target.verify(tree, cache)
            self.logits.copy_(output.logits[0])
            self.hidden.copy_(output.hidden[0])
            grower.accept(self.logits, self.hidden, temperature=temperature, keep=self.graphs)
            number = int(grower.accepted) + 1
            emitted += grower.emitted[0, :number].tolist()
            accepted.append(number - 1)
            cache.commit(output.scratch, grower.path)
            taps = output.taps[:, grower.path[0].clamp(min=0)]
            drafter.append(taps, torch.tensor([number], device=device), notes)
        return emitted[:count], accepted


def check_against_the_loop(models, proposal: str, temperature: float, *, graphs: bool = False) -> None:
    found = {"proposal": proposal, "budget": 12, "kernel": "solve", "candidates": 16, "children": 4, "weaver": "here"}
    found |= {"width": 3} if proposal != "ddtree" else {}
    settings, seed = Settings.from_dict(found), 3
    config = dataclasses.replace(settings.decode_config(temperature=temperature, seed=seed), max_new_tokens=20)
    prompts = prompts_of(models, (5, 17))
    steps = ServerSteps(models, settings, seed, graphs=graphs)
    with torch.inference_mode():
        for prompt, trace in zip(prompts, run_reference(models, config, prompts), strict=True):
            emitted, accepted = steps.decode(prompt, temperature=temperature, count=20)
            assert emitted == trace.output_tokens
            assert accepted[: len(trace.steps)] == [step.accepted_untrimmed for step in trace.steps]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposal", ["tfm", "ddtree", "dartree"])
def test_the_plugins_parts_decode_what_the_loop_decodes(proposal, temperature):
    check_against_the_loop(random_family(), proposal, temperature)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposal", ["tfm", "ddtree", "dartree"])
def test_the_parts_as_graphs_decode_what_the_loop_decodes(proposal, temperature):
    family = random_family(hidden=256, head_dim=128, gdn_dim=128, heads=(4, 2), gdn_heads=(4, 12), vocab=512, block=16)
    models = Models(family.target.cuda(), family.drafter.cuda(), family.weaver.cuda())
    check_against_the_loop(models, proposal, temperature, graphs=True)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fused_cuda", "fused_triton"])
def test_a_layer_on_the_gpu_is_that_of_plain_pytorch(backend):
    """Two trees and a commit between them, at the 27B's head sizes: the fused memory against solve in float32."""
    shape, nodes, draw = LayerShape(2, 6, 128, 128), 65, torch.Generator().manual_seed(1)
    parents = torch.tensor([[-1, *(int(torch.randint(0, i, (1,), generator=draw)) for i in range(1, nodes))]])
    weights = SimpleNamespace(
        conv_weights=torch.randn(shape.channels, 4, generator=draw).bfloat16().cuda() * 0.5,
        A_log=torch.rand(6, generator=draw).cuda(),
        dt_bias=torch.rand(6, generator=draw).cuda(),
    )
    wide = SimpleNamespace(**{name: value.float() for name, value in vars(weights).items()})
    slot, window = torch.randn(6, 128, 128, generator=draw) * 0.1, torch.randn(shape.channels, 3, generator=draw)
    common = {"nodes": nodes, "device": "cuda"}
    fast = make_memory({0: shape}, backend=backend, dtype=torch.bfloat16, **common)
    plain = make_memory({0: shape}, backend="solve", dtype=torch.float32, **common)
    for memory in (fast, plain):
        memory.load(0, slot.cuda(), window.bfloat16().cuda())
    path = [0]
    while children := [i for i, parent in enumerate(parents[0].tolist()) if parent == path[-1]]:
        path.append(children[0])
    for _ in range(2):
        joined = torch.randn(nodes, shape.channels + 12, generator=draw).bfloat16().cuda()
        mixed, decay, write = joined.split([shape.channels, 6, 6], dim=-1)
        outs = []
        for memory, known, dtype in ((fast, weights, torch.bfloat16), (plain, wide, torch.float32)):
            memory.start(parents.cuda(), ancestor_mask(parents.cuda()))
            outs.append(memory.verify(0, known, mixed.to(dtype), decay.to(dtype), write.to(dtype)).float().clone())
            memory.commit(torch.tensor([path], device="cuda"))
        # bf16 rows: about three digits
        assert (outs[0] - outs[1]).norm() / outs[1].norm() < 1e-2
        assert (fast.layers[0].state - plain.layers[0].state).norm() / plain.layers[0].state.norm() < 1e-2
        assert torch.equal(fast.layers[0].window.float(), plain.layers[0].window)
