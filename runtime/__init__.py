"""Load a bundle and generate: `LLM` and `SamplingParams`."""

from plankiln.runtime.llm import LLM
from plankiln.runtime.sampling import SamplingParams

__all__ = ["LLM", "SamplingParams"]
