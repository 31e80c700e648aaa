"""Reads the rotary position embedding of a config.json: its base, its share of a head, and its scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from server.compiler.checkpoints.architectures import CONTEXT, FULL, SLIDING, Architecture, Options, check_supported
from server.compiler.checkpoints.base import Rope
from shared.errors import UnreadableCheckpoint

SCALINGS = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")


def _rope_parameters(model_type: str, architecture: Architecture, options: Options, kind: str) -> dict[str, Any]:
    """Returns the rotary parameters of one kind of layer, from `rope_parameters` or the options that preceded it."""
    rope_parameters, scaling = options["rope_parameters"] or {}, options["rope_scaling"] or {}
    if rope_parameters and (scaling or architecture.nested_rope != (rope_parameters.keys() <= {FULL, SLIDING})):
        raise UnreadableCheckpoint(f"config.json's rope_parameters do not match a {model_type} model")
    theta = options["rope_theta"]
    if kind == SLIDING and architecture.nested_rope:
        theta, scaling = options["rope_local_base_freq"] or theta, {}
    kind_parameters = (rope_parameters.get(kind) or {}) if architecture.nested_rope else rope_parameters
    outer = {"rope_theta": theta, "partial_rotary_factor": options["partial_rotary_factor"]}
    return {**outer, **kind_parameters, **scaling}


def rotary_width(model_type: str, architecture: Architecture, options: Options, head_dim: int) -> int:
    """Returns how many features of a head are rotated."""
    share = _rope_parameters(model_type, architecture, options, FULL)["partial_rotary_factor"]
    if architecture.rotary_share is None and share not in (None, 1):
        check_supported(model_type, [f"partial rotary embedding {share}"])
    rotary_dim = int(head_dim * (architecture.rotary_share or 1.0 if share is None else share))
    if rotary_dim % 2 or head_dim % 2 or not 0 < rotary_dim <= head_dim:
        check_supported(model_type, [f"a rotary embedding of {rotary_dim} of {head_dim} features"])
    return rotary_dim


def read_rope(model_type: str, architecture: Architecture, options: Options, kind: str, rotary_dim: int) -> Rope:
    """Returns the rotary embedding of one kind of layer."""
    parameters = _rope_parameters(model_type, architecture, options, kind)
    name = parameters.get("rope_type", parameters.get("type", "default"))
    if name in ("su", "yarn") and model_type == "phi3":
        name = "longrope"  # as in transformers
    if name not in SCALINGS:
        check_supported(model_type, [f"RoPE scaling {name!r}"])
    theta, context = parameters["rope_theta"], options[CONTEXT]
    original = options["original_max_position_embeddings"] or parameters.get("original_max_position_embeddings")
    original = original or context
    if name in ("default", "dynamic"):  # dynamic scaling begins beyond the context length
        return Rope(theta=theta)
    if name == "longrope":
        factor = parameters.get("factor") or context / original
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        given = parameters.get("attention_factor")
        return Rope(
            theta=theta,
            kind="factors",
            factors=parameters["short_factor"],
            long_factors=parameters["long_factor"],
            original_context=original,
            attention_factor=usual if given is None else given,
        )
    factor = parameters["factor"]
    if name == "yarn":
        return _yarn(parameters, factor or context / original, original, rotary_dim)
    scaled: dict[str, Any] = {}
    if name == "llama3":
        scaled["low_freq_factor"] = parameters["low_freq_factor"]
        scaled["high_freq_factor"] = parameters["high_freq_factor"]
        scaled["original_context"] = original
    return Rope(theta=theta, kind=name, factor=factor, **scaled)


def _yarn(parameters: Mapping[str, Any], factor: float, original: int, rotary_dim: int) -> Rope:
    """Returns YaRN's rotary embedding (Peng et al., 2023): pairs beyond a ramp are stretched by the factor."""

    def temperature(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0

    def pair(turns: float) -> float:
        """The pair of features that turns so often within the original context."""
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(parameters["rope_theta"]))

    attention_factor = parameters.get("attention_factor")
    numerator, denominator = (float(parameters.get(name) or 0.0) for name in ("mscale", "mscale_all_dim"))
    if attention_factor is None:
        both = numerator and denominator
        attention_factor = temperature(numerator) / temperature(denominator) if both else temperature(1.0)
    first, last = pair(parameters.get("beta_fast") or 32), pair(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    return Rope(
        theta=parameters["rope_theta"],
        kind="yarn",
        factor=factor,
        ramp=(first, last + 0.001 if first == last else last),
        original_context=original,
        attention_factor=attention_factor,
    )
