"""The tree that the target verifies, as SGLang's attention backends take it. Imported inside SGLang 0.5.17 only."""

from dataclasses import dataclass

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


@dataclass
class TreeVerifyInput(DFlashVerifyInput):
    """DFLASH's verify input with a mask and, for SGLang's own GDN kernels, the tree's links ([1, N] int64)."""

    retrieve_next_token: torch.Tensor | None = None
    retrieve_next_sibling: torch.Tensor | None = None
    retrieve_index: torch.Tensor | None = None

    @property
    def tree_topk(self) -> int:
        """-1: the children of a node are no fixed number."""
        return -1

    @property
    def max_tree_depth(self) -> int:
        return self.draft_token_num
