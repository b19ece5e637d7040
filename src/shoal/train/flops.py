"""FLOPs of a micro-batch, for MFU."""

import math
from collections.abc import Callable

from shoal.config.mesh import Mesh
from shoal.models.anatomy import matmul_parameters
from shoal.models.attention import attention_width
from shoal.models.prepare import PreparedModel


def count_flops(
    prepared: PreparedModel, mesh: Mesh, head_share: float = 1.0, attended: Callable[[int], float] = float
) -> Callable[[int, int], float]:
    """FLOPs per device of a micro-batch of (sequences, length), by the usual model FLOPs formula.

    Six per matmul parameter and token (four where it is frozen and needs no weight gradient), plus attention without
    the causal mask's savings, to `attended` keys per query. Devices that share a micro-batch share them. NaN for
    mixtures of experts, of which the active share is not known. `head_share`: of the tokens, those with logits.
    """
    model, anatomy = prepared.model, prepared.anatomy
    settings = model.config.get_text_config()
    if any(getattr(settings, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return lambda sequences, length: math.nan
    if getattr(settings, "num_hidden_layers", None) is None:  # BLT has several models within
        return lambda sequences, length: math.nan
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    adapters = 0 if prepared.adapters is None else prepared.adapters.parameters
    per_token: float = 4 * (prepared.matmul_parameters + adapters) + 2 * matmul_parameters(trained, anatomy)
    if head_share < 1:
        output = model.get_submodule(anatomy.head).weight if not anatomy.classifies else None
        size = 0 if output is None else output.numel()
        per_token -= (1 - head_share) * size * (6 if output is not None and output.requires_grad else 4)
    attention: int = 12 * settings.num_hidden_layers * attention_width(settings)
    sharing = mesh.pp * mesh.cp * mesh.tp
    return lambda sequences, length: sequences * length * (per_token + attention * attended(length)) / sharing
