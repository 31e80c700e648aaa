"""Classifies records with an adapter of this device, as `POST /v1/adapters/{name}/classify` of a server does."""

from __future__ import annotations

from collections.abc import Generator

from device_agent.errors import RuntimeFailed
from device_agent.inference.predict import predict
from device_agent.serving.models import DeviceModels
from shared.errors import Unavailable
from shared.scoring import ClassifyRequest, ClassifyResult, ScoredBy


def classify(models: DeviceModels, name: str, request: ClassifyRequest) -> Generator[ClassifyResult, None, None]:
    """Yields the result, once. Raises the errors of `DeviceModels.use` and `ClassifyRequest.record`, or Unavailable."""
    try:
        model, revision = models.use(name)
        prediction = predict(model, request.record(model.task), "fields")
    except RuntimeFailed as error:
        models.close()
        raise Unavailable(error.detail) from error
    scored_by = ScoredBy(base=model.manifest.recipe.base.name, adapter=name, revision=revision)
    scores = [(each.label, each.probability, each.log_probability) for each in prediction.candidates]
    yield ClassifyResult.of(scored_by, scores)
