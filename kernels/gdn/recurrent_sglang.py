"""SGLang's recurrent tree-verify kernel as an arm of benchmarks, loaded from an unpacked sglang wheel.

Its file needs torch, Triton and a few predicates about the device that it imports from the rest of the package. Those
are answered here, so that nothing else of SGLang has to be installed; the file itself is not changed.
"""

import importlib.util
import sys
import types
from pathlib import Path

import torch
from torch import Tensor

FILES = (
    "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py",  # 0.5.23
    "sglang/kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py",  # 0.5.17
)


def load(site: Path):
    """Return `fused_sigmoid_gating_delta_rule_update` of the sglang under `site` (site-packages or an unpacked wheel).

    Raises ValueError where the file is not there."""
    found = [site / name for name in FILES if (site / name).is_file()]
    if not found:
        raise ValueError(f"sglang: {site} is not allowed (allowed: a folder with one of {', '.join(FILES)})")
    on_gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if on_gpu else (0, 0)
    answers = {
        "sglang.srt.utils": {
            "is_cuda": lambda: on_gpu,
            "is_hip": lambda: False,
            "is_cpu": lambda: False,
            "is_npu": lambda: False,
            "is_gfx95_supported": lambda: False,
            "is_sm90_supported": lambda: capability[0] == 9,
            "get_device_sm": lambda: capability[0] * 10 + capability[1],
        },
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: capability[0] >= 9},
    }
    packages = {name.rsplit(".", depth)[0] for name in answers for depth in range(1, name.count(".") + 1)}
    stand_ins = {name: types.ModuleType(name) for name in packages | set(answers)}
    for name, functions in answers.items():
        vars(stand_ins[name]).update(functions)
    kept = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        spec = importlib.util.spec_from_file_location("sglang_recurrent_gdn", found[0])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name, module_before in kept.items():
            del sys.modules[name]
            if module_before is not None:
                sys.modules[name] = module_before
    return module.fused_sigmoid_gating_delta_rule_update


def launch_of(kernel, arguments: tuple[Tensor, ...], states: Tensor):
    """Return a launch of SGLang's `kernel` on (q, k, v, log_decay, beta, parents, state) of one request.

    The kernel forms the gates itself, so it is given the numbers whose gates are `log_decay` and `beta`; q and k come
    normalised and scaled. `states` [1, N, HV, V, K] takes every node's state, as SGLang's engine keeps them. The
    launch returns (out [1, N, HV, V],); the state is read only.
    """
    q, k, v, log_decay, beta, parents, state = arguments
    rate = -log_decay[0].float()
    # softplus(x) = rate with A_log = dt_bias = 0
    decay_input = rate + torch.log(-torch.expm1(-rate))
    constant = torch.zeros(v.shape[2], device=v.device)
    options = {
        "A_log": constant,
        "a": decay_input,
        "dt_bias": constant,
        "softplus_beta": 1.0,
        "softplus_threshold": 20.0,
        "b": torch.logit(beta[0].float()),
        "initial_state_source": state.transpose(-1, -2).contiguous(),
        "initial_state_indices": torch.zeros(1, dtype=torch.int32, device=v.device),
        "scale": 1.0,
        "use_qk_l2norm_in_kernel": False,
        "cu_seqlens": torch.tensor([0, v.shape[1]], dtype=torch.int32, device=v.device),
        "disable_state_update": True,
        "intermediate_states_buffer": states,
        "intermediate_state_indices": torch.zeros(1, dtype=torch.int32, device=v.device),
        "cache_steps": states.shape[1],
        "retrieve_parent_token": parents.clamp(min=0).int(),
    }
    return lambda: (kernel(q=q, k=k, v=v, **options).reshape(v.shape),)
