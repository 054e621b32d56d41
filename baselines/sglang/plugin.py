"""The plugin that SGLang 0.5.17 loads in every process: algorithm DFLASH_TFM and the hooks that its trees need.

Entry point of group `sglang.srt.plugins`. Registering imports SGLang's registries and no model; the worker is imported
when a server asks for the algorithm. SGLang only logs a plugin that fails, so the runner checks what the server runs.
"""

from baselines.sglang import hooks
from baselines.sglang.arguments import make_algorithm, validate
from baselines.sglang.shared_state import NAME


def register() -> None:
    """Register the algorithm and its hooks; raises ImportError naming the version where SGLang is another one."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    if get_spec(NAME) is not None:
        return

    @SpeculativeAlgorithm.register(
        NAME, supports_overlap=False, validate_server_args=validate, spec_class=make_algorithm()
    )
    def make_worker(server_args):
        del server_args
        from baselines.sglang.worker import TreeWorker

        return TreeWorker

    for target, hook in hooks.AROUND.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    hooks.add_text_only_taps()
