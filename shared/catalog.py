"""JSON models of what an operator registers for all tenants: base models and calibrations."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from shared.recipe import Precision, Sha256
from shared.strict_model import StrictModel


class BaseView(StrictModel):
    """A registered base model, which recipes name."""

    name: str = Field(description="name by which jobs and recipes use it")
    hub_id: str | None = Field(
        description="its id on the Hugging Face Hub, which exported adapters name; null: unknown"
    )
    sha256: Sha256 = Field(description="pins its files")
    architecture: str = Field(description="such as llama")
    parameters: int = Field(description="number of weights; tied weights count once")
    layers: int
    hidden: int = Field(description="size of a hidden state")
    vocabulary: int = Field(description="number of tokens")
    context_length: int = Field(description="most tokens of a text")
    precisions: list[Precision] = Field(description="precisions in which its programs can train")
    chat_template: bool = Field(description="true: chat routes accept it")
    created_at: datetime


class CalibrationView(StrictModel):
    """A registered calibration. Recipes of its base model may take A from it, at any rank up to its width."""

    sha256: Sha256 = Field(description="sha256 of the calibration file, by which recipes name it")
    base: str = Field(description="name of the base model")
    kind: str = Field(description="gradients or activations")
    task: str = Field(description="name of the task that turned records into prompts")
    examples: int = Field(description="number of records that it was computed from")
    modules: int = Field(description="number of linear layers covered")
    width: int = Field(description="directions per layer: the largest rank it supports")
    size: int = Field(description="bytes")
    created_at: datetime
