"""A version's model card: what it is, how it was made and how well it did. Facts only, the same at every call."""

from __future__ import annotations

from server.adapters.models import Adapter, StoredVersion
from shared.job import JobRequest


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"


def model_card(adapter: Adapter, version: StoredVersion, request: JobRequest) -> str:
    """README.md of a PEFT directory."""
    recipe, result, training = version.recipe, version.result, request.training
    eps = training.eps_for(recipe)
    layers = recipe.layers if isinstance(recipe.layers, str) else ", ".join(map(str, recipe.layers))
    task = request.task if isinstance(request.task, str) else request.task.name
    rows = (
        ("base model", f"{recipe.base.name} (sha256 {recipe.base.sha256})"),
        ("adapter", f"{adapter.name}, version {version.version}"),
        ("made", version.created_at.strftime("%Y-%m-%d %H:%M UTC")),
        ("method", f"MobiZO: zeroth-order LoRA-FA, q = {recipe.queries}, E = {recipe.effective_batch}"),
        ("LoRA", f"rank {recipe.rank}, alpha {recipe.alpha:g}, on {', '.join(recipe.targets)}; A frozen"),
        ("adapted layers", layers),
        ("trained on", f"frozen weights in {recipe.precision}; estimator {recipe.estimator}, {recipe.noise} noise"),
        ("training", f"{result.steps} steps, lr {training.lr:g} ({training.schedule}), eps {eps:g}"),
        ("taken after step", str(result.best_step)),
        ("task", task),
        ("loss", recipe.loss),
        ("training examples", str(result.train_examples)),
        ("test accuracy before", _share(result.zero_shot_accuracy)),
        ("test accuracy after", _share(result.tuned_accuracy)),
        ("recipe", version.recipe_id),
        ("LoRA-B sha256", version.sha256),
    )
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        "---\nlibrary_name: peft\ntags:\n- lora\n- mobizo\n---\n\n"
        f"# {adapter.name}\n\n"
        "A LoRA adapter that was trained with forward passes only, on the device that holds the data. The data did\n"
        "not leave the device.\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        "Load it with PEFT onto the base model named above:\n\n"
        "```python\nfrom peft import PeftModel\n\nmodel = PeftModel.from_pretrained(base_model, directory)\n```\n"
    )
