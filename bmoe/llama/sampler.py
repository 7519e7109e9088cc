"""Drawing tokens by llama.cpp's own samplers."""

from __future__ import annotations

from . import library
from .context import Context


class SamplerChain:
    """llama.cpp's own sampler chain: top-k, top-p, temperature, then a draw with `seed`."""

    def __init__(self, temp: float, top_k: int, top_p: float, seed: int) -> None:
        C = library.C
        self._chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        if top_k > 0:
            C.llama_sampler_chain_add(self._chain, C.llama_sampler_init_top_k(top_k))
        if top_p < 1.0:
            C.llama_sampler_chain_add(self._chain, C.llama_sampler_init_top_p(top_p, 1))
        C.llama_sampler_chain_add(self._chain, C.llama_sampler_init_temp(temp))
        C.llama_sampler_chain_add(self._chain, C.llama_sampler_init_dist(seed))

    def sample(self, context: Context) -> int:
        """Draws from the logits of the last decoded token and notes the choice."""
        return int(library.C.llama_sampler_sample(self._chain, context.handle, -1))

    def close(self) -> None:
        if self._chain is not None:
            library.C.llama_sampler_free(self._chain)
            self._chain = None
