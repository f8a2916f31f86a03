"""Qwen2.5-VL: as Qwen2-VL, with windows in the tower."""

from dataclasses import replace

from chiasm.models.families import qwen2_vl

FAMILY = replace(qwen2_vl.FAMILY, model_type="qwen2_5_vl", title="Qwen2.5-VL")
