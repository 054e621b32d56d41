"""SGLang's worker for trees: its DFLASH worker with a tree in the chain's place. Imported inside SGLang 0.5.17 only.

One request at a time, synchronous scheduler, page size 1: what plugin.py checks before a server starts. A step is the
drafter's pass (SGLang's graph), the tree (ours), the target's pass over it (SGLang's graph, with our GDN op in it when
the kernel is fused), the walk and the commit (ours), and the move of the accepted rows of the memory (SGLang's). The
first two are launched ahead, behind the step before, where that step's reserved places hold them.
"""

import logging
from copy import deepcopy
from pathlib import Path

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import (
    commit_mamba_states_after_verify,
    move_accept_tokens_to_target_kvcache,
    prepare_mamba_track_for_verify,
)
from torch import Tensor

from baselines.sglang import shared_state
from baselines.sglang.ahead import Ahead, Aside, Room
from baselines.sglang.attention import PoolAttention
from baselines.sglang.gdn_memory import LayerShape, make_memory
from baselines.sglang.grower import Grower, Shared
from baselines.sglang.layout import attention_mask
from baselines.sglang.settings import Settings
from baselines.sglang.verify_input import TreeVerifyInput
from tfm.checkpoints import load_weaver

logger = logging.getLogger(__name__)


class TreeWorker(DFlashWorkerV2):
    """See the module."""

    def __init__(self, server_args, gpu_id, ps, nccl_port, target_worker):
        self.settings = Settings.from_environment()
        # the chain's own sizes for everything that drafts; the target's runner keeps the tree's
        chain_args = deepcopy(server_args)
        block = int(server_args.speculative_dflash_block_size)
        chain_args.override("dflash_tfm.draft", speculative_num_draft_tokens=block, speculative_eagle_topk=1)
        super().__init__(chain_args, gpu_id, ps, nccl_port, target_worker)
        self.server_args = server_args
        self._seed = int(server_args.random_seed)
        self.target_model = target_worker.model_runner.model
        self.memory = self._make_memory() if self.settings.is_fused else None
        shared_state.memory = self.memory
        device = torch.device(target_worker.model_runner.device)
        self.attention = PoolAttention(self.settings, block=block, device=device)
        shared_state.attention = self.attention
        self._aside, self._ahead = Aside(device), None
        self._final = _FinalHidden(self.target_model, rows=self.settings.budget + 1)
        self.grower: Grower | None = None

    def _make_memory(self):
        runner = self.target_worker.model_runner
        layers = {
            module.layer_id: LayerShape(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)
            for module in self.target_model.modules()
            if isinstance(module, RadixLinearAttention)
        }
        if not layers:
            return None
        memory = make_memory(
            layers,
            nodes=self.settings.budget + 1,
            backend=self.settings.kernel,
            device=runner.device,
            dtype=runner.dtype,
        )
        logger.info(
            "DFLASH_TFM: %d GDN layers verified by %s; %.2f GiB in place of a state for every node",
            len(layers), self.settings.kernel, memory.state_bytes / 2**30,
        )  # fmt: skip
        return memory

    def alloc_memory_pool(self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None):
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self.allocator = token_to_kv_pool_allocator

    def _maybe_build_draft_sampler(self):
        # the head's whole rows are needed, not their maxima
        return None

    def _make_grower(self) -> Grower:
        target, runner = self.target_model, self.target_worker.model_runner
        vocab = int(runner.model_config.vocab_size)
        embed, head = target.get_input_embeddings().weight, target.lm_head.weight
        weaver = None
        if self.settings.needs_weaver:
            place = Path(self.settings.weaver)
            weaver = load_weaver(place, device=runner.device, dtype=runner.dtype).eval()
        graphs = runner.decode_cuda_graph_runner is not None
        return Grower(
            self.settings,
            Shared(embed[:vocab], head[:vocab]),
            weaver=weaver,
            draft_rows=self.block_size - 1,
            seed=self._seed,
            memory=self.memory,
            graphs=graphs,
            ancestors=self.attention.own,
        )

    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None) -> GenerationBatchResult:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._aside.join()
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier)
            if batch.forward_mode.is_extend():
                self._after_prefill(batch, result)
            return result
        if len(batch.reqs) != 1:
            raise RuntimeError(
                f"DFLASH_TFM decodes one request at a time, the scheduler sent {len(batch.reqs)}; "
                "start the server with --max-running-requests 1"
            )
        with torch.inference_mode():
            return self._step(batch, on_publish, ahead)

    def _after_prefill(self, batch, result) -> None:
        """Take the request over: index, the target's last hidden row, and the state that prefill left in the pool."""
        if self.grower is None:
            self.grower = self._make_grower()
        context, request = self.grower.context, batch.reqs[-1]
        context.indices.fill_(int((request.sampling_params.custom_params or {}).get("tfm_index", 0)))
        with torch.inference_mode():
            context.roots.copy_(result.next_token_ids[-1:].to(torch.int64))
            context.target_hidden.copy_(self._final.last)
            if self.memory is not None:
                pool = self.target_worker.model_runner.req_to_token_pool
                slot = pool.get_mamba_indices(batch.req_pool_indices[-1:])
                for place in self.memory.layers:
                    kept = pool.mamba2_layer_cache(place)
                    self.memory.load(place, kept.temporal[slot][0], kept.conv[0][slot][0])

    def _step(self, batch, on_publish, ahead: Ahead | None) -> GenerationBatchResult:
        grower, prefix, request = self.grower, batch.seq_lens, batch.reqs[0]
        verified = None
        if ahead is not None and ahead.request is request:
            places, verified = ahead.places, ahead.verified
        else:
            length = _committed(batch)
            places = self._grow(batch.req_pool_indices, prefix, batch.spec_info.bonus_tokens, length)
        batch.out_cache_loc = places[: grower.nodes]
        logits_output, can_run_cuda_graph = verified or self._verify(batch)
        grower.accept(
            logits_output.next_token_logits,
            self._final.rows,
            temperature=float(request.sampling_params.temperature) if request.sampling_params.top_k != 1 else 0.0,
            keep=can_run_cuda_graph,
        )
        accept_lens = grower.counts
        if self.memory is not None:
            grower.commit()
        else:
            commit_mamba_states_after_verify(self.target_worker, batch, accept_lens, grower.path, grower.nodes)
        move_accept_tokens_to_target_kvcache(batch, grower.path_index, grower.drafts, self.allocator)
        self._extend_draft_memory(logits_output.hidden_states, places, prefix, accept_lens)
        logits_output.hidden_states = None
        new_seq_lens = prefix + accept_lens
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._ahead = self._start_ahead(batch, new_seq_lens)
        # SGLang copies all of these before the next step writes them
        bonus = grower.bonus
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=grower.emitted[0],
            accept_lens=accept_lens,
            can_run_cuda_graph=can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(bonus_tokens=bonus, new_seq_lens=new_seq_lens),
            speculative_num_draft_tokens=grower.path_rows,
            new_seq_lens=new_seq_lens,
        )

    def _start_ahead(self, batch, prefix: Tensor) -> Ahead | None:
        """Launch the next step's draft and tree, maybe its verify, beside SGLang's stream; or nothing.

        Changes the batch, which SGLang restores after a step.
        """
        request, committed = batch.reqs[0], _committed(batch)
        left = request.sampling_params.max_new_tokens - len(request.output_ids)
        room = Room(
            self.grower.nodes, self.block_size, self.grower.path_rows, self.model_runner.model_config.context_len
        )
        if self.settings.ahead == "none" or not room.holds(committed, left):
            return None
        kept, most, verified = (batch.req_pool_indices, prefix), committed + min(room.path, room.nodes), None
        with self._aside.behind():
            places = self._grow(*kept, self.grower.bonus, most)
            # a verify is the longest part of a step: not where this step may end the request by its length
            if self.settings.ahead == "verify" and left > room.path:
                batch.seq_lens, batch.seq_lens_cpu = prefix, torch.full_like(batch.seq_lens_cpu, most)
                batch.out_cache_loc = places[: room.nodes]
                verified = self._verify(batch)
        return Ahead(request, places, verified, kept)

    def _grow(self, requests: Tensor, prefix: Tensor, root: Tensor, most: int) -> Tensor:
        """Draft behind `prefix` and build the tree; return the slots [W] that the step may write.

        `most` bounds the prefix on the host.
        """
        # a small tree has fewer rows than the drafter's block
        width = max(self.grower.nodes, self.block_size)
        places = assign_extend_cache_locs_func(
            req_pool_indices=requests,
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            start_offset=prefix,
            end_offset=prefix + width,
            batch_size=1,
            draft_token_num=width,
            device=self.device,
        ).to(torch.int64)
        self._draft(requests, prefix, root, places, most)
        self.grower.context.root_positions.copy_(prefix)
        self.grower.build()
        return places

    def _draft(self, requests: Tensor, prefix: Tensor, root: Tensor, places: Tensor, most: int) -> None:
        """Run the drafter on [root, mask, ...]; its rows go to the grower."""
        block, context = self.block_size, self.grower.context
        ids = torch.full((block,), int(self._mask_token_id), dtype=torch.int64, device=self.device)
        ids[:1] = root.view(-1)[:1]
        context.roots.copy_(ids[:1])
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=1,
            input_ids=ids,
            req_pool_indices=requests,
            seq_lens=prefix,
            out_cache_loc=places[:block],
            seq_lens_sum=most + block,
            seq_lens_cpu=torch.tensor([most + block], dtype=torch.int32),
            positions=prefix + self._block_pos_offsets,
            input_embeds=self.target_model.get_input_embeddings()(ids),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        rows = self.draft_model_runner.forward(forward).logits_output.hidden_states
        if rows is None:
            raise RuntimeError("DFLASH_TFM: the drafter returned no hidden rows; check its checkpoint's architecture")
        context.rows[0].copy_(rows.view(block, -1)[1:])

    def _verify(self, batch):
        """Run the target over the tree; return its logits [N, vocab] and taps, and whether a graph ran.

        The batch's seq_lens and out_cache_loc are the tree's; what it holds on the host may be more.
        """
        grower = self.grower
        is_ours = self.settings.attention != "sglang"
        prepare_mamba_track_for_verify(batch)
        tree = TreeVerifyInput(
            draft_token=grower.tokens[0],
            positions=batch.seq_lens + grower.depths[0],
            draft_token_num=grower.nodes,
            topk=shared_state.verify_topk(self.settings),
            custom_mask=None if is_ours else attention_mask(grower.ancestors, _committed(batch)),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            retrieve_next_token=grower.first_child,
            retrieve_next_sibling=grower.next_sibling,
        )
        lengths, total = batch.seq_lens_cpu, batch.seq_lens_sum
        if lengths is not None:
            batch.seq_lens_cpu = lengths + grower.nodes
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward, _ = tree.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = lengths, total
        out = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward, is_verify=True, skip_attn_backend_init=True
        )
        return out.logits_output, out.can_run_cuda_graph

    def _extend_draft_memory(self, taps: Tensor, places: Tensor, prefix: Tensor, accept_lens: Tensor) -> None:
        """Give the drafter the accepted path's features; the path's rows lie behind the prefix by now."""
        grower = self.grower
        rows = grower.path_rows
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=taps.index_select(0, grower.path[0].clamp(min=0)),
            cache_loc=places[:rows],
            cache_loc_2d=places[:rows][None],
            positions=prefix + self._block_pos_offsets[:rows],
            commit_lens=accept_lens,
        )


def _committed(batch) -> int:
    # on the host already unless SGLang's overlap, which trees do not have, took it away
    return int(batch.seq_lens[0] if batch.seq_lens_cpu is None else batch.seq_lens_cpu[0])


class _FinalHidden:
    """The target's rows after its final norm: of the last pass over a tree, and of the last row of a prefill."""

    def __init__(self, target, *, rows: int):
        weight = target.lm_head.weight
        self.rows = weight.new_zeros(rows, weight.shape[1])
        self.last = weight.new_zeros(1, weight.shape[1])
        target.logits_processor.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, module, arguments, named) -> None:
        hidden = named.get("hidden_states", arguments[1] if len(arguments) > 1 else None)
        metadata = named.get("logits_metadata", arguments[3] if len(arguments) > 3 else None)
        if metadata is not None and metadata.forward_mode.is_target_verify():
            # inside SGLang's graph when one is captured
            self.rows[: len(hidden)].copy_(hidden[: len(self.rows)])
        else:
            self.last.copy_(hidden[-1:])
