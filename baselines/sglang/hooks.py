"""Hooks around functions of SGLang 0.5.17, each as fn(original, *arguments): what the trees need that DFLASH lacks.

Every hook passes on to the original unless the process runs DFLASH_TFM, so a stock arm is not changed by the plugin.
"""

from baselines.sglang import shared_state
from baselines.sglang.arguments import refuse_request
from baselines.sglang.settings import Settings
from baselines.sglang.shared_state import NAME


def _runs_trees(runner) -> bool:
    return getattr(runner.spec_algorithm, "name", None) == NAME and not runner.is_draft_worker


def _tree_of_no_request(mask, width: int):
    """Return the verify input that a capture or a warm-up runs with."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    from baselines.sglang.verify_input import TreeVerifyInput

    return TreeVerifyInput(
        draft_token=None,
        positions=None,
        draft_token_num=width,
        topk=shared_state.verify_topk(Settings.from_environment()),
        custom_mask=mask,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )


def get_spec_info(original, runner, num_tokens):
    """Capture the target's graph with a tree's mask."""
    if not _runs_trees(runner.model_runner):
        return original(runner, num_tokens)
    return _tree_of_no_request(runner.buffers.custom_mask, runner.captured_req_width)


def create_dummy_verify_input(original, spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker):
    """Warm the target up with a tree's mask."""
    if getattr(spec_algorithm, "name", None) != NAME or is_draft_worker:
        return original(spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker)
    return _tree_of_no_request(custom_mask, num_tokens_per_req)


def forward_extend(original, backend, *arguments, **named):
    """Verify a tree's GDN layer with this project's op: no state of every node, no tree walk in the convolution."""
    from baselines.sglang.verify_input import TreeVerifyInput

    memory, forward = shared_state.memory, named.get("forward_batch")
    is_tree = forward is not None and isinstance(forward.spec_info, TreeVerifyInput)
    if memory is None or not is_tree or not forward.forward_mode.is_target_verify():
        return original(backend, *arguments, **named)
    layer = named["layer"]
    return memory.verify(layer.layer_id, layer, named["mixed_qkv"], named["a"], named["b"])


def attend(original, backend, *arguments, **named):
    """Attend a tree's rows, and the drafter's block, with this project's form over SGLang's pool."""
    attention = shared_state.attention
    forward = arguments[4] if len(arguments) > 4 else named.get("forward_batch")
    if attention is None or not attention.takes(backend, forward):
        return original(backend, *arguments, **named)
    return attention.attend(backend, *arguments, **named)


def prepare_replay(original, backend, forward_batch, in_capture=False):
    """Leave out, before a replay, the lists of places and the mask that only SGLang's own attention reads."""
    attention = shared_state.attention
    if in_capture or attention is None or not attention.takes(backend, forward_batch):
        return original(backend, forward_batch, in_capture=in_capture)
    return None


def mamba_pool(original, pool, **named):
    """Allocate no state and no window for every node where this project's op verifies."""
    if _process_runs_trees() and Settings.from_environment().is_fused:
        named["speculative_num_draft_tokens"] = None
    return original(pool, **named)


def mamba_budget(original, configurator, total_rest_memory):
    """Reserve no memory for states of every node where none are allocated: the rest goes to keys and values."""
    if not (_process_runs_trees() and Settings.from_environment().is_fused):
        return original(configurator, total_rest_memory)
    from sglang.srt.runtime_context import get_context, get_spec

    nodes = get_spec().speculative_num_draft_tokens
    get_context().override(NAME.lower(), speculative_num_draft_tokens=0)
    try:
        return original(configurator, total_rest_memory)
    finally:
        get_context().override(NAME.lower(), speculative_num_draft_tokens=nodes)


def request_table(original, pool, size, max_context_len, device, enable_memory_saver):
    """Widen a request's row of places in the memory by a tree.

    DFLASH reserves two verify blocks behind what is committed, and the row ends one block behind the context: of a
    chain's places the last 12 would lie outside, of a tree's 61.
    """
    if _process_runs_trees():
        max_context_len += Settings.from_environment().budget + 1
    return original(pool, size, max_context_len, device, enable_memory_saver)


def need_hidden_states(original, server_args=None):
    """DFLASH relays no hidden rows, and neither do its trees; SGLang asks by name."""
    return False if _process_runs_trees(server_args) else original(server_args)


def validate_request(original, request, enable_overlap):
    """Refuse a request that trees would not decode exactly; SGLang aborts it with the reason."""
    found = original(request, enable_overlap)
    return refuse_request(request) if found is None and _process_runs_trees() else found


def _process_runs_trees(server_args=None) -> bool:
    if server_args is None:
        from sglang.srt.runtime_context import get_server_args

        server_args = get_server_args()
    return server_args.speculative_algorithm == NAME


TRITON = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
AROUND = {
    f"{TRITON}.forward_extend": attend,
    f"{TRITON}.init_forward_metadata_out_graph": prepare_replay,
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info": get_spec_info,
    "sglang.srt.speculative.spec_info.create_dummy_verify_input": create_dummy_verify_input,
    "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend": forward_extend,
    "sglang.srt.mem_cache.memory_pool.MambaPool.__init__": mamba_pool,
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache": mamba_budget,
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.__init__": request_table,
    "sglang.srt.speculative.spec_utils.spec_need_hidden_states": need_hidden_states,
    "sglang.srt.speculative.dflash_utils.validate_dflash_request": validate_request,
}


def add_text_only_taps() -> None:
    """Give the text-only Qwen3.5 class the method by which DFLASH asks for hidden rows; the multimodal one has it."""
    from sglang.srt.models.qwen3_5_text import Qwen3_5ForCausalLM

    def set_dflash_layers_to_capture(self, layer_ids):
        self.capture_aux_hidden_states = True
        last = len(self.model.layers) - 1
        # SGLang takes a layer's output where the next one starts, and counts the embedding as 0
        self.model.set_dflash_layers_to_capture([place + 1 for place in layer_ids if place < last])
        if last in layer_ids:
            _tap_last_layer(self.model)

    if not hasattr(Qwen3_5ForCausalLM, "set_dflash_layers_to_capture"):
        Qwen3_5ForCausalLM.set_dflash_layers_to_capture = set_dflash_layers_to_capture


def _tap_last_layer(body) -> None:
    """Let a body return the output of its last layer too, behind the other taps: no layer starts after it."""
    kept = []

    def keep(norm, arguments):
        kept[:] = [sum(x for x in arguments if x is not None)]

    def append(body, arguments, output):
        hidden, taps = output if isinstance(output, tuple) else (output, [])
        return hidden, [*taps, *kept]

    body.norm.register_forward_pre_hook(keep)
    body.register_forward_hook(append)
