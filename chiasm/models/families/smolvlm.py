"""SmolVLM: Idefics3 with a smaller tower."""

from dataclasses import replace

from chiasm.models.families import idefics3

FAMILY = replace(idefics3.FAMILY, model_type="smolvlm", title="SmolVLM")
