"""SGLang 0.5.17's own scheduler and workers on a CPU, in one process: its Triton kernels run in Triton's interpreter.

`python sglang_cpu.py JOB.json` serves the requests of a job, one JSON line each on standard output. What has no CPU
form is replaced here and nowhere else: prefill's chunked GDN rule (token by token), and CUDA graphs (what was captured
runs again, its results go to the captured addresses). Needs TRITON_INTERPRET=1 and SGLang's environment.
"""

import array
import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

TURNS = 300  # of the scheduler's loop, for a batch of requests
replays = Counter()  # what was replayed: "target", "draft"
replaced = []
NO_STREAM = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
NO_EVENT = SimpleNamespace(record=lambda *stream: None, synchronize=lambda: None, query=lambda: True)


def import_without_kernels() -> None:
    """Import torchvision beside another torch build (its ops are declared, never called); no rotary kernel exists."""
    real = torch.library.register_fake
    torch.library.register_fake = lambda name, *rest, **named: (
        (lambda function: function) if str(name).startswith("torchvision::") else real(name, *rest, **named)
    )
    try:
        import torchvision  # noqa: F401
    finally:
        torch.library.register_fake = real
    for name in ("vllm", "vllm._custom_ops"):
        sys.modules[name] = ModuleType(name)
    sys.modules["vllm"].__path__ = []
    sys.modules["vllm._custom_ops"].rotary_embedding = None


def extend(kernel, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **_):
    """Prefill of a GDN layer in place of SGLang's chunked kernel: q, k [1, T, H, K], v [1, T, HV, V]."""
    group, out = v.shape[2] // q.shape[2], torch.empty_like(v)
    q, k = (x[0].float() * (x[0].float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(group, 1) for x in (q * q.shape[-1] ** -0.5, k))
    bounds = query_start_loc.tolist()
    for slot, first, last in zip(cache_indices.tolist(), bounds[:-1], bounds[1:], strict=True):
        state = ssm_states[slot].transpose(-1, -2).float()
        for t in range(first, last):
            state = state * g[0, t].float().exp()[:, None, None]
            write = (v[0, t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[0, t].float()[:, None]
            state = state + k[t][:, :, None] * write[:, None, :]
            out[0, t] = torch.einsum("hk,hkv->hv", q[t], state)
        ssm_states[slot] = state.transpose(-1, -2)
    return out, None, None


def scatter(caches, slots, steps, track_slots, track_steps):
    """Commit of the recurrent kernel's states of every node, which SGLang's own form does on CUDA alone."""
    assert track_slots is None
    for row, (slot, step) in enumerate(zip(slots.tolist(), steps.tolist(), strict=True)):
        caches.temporal[:, slot] = caches.intermediate_ssm[:, row, step]
        caches.conv[0][:, slot] = caches.intermediate_conv_window[0][:, row, step]


class Again:
    """A graph backend without graphs: a replay runs what was captured, with the attention metadata of the capture."""

    def __init__(self, runner):
        self.runner, self.captured = runner, {}

    @contextlib.contextmanager
    def capture_session(self, stream):
        yield

    replay_session = contextlib.nullcontext

    def capture_one(self, key, forward, capture_inputs=None, post_warmup_hook=None):
        output = forward()
        backend = self.runner.attn_backend
        parts = [backend, *(getattr(backend, f"{kind}_attn_backend", None) for kind in ("full", "linear"))]
        metadata = [(part, part.forward_metadata) for part in parts if "forward_metadata" in vars(part or object)]
        self.captured[key] = (forward, output, metadata)

    def can_run(self, batch, key):
        return key in self.captured

    def replay(self, key, batch):
        forward, output, metadata = self.captured[key]
        for part, kept in metadata:
            part.forward_metadata = kept
        fresh = forward()
        for name in ("next_token_logits", "hidden_states"):
            if getattr(output, name) is not None:
                getattr(output, name).copy_(getattr(fresh, name))
        replays["draft" if self.runner.model_runner.is_draft_worker else "target"] += 1
        return output


class Part:
    """A part of the plugin's own device work, never captured."""

    def __init__(self, function, clock):
        self._function = function

    def warm_up(self, stream):
        self._function()

    def capture(self):
        pass

    def __call__(self):
        return self._function()


def replace_kernels() -> None:
    """Replace what has no CPU form, and let the interpreter take masks of any number type."""
    import numpy
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
    from triton.runtime.interpreter import InterpreterBuilder

    TritonGDNKernel.extend, TritonGDNKernel.supports_packed_decode = extend, False
    hybrid_linear_attn_backend.scatter_mamba_states_after_mtp_verify = scatter
    layernorm_gated._get_sm_count = lambda device: 1
    cache_locs._is_cuda = True
    torch.cpu.device = lambda index: contextlib.nullcontext()
    zeros = torch.zeros
    # SGLang's buffers of every node's state name the device themselves
    torch.zeros = lambda *size, **named: zeros(*size, **{**named, **({"device": "cpu"} if "device" in named else {})})
    handle = speculative_hook._handle_dflash

    def handle_as_cuda(arguments):
        device, arguments.device = arguments.device, "cuda"
        handle(arguments)
        arguments.device = device

    speculative_hook._handle_dflash = handle_as_cuda
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        real = getattr(InterpreterBuilder, name)

        def with_flags(builder, *arguments, real=real, place=place):
            arguments[place].data = numpy.asarray(arguments[place].data).astype(bool)
            return real(builder, *arguments)

        setattr(InterpreterBuilder, name, with_flags)


def use_triton_forms() -> None:
    """Let the plugin grow and draw as on a GPU: its Triton kernels run in the interpreter too."""
    from baselines.sglang import grower

    forms = grower.Forms(growth="triton")
    grower.Forms = lambda: forms
    grower.draw_rows = grower.make_fast_draw()


def replace_graphs() -> None:
    """Let SGLang's graph runners capture and replay on the CPU (see Again)."""
    from sglang.srt.model_executor import model_runner
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as runners

    from baselines.sglang import grower

    def capture(*, model_runner):
        runner = runners.DecodeCudaGraphRunner(model_runner)
        return cuda_graph_setup.GraphCapture(
            runner=runner, memory_phase="target_verify", memory_usage_gb=0, capture_time=0
        )

    cuda_graph_setup.capture_decode_graph = model_runner.capture_decode_graph = capture
    runners.resolve_decode_backend = Again
    runners.graph_capture = lambda: contextlib.nullcontext(SimpleNamespace(stream=NO_STREAM))
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    grower.Part = Part
    torch.cuda.Stream = torch.cpu.Stream = torch.cpu.current_stream = lambda *_, **__: NO_STREAM
    torch.cpu.stream = torch.cpu.StreamContext = lambda stream: contextlib.nullcontext()
    torch.cpu.Event = lambda *_, **__: NO_EVENT


class Engine:
    """A scheduler whose loop is turned by hand."""

    def __init__(self, words: list[str]):
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, prepare_server_args

        arguments = prepare_server_args(words)
        publish(arguments, role="scheduler")
        self.scheduler = Scheduler(arguments, PortArgs.init_new(arguments), 0, 0, 0, 0, 0, 0, None)
        self.sent = []
        self.scheduler.output_streamer.send_to_detokenizer = SimpleNamespace(
            send_output=lambda found, *_: self.sent.append(found)
        )

    def serve(self, requests: list[dict]) -> dict[str, dict]:
        """Serve requests sent at once; return what was sent back of each. `abort` ends one after so many chunks."""
        from sglang.srt.managers.io_struct import AbortReq

        self.sent, found = [], {}
        self.scheduler.process_input_requests([_input(request) for request in requests])
        for _ in range(TURNS):
            batch, found = self._turn(), _replies(self.sent)
            if batch is None and all(found.get(request["id"], {}).get("finish") for request in requests):
                return found
            for request in requests:
                if request.get("abort") == len(found.get(request["id"], {}).get("chunks", ())):
                    self.scheduler.process_input_requests([AbortReq(rid=request["id"])])
        raise RuntimeError(f"{TURNS} turns of the scheduler did not end the requests; {found}")

    def _turn(self):
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        else:
            scheduler.on_idle()  # checks the memory's counts, and raises
        scheduler.last_batch = batch
        return batch


def _input(request: dict):
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(**request["sampling"])
    sampling.normalize(None)
    unused = dict.fromkeys(("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
    return TokenizedGenerateReqInput(
        rid=request["id"], input_ids=array.array("q", request["tokens"]), sampling_params=sampling, stream=True,
        return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, **unused,
    )  # fmt: skip


def _replies(sent: list) -> dict[str, dict]:
    found = {}
    for output in sent:
        for place, name in enumerate(output.rids if hasattr(output, "rids") else [output.rid]):
            reply = found.setdefault(name, {"tokens": [], "chunks": [], "steps": None, "finish": None})
            if not hasattr(output, "rids"):  # refused or aborted while it waited
                reply["finish"] = output.finished_reason
                continue
            tokens = list(output.output_ids[place])
            reply["tokens"] += tokens
            reply["chunks"].append(len(tokens))
            reply["finish"] = output.finished_reasons[place]
            if output.spec_verify_ct:
                reply["steps"] = output.spec_verify_ct[place]
                reply["histogram"] = output.spec_correct_drafts_histogram[place]
    return found


def register() -> None:
    """As a plugin of a whole server, in each of its processes (some load plugins twice)."""
    if not replaced:
        replaced.append(True)
        replace_kernels()
        replace_graphs()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    import_without_kernels()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    replace_kernels()
    replace_graphs()
    if job["triton_forms"]:
        use_triton_forms()
    engine = Engine(job["words"])
    for requests in job["batches"]:
        print("REPLY " + json.dumps(engine.serve(requests)), flush=True)
    print("REPLAYS " + json.dumps(replays), flush=True)


if __name__ == "__main__":
    main()
