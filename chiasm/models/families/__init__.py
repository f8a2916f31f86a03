"""The families that are served, each in one file. A family that is not listed here is refused."""

from collections.abc import Mapping

from chiasm.models.checkpoint import CheckpointError
from chiasm.models.families import llava
from chiasm.models.family import Family

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (llava.FAMILY,)}


def family_of(model_type: str) -> Family:
    """The family of a config's `model_type`.

    Raises:
        CheckpointError: the type is no vision-language family whose exactness is tested here.
    """
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"the model type {model_type!r} is not among the vision-language families whose split "
            f"is tested ({', '.join(sorted(FAMILIES))}); give a checkpoint of one of these"
        )
    return FAMILIES[model_type]
